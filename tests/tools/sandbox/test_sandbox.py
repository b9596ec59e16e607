"""Programs in the sandbox as those who mean no harm use it, and what is said where it cannot be had."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpost.errors import SandboxError
from rlpost.sandbox import Limits, Sandbox, SandboxMode, Session
from rlpost.tools.sandbox.process import Interpreter, Process, temporary_folder
from tests.bubblewrap import needs_bubblewrap, sandbox
from tests.tools.sandbox.attacks import Attacked, attacked

__all__ = ["attacked", "sandbox"]  # fixtures

SECONDS = 60.0  # longer than any program here takes


@pytest.fixture
def session(sandbox: Sandbox) -> Iterator[Session]:
    with sandbox.session() as session:
        yield session


# One program


def test_output_errors_and_exit_codes_are_those_of_python(sandbox: Sandbox) -> None:
    for code, stdout, stderr, exit_code in [
        ("print('hällo')", "hällo\n", "", 0),
        ("import sys; sys.exit(3)", "", "", 3),
        ("exit('no more')", "", "no more\n", 1),
        ("import sys; print('a'); print('b', file=sys.stderr)", "a\n", "b\n", 0),
        ("import warnings; warnings.warn('old')", "", "<python 1>:1: UserWarning: old\n", 0),
        ("import atexit; atexit.register(print, 'bye')\nprint('hi')", "hi\nbye\n", "", 0),
        ("from threading import Thread as T; T(target=lambda: print('t')).start(); print('m')", "t\nm\n", "", 0),
        ("if __name__ == '__main__': print('main')", "main\n", "", 0),
        ("", "", "", 0),
    ]:
        execution = sandbox.run(code, timeout_seconds=SECONDS)
        assert (execution.stdout, execution.stderr, execution.exit_code) == (stdout, stderr, exit_code), code
        assert execution.claims_success == (exit_code == 0)
        assert execution.finished


def test_a_traceback_shows_the_programs_own_lines_and_nothing_else(sandbox: Sandbox) -> None:
    execution = sandbox.run("def half(x):\n    return 1 / x\nhalf(0)", timeout_seconds=SECONDS)
    shown = [line for line in execution.stderr.splitlines() if set(line.strip()) - set("~^")]  # 3.11 and later mark
    assert shown == [
        "Traceback (most recent call last):",
        '  File "<python 1>", line 3, in <module>',
        "    half(0)",
        '  File "<python 1>", line 2, in half',
        "    return 1 / x",
        "ZeroDivisionError: division by zero",
    ]
    assert "SyntaxError" in sandbox.run("x = (", timeout_seconds=SECONDS).stderr
    assert "null bytes" in sandbox.run("x = '\0'", timeout_seconds=SECONDS).stderr
    assert sandbox.run("x = '\ud800'", timeout_seconds=SECONDS).exit_code == 1


def test_functions_recurse_and_see_what_is_beside_them(sandbox: Sandbox) -> None:
    code = """
from functools import cache
base = 1
@cache
def factorial(n):
    return base if n < 2 else n * factorial(n - 1)
class Counter:
    made = [factorial(k) for k in range(5)]
def adder(n):
    def add(x):
        nonlocal n
        n += x
        return n
    return add
add = adder(2)
add(3)
import pickle
print(Counter.made, add(5), pickle.loads(pickle.dumps(Counter)) is Counter)
"""
    assert sandbox.run(code, timeout_seconds=SECONDS).stdout == "[1, 1, 2, 6, 24] 10 True\n"


def test_sets_print_in_the_same_order_every_time(sandbox: Sandbox) -> None:
    code = "print({str(n) for n in range(50)})"
    first, second = (sandbox.run(code, timeout_seconds=SECONDS).stdout for _ in range(2))
    assert first == second != ""


def test_worker_processes_of_the_program_work(sandbox: Sandbox) -> None:
    code = """
from multiprocessing import get_context
def square(n): return n * n
with get_context("fork").Pool(2) as pool:
    print(pool.map(square, range(5)))
