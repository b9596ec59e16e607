"""System calls that no Python program needs and that reach past the other walls.

Namespaces keep a program from files, processes and the network; this filter takes away what they do
not cover: memory that no limit counts (System V segments, memfds), sockets that ignore network
namespaces (vsock reaches the host of a virtual machine), and the parts of the kernel that most ways
out of a container have used.
"""

from __future__ import annotations

import platform
import struct
from dataclasses import dataclass
from errno import ENOSYS, EPERM
from functools import cache

from rlpost.errors import SandboxError

# name: (number on x86_64, number on aarch64)
_REFUSED = {
    # other processes, and ways to read or stop them
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    # keys of the kernel's keyrings
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # memory that outlives or escapes the count of a process's own
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # system calls made by the kernel on another's behalf, past this filter
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # the machine itself
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "personality": (135, 92),
    "vhangup": (153, 58),
}
_CLONE, _CLONE3, _IOCTL, _SOCKET, _SOCKETPAIR = (56, 220), (435, 435), (16, 29), (41, 198), (53, 199)
_NEW_NAMESPACE = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: all that a network namespace confines
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: typing into somebody's terminal

# Instructions of a classic BPF program (linux/bpf_common.h) and where struct seccomp_data keeps things
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE, _ABSENT = 0x00050000 | EPERM, 0x00050000 | ENOSYS


@dataclass(frozen=True)
class _Machine:
    column: int
    audit: int  # AUDIT_ARCH_*
    foreign_from: int  # numbers from here on belong to another calling convention


_MACHINES = {"x86_64": _Machine(0, 0xC000003E, 0x40000000), "aarch64": _Machine(1, 0xC00000B7, 0xFFFFFFFF)}


@cache
def program(machine: str | None = None) -> bytes:
    """The filter for `machine` (None: this one), as an array of struct sock_filter.

    Raises SandboxError for one whose system call numbers are not known here.
    """
    name = machine or platform.machine()
    if name not in _MACHINES:
        raise SandboxError(
            f"the sandbox knows the system calls of {' and '.join(_MACHINES)}, not of {name}: ask for the weaker "
            "mode with sandbox=limits (on the command line: tools.python_sandbox=limits)"
        )
    this = _MACHINES[name]
    code = [
        _op(_LOAD, _MACHINE),
        _op(_IF_EQUAL, this.audit, 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER),
        _op(_IF_AT_LEAST, this.foreign_from, 0, 1),
        _op(_RETURN, _REFUSE),
    ]
    for numbers in _REFUSED.values():
        code += [_op(_IF_EQUAL, numbers[this.column], 0, 1), _op(_RETURN, _REFUSE)]
    # clone3 keeps its flags in memory, where no filter can read them; C libraries fall back to clone
    code += [_op(_IF_EQUAL, _CLONE3[this.column], 0, 1), _op(_RETURN, _ABSENT)]
    code += _only_for(_CLONE[this.column], _ARGUMENT_0, [_op(_IF_ANY_BIT, _NEW_NAMESPACE, 0, 1)])
    for number in (_SOCKET[this.column], _SOCKETPAIR[this.column]):
        code += _only_for(number, _ARGUMENT_0, [_op(_IF_EQUAL, family, 3 - i, 0) for i, family in enumerate(_FAMILIES)])
    sti, linux = _TERMINAL_INPUT
    code += _only_for(_IOCTL[this.column], _ARGUMENT_1, [_op(_IF_EQUAL, sti, 1, 0), _op(_IF_EQUAL, linux, 0, 1)])
    return b"".join([*code, _op(_RETURN, _ALLOW)])


def _only_for(number: int, argument: int, tests: list[bytes]) -> list[bytes]:
    """For system call `number`, load `argument` and test it; the tests lead to a refusal, or over it."""
    body = [_op(_LOAD, argument), *tests, _op(_RETURN, _REFUSE), _op(_RETURN, _ALLOW)]
    return [_op(_IF_EQUAL, number, 0, len(body)), *body]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction; the last two say how many instructions a test skips."""
    return struct.pack("HBBI", code, if_true, if_false, value)
