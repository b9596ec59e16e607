"""Parts of the sandbox on their own: the filter of system calls, what is kept of output, the limits."""

from __future__ import annotations

import re
import resource
import struct

import pytest

from rlpost.errors import SandboxError
from rlpost.sandbox import Execution, KilledBy, Limits
from rlpost.tools.sandbox.process import Capture, tasks_counted_with
from rlpost.tools.sandbox.sandbox import seccomp_filter

ALLOW, REFUSE, ABSENT, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # EPERM is 1, ENOSYS 38
X86, ARM, I386 = 0xC000003E, 0xC00000B7, 0x40000003


def filtered(machine: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """What the filter says of a system call, by an interpreter of its instructions written from their definition."""
    arch = audit or (X86 if machine == "x86_64" else ARM)
    said = struct.pack("<IIQ6Q", number, arch, 0, *[*arguments, 0, 0, 0, 0, 0, 0][:6])
    code = list(struct.iter_unpack("HBBI", seccomp_filter(machine)))
    place, value = 0, 0
    while True:
        operation, if_true, if_false, operand = code[place]
        place += 1
        match operation:
            case 0x20:
                value = struct.unpack_from("<I", said, operand)[0]
            case 0x15:
                place += if_true if value == operand else if_false
            case 0x35:
                place += if_true if value >= operand else if_false
            case 0x45:
                place += if_true if value & operand else if_false
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"no instruction {operation:#x}")


@pytest.mark.parametrize(
    ("call", "x86", "arm", "arguments", "verdict"),
    [
        ("read", 0, 63, (0,), ALLOW),
        ("write", 1, 64, (1,), ALLOW),
        ("ptrace", 101, 117, (16,), REFUSE),
        ("unshare", 272, 97, (0x10000000,), REFUSE),
        ("mount", 165, 40, (), REFUSE),
        ("modify_ldt", 154, 462, (), REFUSE),  # the second is of no use to it: no number below 463 is absent
        ("listmount of a later kernel", 458, 458, (), REFUSE),
        ("open_tree_attr of a later kernel", 467, 467, (), ABSENT),
        ("getpeername", 52, 205, (), ALLOW),  # the last of the list
        ("clone3", 435, 435, (), ABSENT),
        ("clone of a thread", 56, 220, (0x3D0F00,), ALLOW),
        ("clone with a user namespace", 56, 220, (0x10000000,), REFUSE),
        ("clone with a mount namespace", 56, 220, (0x00020000,), REFUSE),
        ("socket unix", 41, 198, (1,), REFUSE),
        ("socket inet", 41, 198, (2,), REFUSE),
        ("prctl naming a thread", 157, 167, (15,), ALLOW),
        ("prctl hiding from /proc", 157, 167, (4, 0), REFUSE),
        ("fcntl of flags", 72, 25, (3, 4), ALLOW),
        ("fcntl for a larger pipe", 72, 25, (3, 1031), REFUSE),
        ("socketpair unix", 53, 199, (1,), ALLOW),
        ("socketpair tipc", 53, 199, (30,), REFUSE),
        ("ioctl size of a terminal", 16, 29, (0, 0x5413), ALLOW),
        ("ioctl of a device", 16, 29, (0, 0x1234), REFUSE),
        ("ioctl typing", 16, 29, (0, 0x5412), REFUSE),
        ("ioctl of the console", 16, 29, (0, 0x541C), REFUSE),
    ],
)
def test_the_filter_refuses_what_it_should_and_nothing_else(
    call: str, x86: int, arm: int, arguments: tuple[int, ...], verdict: int
) -> None:
    assert filtered("x86_64", x86, *arguments) == verdict
    assert filtered("aarch64", arm, *arguments) == verdict


def test_other_calling_conventions_are_no_way_around_the_filter() -> None:
    assert filtered("x86_64", 0, audit=I386) == KILL
    assert filtered("x86_64", 0x40000000) == REFUSE  # x32
    assert filtered("aarch64", 63, audit=X86) == KILL


def test_a_machine_whose_calls_are_not_known_has_no_sandbox() -> None:
    with pytest.raises(SandboxError, match="riscv64"):
        seccomp_filter("riscv64")


def test_the_beginning_and_the_end_of_output_are_kept() -> None:
    capture = Capture(10)
    for part in (b"abc", b"defgh", b"", b"ijklmnop", b"q"):
        capture.add(part)
    assert re.fullmatch(r"abcde\n\[7 .*\]\nmnopq", capture.text())
    assert (capture.total, capture.cut_bytes) == (17, 7)
    whole = Capture(10)
    whole.add(b"0123456789")
    assert (whole.text(), whole.cut_bytes) == ("0123456789", 0)
    broken = Capture(10)
    broken.add("é".encode()[:1] + b"x")
    assert broken.text() == "\ufffdx"


@pytest.mark.parametrize(
    ("exit_code", "killed_by", "reason"),
    [
        (None, KilledBy.time, "Code execution timed out"),
        (None, KilledBy.files, "Code execution made more files than it is allowed"),
        (None, KilledBy.memory, "Code execution took more memory than it is allowed"),
        (139, None, "Python was ended by SIGSEGV"),
        (255, None, "Python was ended by signal 127"),
        (7, None, "Python ended early with exit code 7"),
        (None, None, "Python closed the pipes that it is run by"),
    ],
)
def test_what_ended_a_program_is_said_in_words(exit_code: int | None, killed_by: KilledBy | None, reason: str) -> None:
    execution = Execution("", "", exit_code, killed_by, finished=False, cut_bytes=0, seconds=0.1)
    assert (execution.reason, execution.claims_success) == (reason, False)


def test_limits_become_those_of_a_process() -> None:
    rlimits = Limits(memory_mb=100, processes=5, disk_mb=2).rlimits(cpu_seconds=9, other_tasks=1000)
    kinds = resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CPU
    assert [rlimits[kind] for kind in kinds] == [104_857_600, 2_097_152, 1005, 9]


def test_a_users_other_processes_count_if_the_kernel_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "5.10.0-28-amd64")
    assert tasks_counted_with(own_user=True, own_namespace=True) == 0
    assert tasks_counted_with(own_user=False, own_namespace=True) >= 1  # at least this very process
    monkeypatch.setattr("platform.release", lambda: "6.1.0+rpt")
    assert tasks_counted_with(own_user=False, own_namespace=True) == 0
    assert tasks_counted_with(own_user=False, own_namespace=False) >= 1