"""
    execution = sandbox.run(code, timeout_seconds=30.0)
    assert execution.stdout == "[0, 1, 4, 9, 16]\n", execution.stderr


@needs_bubblewrap
def test_the_middle_of_long_output_is_left_out_and_counted() -> None:
    small = Sandbox(limits=Limits(output_bytes=100))
    execution = small.run("print('a' * 60 + 'b' * 1000 + 'c' * 60)", timeout_seconds=SECONDS)
    assert execution.stdout == "a" * 50 + "\n[1021 bytes left out]\n" + "c" * 49 + "\n"
    assert (execution.cut_bytes, execution.output_cut) == (1021, True)
    assert execution.claims_success


def test_a_program_too_long_to_be_meant_is_refused(sandbox: Sandbox) -> None:
    execution = sandbox.run("#" * 1_000_001, timeout_seconds=SECONDS)
    assert not execution.claims_success
    assert execution.stderr == "a program of 1000001 characters is not run: at most 1000000\n"
    assert sandbox.run("#" * 1_000_000, timeout_seconds=SECONDS).claims_success  # more than a pipe holds


# Sessions


def test_a_session_keeps_what_ran_before(session: Session) -> None:
    assert session.run(
        "import math\nx = 2\ndef f(n): return x if n == 0 else f(n - 1)", timeout_seconds=SECONDS
    ).claims_success
    assert session.run("x = math.isqrt(81)", timeout_seconds=SECONDS).claims_success
    assert session.run("print(f(3))", timeout_seconds=SECONDS).stdout == "9\n"
    failed = session.run("y = 7\n1 / 0", timeout_seconds=SECONDS)
    assert (failed.exit_code, failed.finished) == (1, True)
    assert '<python 4>", line 2' in failed.stderr
    assert session.run("print(y); exit()", timeout_seconds=SECONDS).stdout == "7\n"
    assert session.run("print(y)", timeout_seconds=SECONDS).stdout == "7\n"
    assert session.restarts == 0


def test_sessions_know_nothing_of_each_other(sandbox: Sandbox) -> None:
    with sandbox.session() as one, sandbox.session() as other:
        one.run("x = 1; open('note', 'w').write('x')", timeout_seconds=SECONDS)
        assert "NameError" in other.run("x", timeout_seconds=SECONDS).stderr
        assert other.run("import os; print(os.listdir())", timeout_seconds=SECONDS).stdout == "[]\n"
        assert one.run("import os; print(os.listdir())", timeout_seconds=SECONDS).stdout == "['note']\n"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "Code execution timed out"),
        ("import os; os._exit(0)", "Python ended early with exit code 0"),
        ("import os; os.abort()", "Python was ended by SIGABRT"),
    ],
)
def test_what_ends_the_interpreter_of_a_session_restarts_it(session: Session, code: str, reason: str) -> None:
    session.run("x = 1", timeout_seconds=SECONDS)
    lost = session.run(code, timeout_seconds=0.5 if "while" in code else SECONDS)
    assert (lost.claims_success, lost.reason, session.restarts) == (False, reason, 1)
    assert "NameError" in session.run("x", timeout_seconds=SECONDS).stderr
    assert session.restarts == 1


def test_nothing_of_a_session_runs_between_two_programs(session: Session) -> None:
    code = """
import multiprocessing, threading
ticks = multiprocessing.get_context("fork").Value("q", 0, lock=False)
def tick():
    while True:
        ticks.value += 1
threading.Thread(target=tick, daemon=True).start()
import os
if os.fork() == 0:
    tick()
