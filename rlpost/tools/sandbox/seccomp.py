"""The system calls that a Python program may make: those that CPython and its C library need, and no others.

Namespaces keep a program from files, processes and the network; this filter keeps the rest of the kernel from it,
what is there and what a later kernel adds: other processes' memory, mounts, keys, memory and sockets that no limit
counts, and the parts that most ways out of a container have used.
"""

from __future__ import annotations

import platform
import struct
from dataclasses import dataclass
from errno import ENOSYS, EPERM
from functools import cache

from rlpost.errors import SandboxError

# name:number on x86_64:number on aarch64, - where it has none
_ALLOWED = (
    # files
    "read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70 "
    "preadv2:327:286 pwritev2:328:287 open:2:- openat:257:56 openat2:437:437 creat:85:- close:3:57 "
    "close_range:436:436 lseek:8:62 stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79 statx:332:291 statfs:137:43 "
    "fstatfs:138:44 access:21:- faccessat:269:48 faccessat2:439:439 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- "
    "pipe2:293:59 flock:73:32 fsync:74:82 fdatasync:75:83 truncate:76:45 ftruncate:77:46 fallocate:285:47 "
    "fadvise64:221:223 getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- "
    "renameat:264:38 renameat2:316:276 mkdir:83:- mkdirat:258:34 rmdir:84:- link:86:- linkat:265:37 unlink:87:- "
    "unlinkat:263:35 symlink:88:- symlinkat:266:36 readlink:89:- readlinkat:267:78 chmod:90:- fchmod:91:52 "
    "fchmodat:268:53 fchmodat2:452:452 chown:92:- fchown:93:55 lchown:94:- fchownat:260:54 umask:95:166 utime:132:- "
    "utimes:235:- utimensat:280:88 futimesat:261:- sendfile:40:71 copy_file_range:326:285 getxattr:191:8 "
    "lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13 "
    # memory
    "brk:12:214 mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216 madvise:28:233 msync:26:227 mincore:27:232 "
    "membarrier:324:283 "
    # processes and threads
    "fork:57:- vfork:58:- execve:59:221 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95 getpid:39:172 "
    "getppid:110:173 gettid:186:178 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getgroups:115:158 "
    "getresuid:118:148 getresgid:120:150 setpgid:109:154 getpgid:121:155 getpgrp:111:- setsid:112:157 "
    "getsid:124:156 getpriority:140:141 setpriority:141:140 getrlimit:97:163 setrlimit:160:164 prlimit64:302:261 "
    "getrusage:98:165 times:100:153 sysinfo:99:179 uname:63:160 sched_yield:24:124 sched_getaffinity:204:123 "
    "sched_setaffinity:203:122 sched_getparam:143:121 sched_getscheduler:145:120 sched_get_priority_max:146:125 "
    "sched_get_priority_min:147:126 sched_rr_get_interval:148:127 arch_prctl:158:- set_tid_address:218:96 "
    "set_robust_list:273:99 get_robust_list:274:100 rseq:334:293 getcpu:309:168 futex:202:98 futex_waitv:449:449 "
    "restart_syscall:219:128 pidfd_open:434:434 "
    # signals
    "rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137 "
    "rt_sigsuspend:130:133 sigaltstack:131:132 kill:62:129 tkill:200:130 tgkill:234:131 pause:34:- "
    "pidfd_send_signal:424:424 signalfd:282:- signalfd4:289:74 "
    # time
    "time:201:- gettimeofday:96:169 clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115 "
    "nanosleep:35:101 alarm:37:- getitimer:36:102 setitimer:38:103 timerfd_create:283:85 timerfd_settime:286:86 "
    "timerfd_gettime:287:87 getrandom:318:278 "
    # waiting
    "poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21 "
    "epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:- eventfd2:290:19 "
    # pairs of sockets
    "sendto:44:206 recvfrom:45:207 shutdown:48:210 getsockopt:55:209 getsockname:51:204 getpeername:52:205 "
)
# number on x86_64 and on aarch64; of these the arguments count
_CLONE, _CLONE3, _IOCTL, _SOCKETPAIR, _PRCTL, _FCNTL = (56, 220), (435, 435), (16, 29), (53, 199), (157, 167), (72, 25)
_NEW_NAMESPACE = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_LOCAL = 1  # AF_UNIX; a pair holds what one end has sent and the other not read, and nothing can join it
_TERMINAL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIO(N)CLEX
_OWN = (1, 2, 3, 15, 16, 0x53564D41)  # PR_SET_PDEATHSIG, GET_PDEATHSIG, GET_DUMPABLE, SET_NAME, GET_NAME, SET_VMA
_LARGER_PIPE = 1031  # F_SETPIPE_SZ
_UNKNOWN_FROM = 463  # calls that a C library tries first, on kernels of its time, and does without

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
        _op(_IF_AT_LEAST, _UNKNOWN_FROM, 0, 1),
        _op(_RETURN, _ABSENT),
        # clone3 keeps its flags in memory, where no filter can read them; C libraries fall back to clone
        _op(_IF_EQUAL, _CLONE3[this.column], 0, 1),
        _op(_RETURN, _ABSENT),
    ]
    code += _judged(_CLONE[this.column], _ARGUMENT_0, [_op(_IF_ANY_BIT, _NEW_NAMESPACE, 0, 1)])
    code += _judged(_FCNTL[this.column], _ARGUMENT_1, [_op(_IF_EQUAL, _LARGER_PIPE, 0, 1)])
    for number, argument, values in (
        (_SOCKETPAIR, _ARGUMENT_0, (_LOCAL,)),
        (_IOCTL, _ARGUMENT_1, _TERMINAL),
        (_PRCTL, _ARGUMENT_0, _OWN),
    ):
        tests = [_op(_IF_EQUAL, value, len(values) - place, 0) for place, value in enumerate(values)]
        code += _judged(number[this.column], argument, tests)
    for word in _ALLOWED.split():
        if (number := word.split(":")[1 + this.column]) != "-":
            code += [_op(_IF_EQUAL, int(number), 0, 1), _op(_RETURN, _ALLOW)]
    return b"".join([*code, _op(_RETURN, _REFUSE)])


def _judged(number: int, argument: int, tests: list[bytes]) -> list[bytes]:
    """For system call `number`, load `argument` and test it; the tests lead to a refusal, or over it."""
    body = [_op(_LOAD, argument), *tests, _op(_RETURN, _REFUSE), _op(_RETURN, _ALLOW)]
    return [_op(_IF_EQUAL, number, 0, len(body)), *body]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction; the last two say how many instructions a test skips."""
    return struct.pack("HBBI", code, if_true, if_false, value)
