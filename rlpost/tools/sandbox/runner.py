"""Runs inside the sandbox: reads programs from one pipe and reports their ends on another.

Started as `python -c SOURCE REQUESTS REPORTS LIMITS PATHS`: two file descriptors, resource limits as
`number:value,...`, and folders for `sys.path`, with colons between. It imports nothing of rlpost.

A request is a nonce of 16 bytes, a byte of flags, the length of the program in 8 bytes, and the program. One
byte is reported once the limits hold, then for each program its nonce and its exit code. A
program's output uses other pipes, so it cannot be mistaken for a report.
"""

import atexit
import builtins
import os
import resource
import sys
from types import CodeType

NONCE_BYTES = 16
LENGTH_BYTES = 8
READY = b"R"
LAST = 1  # flag: no program follows: wait for threads and run exit functions
SHOW_LAST_VALUE = 2  # flag: print the value of a final expression


def read_exactly(pipe: int, size: int) -> bytes:
    """Read `size` bytes from `pipe`; exit this process if it has no writer any more."""
    data = b""
    while len(data) < size:
        part = os.read(pipe, size - len(data))
        if not part:
            os._exit(0)
        data += part
    return data


def compiled(code: str, name: str, show_last_value: bool) -> list[CodeType]:
    """Compile `code`, with its final expression apart if its value is to be shown."""
    if not show_last_value:
        return [compile(code, name, "exec", dont_inherit=True)]
    import ast

    tree = ast.parse(code, name)
    if not (tree.body and isinstance(tree.body[-1], ast.Expr)):
        return [compile(tree, name, "exec", dont_inherit=True)]
    last = ast.Interactive([tree.body.pop()])
    return [compile(tree, name, "exec", dont_inherit=True), compile(last, name, "single", dont_inherit=True)]


def run(code: str, name: str, namespace: dict[str, object], show_last_value: bool) -> int:
    """Run `code` in `namespace` and return the exit code that Python would end with."""
    try:
        for part in compiled(code, name, show_last_value):
            exec(part, namespace)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001  any error is the program's
        show(error, code, name)
        return 1
    return 0


def show(error: BaseException, code: str, name: str) -> None:
    """Write the traceback of `error`, starting in the program, with the program's lines."""
    import linecache
    import traceback

    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename == "<string>":  # this file's own frames
        inner = inner.tb_next
    try:
        traceback.print_exception(error.with_traceback(inner))
    except BaseException:  # noqa: BLE001  no memory to format it, or no stderr to write to
        os.write(2, f"{type(error).__name__}\n".encode(errors="replace"))


def flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError, AttributeError):  # closed or replaced by the program
            pass


def main() -> None:
    requests, reports = int(sys.argv[1]), int(sys.argv[2])
    for pair in sys.argv[3].split(","):
        number, limit = (int(part) for part in pair.split(":"))
        resource.setrlimit(number, (limit, limit))
    sys.path += [folder for folder in sys.argv[4].split(":") if folder]
    os.nice(5)
    builtins.exit = builtins.quit = sys.exit  # which the site module defines, and it is not loaded
    os.write(reports, READY)

    own_number, number_now = os.getpid(), os.getpid
    program = type(sys)("__main__")
    program.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = program
    sys.argv[:] = [""]
    number = 0
    while True:
        nonce = read_exactly(requests, NONCE_BYTES)
        flags = read_exactly(requests, 1)[0]
        code = read_exactly(requests, int.from_bytes(read_exactly(requests, LENGTH_BYTES), "big"))
        number += 1
        ended: list[int] = []

        def report(nonce: bytes = nonce, ended: list[int] = ended) -> None:
            flush()
            if number_now() == own_number:
                os.write(reports, nonce + bytes(ended))

        if flags & LAST:
            atexit.register(report)  # first in, so called last: after the program's threads and exit functions
        source = code.decode("utf-8", "surrogatepass")
        ended.append(run(source, f"<python {number}>", program.__dict__, bool(flags & SHOW_LAST_VALUE)))
        if number_now() != own_number:  # a fork of the program has come to the end, not the program
            flush()
            os._exit(ended[0])
        if flags & LAST:
            return
        report()


if __name__ == "__main__":
    main()