"""
    assert session.run(code, timeout_seconds=SECONDS).claims_success
    assert session.process is not None
    members = session.process.members()
    assert len(members) == 3  # the first of the namespace, the interpreter and its fork
    deadline = time.monotonic() + 30  # a busy machine may stop them a little later
    while not all(map(_is_stopped, members[1:])) and time.monotonic() < deadline:
        time.sleep(0.01)
    used = [_cpu_ticks(pid) for pid in members]
    time.sleep(0.3)
    assert [_cpu_ticks(pid) for pid in members] == used
    waits = "import time\nbefore = ticks.value\nwhile ticks.value == before: time.sleep(0.01)"
    assert session.run(waits, timeout_seconds=SECONDS).claims_success
    assert session.run("print(ticks.value > before)", timeout_seconds=SECONDS).stdout == "True\n"


def test_a_forked_child_does_not_answer_for_the_session(session: Session) -> None:
    assert session.run(
        "import os\nchild = os.fork()\nx = 'parent' if child else 'child'", timeout_seconds=SECONDS
    ).claims_success
    assert session.run("print(x)", timeout_seconds=SECONDS).stdout == "parent\n"


def test_a_session_outlives_the_thread_that_began_it(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        beginning = threading.Thread(target=lambda: session.run("x = 5", timeout_seconds=SECONDS))
        beginning.start()
        beginning.join()
        assert session.run("print(x)", timeout_seconds=SECONDS).stdout == "5\n"


def test_a_fork_of_this_process_leaves_its_sessions_alone(session: Session) -> None:
    session.run("x = 5", timeout_seconds=SECONDS)
    child = os.fork()
    if child == 0:
        session.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert session.run("print(x)", timeout_seconds=SECONDS).stdout == "5\n"


def test_the_value_of_a_last_expression_is_shown_where_that_is_asked_for(session: Session) -> None:
    def shown(code: str) -> str:
        return session.run(code, timeout_seconds=SECONDS, show_last_value=True).stdout

    assert [shown("x = 20\nx + 22"), shown("None"), shown("x = 1"), shown("'a'; 'b'")] == ["42\n", "", "", "'b'\n"]
    assert session.run("x", timeout_seconds=SECONDS).stdout == ""


@needs_bubblewrap
@pytest.mark.parametrize("ending", ["timeout", "close", "forgotten"])
def test_the_end_of_a_session_leaves_nothing(attacked: Attacked, ending: str) -> None:
    session = attacked.sandbox.session()
    assert session.run(
        "import os\nfor _ in range(3):\n  if os.fork() == 0:\n    while True: pass", timeout_seconds=SECONDS
    ).claims_success
    assert len(attacked.survivors()) >= 4
    if ending == "timeout":
        session.run("while True: pass", timeout_seconds=0.2)
    elif ending == "close":
        session.close()
    else:
        del session
    assert attacked.survivors() == []


@needs_bubblewrap
def test_a_killed_process_takes_its_sandboxes_with_it(attacked: Attacked, tmp_path: Path) -> None:
    program = (
        "import rlpost.tools.sandbox.sandbox as s, rlpost.tools.sandbox.sandbox as w\n"
        "from rlpost.sandbox import Sandbox\n"
        f"w.ENVIRONMENT['MARK'] = {attacked.mark!r}\n"
        "session = Sandbox().session(); session.run('x = 1', timeout_seconds=60)\n"
        "print('up', flush=True); session.run('while True: pass', timeout_seconds=99)"
    )
    open_to_all(tmp_path)
    command, environment = [sys.executable, "-c", program], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        assert attacked.survivors() != []
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while attacked.survivors() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert attacked.survivors() == []


# Which Python, and what it sees


def test_a_virtual_environment_runs_the_python_it_was_made_from(tmp_path: Path) -> None:
    base = Interpreter.at(sys.executable)
    subprocess.run([str(base.executable), "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    made = Interpreter.at(str(tmp_path / "env" / "bin" / "python"))
    assert (made.executable, made.prefix) == (base.executable, base.prefix)
    assert [str(folder) for folder in made.packages] == [
        str(tmp_path / "env/lib" / f"python3.{sys.version_info[1]}" / "site-packages")
    ]


@needs_bubblewrap
def test_a_python_inside_a_closed_home_folder_is_all_that_is_seen_of_it(tmp_path: Path) -> None:
    """As uv, conda and pyenv put theirs."""
    home = tmp_path / "home"
    version = f"python3.{sys.version_info[1]}"
    ignored = shutil.ignore_patterns(
        "site-packages", "dist-packages", "test", "idlelib", "ensurepip", "config-*", "*.a"
    )
    shutil.copytree(sysconfig.get_path("stdlib"), home / "apps/python/lib" / version, ignore=ignored)
    for library in Path(sysconfig.get_config_var("LIBDIR")).glob("libpython*.so*"):
        shutil.copy(library, home / "apps/python/lib")
    (home / "apps/python/bin").mkdir()
    shutil.copy(Interpreter.at(sys.executable).executable, home / "apps/python/bin" / version)
    (home / "secret").write_text("secret")
    home.chmod(0o700)
    sandbox = Sandbox(python=str(home / "apps/python/bin" / version))
    code = f"import os, sys, json; print(sys.prefix); print(*os.listdir({str(home)!r}), *os.listdir(sys.prefix))"
    try:
        execution = sandbox.run(code, timeout_seconds=SECONDS)
    except SandboxError as error:
        linked = subprocess.run(["ldd", home / "apps/python/bin" / version], capture_output=True, text=True).stdout
        if "cannot open shared object file" not in str(error) or str(home / "apps/python/lib") in linked:
            raise
        pytest.skip("this Python finds its shared library by an absolute path, so that a copy of it does not run")
    assert execution.stdout.split()[:2] == [str(home / "apps/python"), "apps"]
    assert sorted(execution.stdout.split()[2:]) == ["bin", "lib"]


def open_to_all(folder: Path) -> None:
    """Let other users into `folder`: those above it that are pytest's are open to their owner alone."""
    above = itertools.takewhile(lambda parent: "pytest" in str(parent), folder.parents)
    for each in (folder, *above):
        each.chmod(0o755)


def test_a_closed_temporary_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode, place in ((0o700, "/tmp/rlpost-sandbox-"), (0o755, f"{tmp_path}/rlpost-sandbox-")):
        open_to_all(tmp_path)
        tmp_path.chmod(mode)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        made = temporary_folder()
        os.rmdir(made)
        assert made.startswith(place)


@needs_bubblewrap
def test_installed_packages_are_there_when_they_are_asked_for(sandbox: Sandbox) -> None:
    code = "import numpy; print(numpy.arange(4).sum())"
    assert "No module named 'numpy'" in sandbox.run(code, timeout_seconds=SECONDS).stderr
    with_packages = Sandbox(packages=True, limits=Limits(memory_mb=1024))
    execution = with_packages.run(code, timeout_seconds=60.0)
    assert execution.stdout == "6\n", execution.stderr


@needs_bubblewrap
def test_packages_that_may_hold_answers_cannot_be_found(sandbox: Sandbox) -> None:
    folders = [str(folder) for folder in Interpreter.at(sys.executable).hidden()]
    assert folders
    code = f"import os\nfor folder in {folders!r}:\n  print(os.listdir(folder))\n  open(folder + '/x', 'w')"
    execution = sandbox.run(code, timeout_seconds=SECONDS)
    assert execution.stdout == "[]\n"
    assert "Read-only" in execution.stderr


@needs_bubblewrap
def test_a_readable_folder_is_there_and_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # the sandbox's user is none of its owners
    (tmp_path / "table.csv").write_text("1,2,3")
    sandbox = Sandbox(readable=[tmp_path])
    place = str(tmp_path / "table.csv")
    assert sandbox.run(f"print(open({place!r}).read())", timeout_seconds=SECONDS).stdout == "1,2,3\n"
    assert "Read-only" in sandbox.run(f"open({place!r}, 'w')", timeout_seconds=SECONDS).stderr


def test_what_cannot_be_shown_or_run_is_named(tmp_path: Path) -> None:
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\n")
    mute.chmod(0o755)
    for python in (str(mute), "/no/such"):
        with pytest.raises(SandboxError, match=f"{python} cannot be asked for its folders .*: name a Python that runs"):
            Sandbox(python=python).prove()


# Without the superuser's rights


@needs_bubblewrap
@pytest.mark.skipif(os.getuid() != 0, reason="every other test runs as an ordinary user then")
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no Python that other users may read")
@pytest.mark.parametrize("mode", ["bubblewrap", "limits"])
def test_an_ordinary_users_sandbox_holds_too(tmp_path: Path, mode: str) -> None:
    """Processes are counted although the user has others, several that eat memory are ended, nothing is left."""
    package = Path(__file__).parents[3] / "rlpost"
    for folder in ("remote", "tools"):
        (tmp_path / "rlpost" / folder).mkdir(parents=True)
    ground = ("__init__.py", "errors.py", "files.py", "imports.py", "text.py", "remote/__init__.py", "remote/child.py")
    for part in (*ground, "sandbox.py", "tools/__init__.py", "tools/sandbox"):
        copy = shutil.copytree if (package / part).is_dir() else shutil.copy
        copy(package / part, tmp_path / "rlpost" / part)
    open_to_all(tmp_path)
    program = f"""
from rlpost.sandbox import Limits, Sandbox, SandboxMode
sandbox = Sandbox(SandboxMode({mode!r}), limits=Limits(memory_mb=128))
forks = "import os, time\\nn = 0\\ntry:\\n  while os.fork() or time.sleep(60): n += 1\\nexcept OSError: print(n)"
print(sandbox.run(forks, timeout_seconds=30).stdout.strip())
eat = "import os, time\\nfor _ in range(3): os.fork()\\nheld = b'x' * (60 << 20)\\ntime.sleep(60)"
print(sandbox.run(eat, timeout_seconds=30).killed_by.name)
print(sandbox.session().run("import os; print(os.getuid())", timeout_seconds=30).stdout)
"""
    as_user = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups", "/usr/bin/python3", "-c", program]
    ran = subprocess.run(as_user, capture_output=True, text=True, cwd=tmp_path, env={"HOME": "/nonexistent"})
    forks, killed_by, user = ran.stdout.split()
    assert 10 <= int(forks) <= 16
    assert (killed_by, user) == ("memory", "54321")
    deadline = time.monotonic() + 60  # what was killed need not be gone at once on a busy machine
    while (left := _living_of(54321)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def _living_of(user: int) -> list[str]:
    """What the processes of a user that are no zombies call themselves."""
    living = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if process.stat().st_uid == user and "\nState:\tZ" not in (process / "status").read_text():
                living.append((process / "cmdline").read_text()[:200])
    return living


# Where there is no sandbox


def test_without_bubblewrap_nothing_is_run_and_both_ways_on_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    setpriv = shutil.which("setpriv")
    assert setpriv is not None
    (tmp_path / "setpriv").symlink_to(setpriv)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError) as refused:
        Sandbox().run(f"open({str(ran)!r}, 'w')", timeout_seconds=SECONDS)
    assert str(refused.value) == (
        "programs that a model writes are run in bubblewrap, which is not installed: apt install bubblewrap, or ask "
        "for the weaker mode, which blocks neither files nor network, with tools.python_sandbox=limits (in Python: "
        "sandbox='limits')"
    )
    assert refused.value.exit_code == 3
    assert not ran.exists()


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "No permissions to create new namespace"),
        ("exit 1", "exit code 1"),
        ('while [ "$1" != -- ]; do shift; done; shift; "$@"; exit $?', "programs can see /"),
    ],
    ids=["forbidden", "broken", "no walls"],
)
def test_a_bubblewrap_that_does_not_wrap_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str, said: str
) -> None:
    """The last one runs what it is given without any wall, as a machine might that silently lacks namespaces."""
    wrap = tmp_path / "bwrap"
    talk = """last=; for word in "$@"; do
    [ "$last" = --info-fd ] && eval "echo '{\\"child-pid\\": $$}' >&$word"; last=$word; done"""
    wrap.write_text(f"#!/bin/bash\n{talk}\n{behaviour}\n")
    wrap.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to("/tmp/") and folder != Path("/tmp"):
            folder.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(Process, "overuse", lambda self: None)  # without walls it counts the machine's own files
    sandbox = Sandbox(python="/usr/bin/python3")
    with pytest.raises(SandboxError, match=said) as refused:
        sandbox.run("print(1)", timeout_seconds=SECONDS)
    assert "sandbox=limits" in str(refused.value)
    assert "\n" not in str(refused.value)


# The weaker mode


@pytest.fixture(scope="module")
def weaker() -> Sandbox:
    python = None if os.getuid() else "/usr/bin/python3"
    if python and not Path(python).exists():
        pytest.skip("this machine has no Python that other users may read")
    return Sandbox(SandboxMode.limits, python=python, limits=Limits(memory_mb=256))


def test_the_weaker_mode_limits_time_memory_processes_and_output(weaker: Sandbox) -> None:
    def run(code: str, seconds: float = SECONDS) -> str:
        execution = weaker.run(code, timeout_seconds=seconds)
        return execution.stdout or execution.reason or execution.stderr.splitlines()[-1]

    forks = "import os, time\nn = 0\ntry:\n  while os.fork() or time.sleep(60): n += 1\nexcept OSError: print(n)"
    assert run("print(6 * 7)") == "42\n"
    assert run("while True: pass", 0.3) == "Code execution timed out"
    assert run("bytearray(1 << 29)") == "MemoryError"
    assert 10 <= int(run(forks)) <= 16
    assert "bytes left out" in run("while True: print('spam' * 1000)")
    assert "File too large" in run("open('big', 'wb').write(bytes(40 << 20))")
    assert run("import os; print(os.getuid() == 0, 'HF_TOKEN' in os.environ)") == "False False\n"


def test_the_weaker_mode_leaves_nothing_in_its_folder_or_its_group(weaker: Sandbox) -> None:
    code = "import os\nprint(os.getcwd())\nopen('x', 'w')\nif os.fork() == 0:\n  while True: pass\nprint(os.getpid())"
    folder, pid = weaker.run(code, timeout_seconds=SECONDS).stdout.split()
    assert not Path(folder).exists()
    deadline = time.monotonic() + 60  # ended at once, but whoever inherits it has to take note
    while _group_exists(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _group_exists(int(pid))


def test_a_session_of_the_weaker_mode_keeps_and_restarts(weaker: Sandbox) -> None:
    with weaker.session() as session:
        session.run("x = 1", timeout_seconds=SECONDS)
        assert session.run("print(x)", timeout_seconds=SECONDS).stdout == "1\n"
        assert session.run("while True: pass", timeout_seconds=0.3).timed_out
        assert "NameError" in session.run("x", timeout_seconds=SECONDS).stderr


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process are stopped."""
    stats = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def _cpu_ticks(pid: int) -> int:
    """Processor time that a process has used, in ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
