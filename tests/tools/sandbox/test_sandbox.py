"""Programs in the sandbox as those who mean no harm use it, and what is said where it cannot be had."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlpost.errors import SandboxError
from rlpost.sandbox import Limits, Sandbox, SandboxMode, Session
from rlpost.tools.sandbox.process import Interpreter, Process, temporary_folder
from tests.bubblewrap import needs_bubblewrap
from tests.processes import wait_until
from tests.says import Says
from tests.tools.sandbox.attacks import Attacked, open_to_all, run


@pytest.fixture
def session(sandbox: Sandbox) -> Iterator[Session]:
    with sandbox.session() as session:
        yield session


# One program


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "exit_code"),
    [
        ("print('hällo')", "hällo\n", "", 0),
        ("import sys; sys.exit(3)", "", "", 3),
        ("exit('no more')", "", "no more\n", 1),
        ("import sys; print('a'); print('b', file=sys.stderr)", "a\n", "b\n", 0),
        ("import warnings; warnings.warn('old')", "", "<python 1>:1: UserWarning: old\n", 0),
        ("import atexit; atexit.register(print, 'bye')\nprint('hi')", "hi\nbye\n", "", 0),
        ("from threading import Thread as T; T(target=lambda: print('t')).start(); print('m')", "t\nm\n", "", 0),
        ("if __name__ == '__main__': print('main')", "main\n", "", 0),
        ("", "", "", 0),
    ],
)
def test_output_errors_and_exit_codes_are_those_of_python(
    sandbox: Sandbox, code: str, stdout: str, stderr: str, exit_code: int
) -> None:
    execution = run(sandbox, code)
    assert (execution.stdout, execution.stderr, execution.exit_code) == (stdout, stderr, exit_code)
    assert (execution.claims_success, execution.finished) == (exit_code == 0, True)


def test_a_traceback_shows_the_programs_own_lines_alone(sandbox: Sandbox) -> None:
    execution = run(sandbox, "def half(x):\n    return 1 / x\nhalf(0)")
    lines = [line.strip() for line in execution.stderr.splitlines()]
    shown = [line for line in lines if set(line) - set("~^")]  # 3.11 and later mark
    assert [re.sub(r'.*"<python 1>", line (\d), in .*', r"\1", line) for line in shown[1:5]] == [
        *("3", "half(0)"),
        *("2", "return 1 / x"),
    ]
    assert [line.partition(" ")[0] for line in (shown[0], *shown[5:])] == ["Traceback", "ZeroDivisionError:"]


NO_PROGRAMS = [("x = (", "SyntaxError"), ("x = '\0'", "null bytes"), ("x = '\ud800'", "")]


@pytest.mark.parametrize(("code", "error"), NO_PROGRAMS)
def test_what_is_no_program_fails_as_it_does_in_python(sandbox: Sandbox, code: str, error: str) -> None:
    execution = run(sandbox, code)
    assert (execution.exit_code, error in execution.stderr) == (1, True)


def test_functions_recurse_and_see_what_is_beside_them(sandbox: Sandbox) -> None:
    code = """
import pickle
from functools import cache
base = 1
@cache
def factorial(n): return base if n < 2 else n * factorial(n - 1)
class Counter:
    made = [factorial(k) for k in range(5)]
def adder(n):
    def add(x):
        nonlocal n
        n += x
        return n
    return add
add = adder(2)
print(Counter.made, add(3), add(5), pickle.loads(pickle.dumps(Counter)) is Counter)
"""
    assert run(sandbox, code).stdout == "[1, 1, 2, 6, 24] 5 10 True\n"


def test_sets_print_in_the_same_order_every_time(sandbox: Sandbox) -> None:
    code = "print({str(n) for n in range(50)})"
    first, second = (run(sandbox, code).stdout for _ in range(2))
    assert first == second != ""


@needs_bubblewrap
def test_a_program_whose_output_is_cut_may_succeed() -> None:
    execution = run(Sandbox(limits=Limits(output_bytes=100)), "print('a' * 60 + 'b' * 1000 + 'c' * 60)")
    assert execution.stdout.split("\n")[::2] == ["a" * 50, "c" * 49]
    assert (execution.cut_bytes, execution.output_cut, execution.claims_success) == (1021, True, True)


def test_a_program_too_long_to_be_meant_is_refused(sandbox: Sandbox, says: Says) -> None:
    execution = run(sandbox, "#" * 1_000_001)
    assert not execution.claims_success
    says("tools", execution.stderr)
    assert run(sandbox, "#" * 1_000_000).claims_success  # more than a pipe holds


# Sessions


def test_a_session_keeps_what_ran_before(session: Session) -> None:
    for code in ("import math\nx = 2\ndef f(n): return x if n == 0 else f(n - 1)", "x = math.isqrt(81)"):
        assert run(session, code).claims_success
    assert run(session, "print(f(3))").stdout == "9\n"
    failed = run(session, "y = 7\n1 / 0")
    assert (failed.exit_code, failed.finished) == (1, True)
    assert '<python 4>", line 2' in failed.stderr
    assert run(session, "print(y); exit()").stdout == "7\n"
    assert run(session, "print(y)").stdout == "7\n"
    assert session.restarts == 0


def test_sessions_know_nothing_of_each_other(sandbox: Sandbox) -> None:
    listing = "import os; print(os.listdir())"
    with sandbox.session() as one, sandbox.session() as other:
        run(one, "x = 1; open('note', 'w').write('x')")
        assert "NameError" in run(other, "x").stderr
        assert (run(one, listing).stdout, run(other, listing).stdout) == ("['note']\n", "[]\n")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "Code execution timed out"),
        ("import os; os._exit(0)", "Python ended early with exit code 0"),
        ("import os; os.abort()", "Python was ended by SIGABRT"),
    ],
)
def test_what_ends_the_interpreter_of_a_session_restarts_it(session: Session, code: str, reason: str) -> None:
    run(session, "x = 1")
    lost = run(session, code, 0.5 if "while" in code else 60.0)
    assert (lost.claims_success, lost.reason, session.restarts) == (False, reason, 1)
    assert "NameError" in run(session, "x").stderr
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
    assert run(session, code).claims_success
    assert session.process is not None
    members = session.process.members()
    assert len(members) == 3  # the first of the namespace, the interpreter and its fork
    wait_until(lambda: all(map(_is_stopped, members[1:])))  # a busy machine may stop them a little later
    used = [psutil.Process(pid).cpu_times() for pid in members]
    time.sleep(0.3)
    assert [psutil.Process(pid).cpu_times() for pid in members] == used
    waits = "import time\nbefore = ticks.value\nwhile ticks.value == before: time.sleep(0.01)"
    assert run(session, waits).claims_success
    assert run(session, "print(ticks.value > before)").stdout == "True\n"


def test_a_forked_child_does_not_answer_for_the_session(session: Session) -> None:
    forking = "import os\nchild = os.fork()\nx = 'parent' if child else 'child'"
    assert run(session, forking).claims_success
    assert run(session, "print(x)").stdout == "parent\n"


def test_a_session_outlives_the_thread_that_began_it(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        beginning = threading.Thread(target=lambda: run(session, "x = 5"))
        beginning.start()
        beginning.join()
        assert run(session, "print(x)").stdout == "5\n"


def test_a_fork_of_this_process_leaves_its_sessions_alone(session: Session) -> None:
    run(session, "x = 5")
    child = os.fork()
    if child == 0:
        session.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert run(session, "print(x)").stdout == "5\n"


def test_the_value_of_a_last_expression_is_shown_if_asked_for(session: Session) -> None:
    def shown(code: str) -> str:
        return run(session, code, show_last_value=True).stdout

    assert [shown("x = 20\nx + 22"), shown("None"), shown("x = 1"), shown("'a'; 'b'")] == ["42\n", "", "", "'b'\n"]
    assert run(session, "x").stdout == ""


@needs_bubblewrap
@pytest.mark.parametrize("ending", ["timeout", "close", "forgotten"])
def test_the_end_of_a_session_leaves_nothing(attacked: Attacked, ending: str) -> None:
    session = attacked.sandbox.session()
    forking = "import os\nfor _ in range(3):\n  if os.fork() == 0:\n    while True: pass"
    assert run(session, forking).claims_success
    assert len(attacked.survivors()) >= 4
    if ending == "timeout":
        run(session, "while True: pass", 0.2)
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
    wait_until(lambda: not attacked.survivors())


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
def test_only_python_is_seen_of_a_closed_home_folder(tmp_path: Path) -> None:
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
        execution = run(sandbox, code)
    except SandboxError as error:
        linked = subprocess.run(["ldd", home / "apps/python/bin" / version], capture_output=True, text=True).stdout
        if "cannot open shared object file" not in str(error) or str(home / "apps/python/lib") in linked:
            raise
        pytest.skip("this Python finds its shared library by an absolute path, so that a copy of it does not run")
    assert execution.stdout.split()[:2] == [str(home / "apps/python"), "apps"]
    assert sorted(execution.stdout.split()[2:]) == ["bin", "lib"]


def test_a_closed_temporary_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode, place in ((0o700, "/tmp/rlpost-sandbox-"), (0o755, f"{tmp_path}/rlpost-sandbox-")):
        open_to_all(tmp_path)
        tmp_path.chmod(mode)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        made = temporary_folder()
        os.rmdir(made)
        assert made.startswith(place)


def test_installed_packages_are_there_when_they_are_asked_for(sandbox: Sandbox) -> None:
    code = "import numpy; print(numpy.arange(4).sum())"
    assert "ModuleNotFoundError" in run(sandbox, code).stderr
    execution = run(Sandbox(packages=True, limits=Limits(memory_mb=1024)), code)
    assert execution.stdout == "6\n", execution.stderr


def test_packages_that_may_hold_answers_cannot_be_found(sandbox: Sandbox) -> None:
    folders = [str(folder) for folder in Interpreter.at(sys.executable).hidden()]
    assert folders
    code = f"import os\nfor folder in {folders!r}:\n  print(os.listdir(folder))\n  open(folder + '/x', 'w')"
    execution = run(sandbox, code)
    assert execution.stdout == "[]\n"
    assert "Read-only" in execution.stderr


@needs_bubblewrap
def test_a_readable_folder_is_there_and_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # the sandbox's user is none of its owners
    table = tmp_path / "table.csv"
    table.write_text("1,2,3")
    sandbox = Sandbox(readable=[tmp_path])
    assert run(sandbox, f"print(open({str(table)!r}).read())").stdout == "1,2,3\n"
    assert "Read-only" in run(sandbox, f"open({str(table)!r}, 'w')").stderr


def test_a_python_that_does_not_run_is_named(tmp_path: Path) -> None:
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\n")
    mute.chmod(0o755)
    for python in (str(mute), "/no/such"):
        with pytest.raises(SandboxError, match=python):
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
    wait_until(lambda: not _living_of(54321))  # what was killed need not be gone at once on a busy machine


def _living_of(user: int) -> list[Any]:
    """The processes of a user that are no zombies."""
    processes = [each.info for each in psutil.process_iter(["uids", "status", "cmdline"])]
    return [each for each in processes if each["uids"].real == user and each["status"] != psutil.STATUS_ZOMBIE]


# Where there is no sandbox


def test_without_bubblewrap_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    """Both ways on are named: to install it, and the weaker mode."""
    ran = tmp_path / "ran"
    setpriv = shutil.which("setpriv")
    assert setpriv is not None
    (tmp_path / "setpriv").symlink_to(setpriv)
    monkeypatch.setenv("PATH", str(tmp_path))
    with says.refused("tools", SandboxError, "tools.python_sandbox=limits"):
        run(Sandbox(), f"open({str(ran)!r}, 'w')")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("echo 'bwrap: No permissions' >&2; exit 1", "No permissions"),
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
    open_to_all(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(Process, "overuse", lambda self: None)  # without walls it counts the machine's own files
    sandbox = Sandbox(python="/usr/bin/python3")
    with pytest.raises(SandboxError, match=said) as refused:
        run(sandbox, "print(1)")
    assert "sandbox=limits" in str(refused.value)
    assert "\n" not in str(refused.value)


# The weaker mode


@pytest.fixture(scope="module")
def weaker() -> Sandbox:
    python = None if os.getuid() else "/usr/bin/python3"
    if python and not Path(python).exists():
        pytest.skip("this machine has no Python that other users may read")
    return Sandbox(SandboxMode.limits, python=python, limits=Limits(memory_mb=256))


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print(6 * 7)", "42"),
        ("while True: pass", "Code execution timed out"),
        ("bytearray(1 << 29)", "MemoryError"),
        ("while True: print('spam' * 1000)", "bytes left out"),
        ("open('big', 'wb').write(bytes(40 << 20))", "File too large"),
        ("import os; print(os.getuid() == 0, 'HF_TOKEN' in os.environ)", "False False"),
    ],
)
def test_the_weaker_mode_limits_what_a_program_takes(weaker: Sandbox, code: str, outcome: str) -> None:
    execution = run(weaker, code, 0.3 if "pass" in code else 60.0)
    assert outcome in execution.stdout + execution.stderr + execution.reason


def test_the_weaker_mode_limits_processes(weaker: Sandbox) -> None:
    code = "import os, time\nn = 0\ntry:\n  while os.fork() or time.sleep(60): n += 1\nexcept OSError: print(n)"
    assert 10 <= int(run(weaker, code).stdout) <= 16


def test_the_weaker_mode_leaves_no_folder_and_no_process(weaker: Sandbox) -> None:
    code = "import os\nprint(os.getcwd())\nopen('x', 'w')\nif os.fork() == 0:\n  while True: pass\nprint(os.getpid())"
    folder, pid = run(weaker, code).stdout.split()
    assert not Path(folder).exists()
    wait_until(lambda: not _group_exists(int(pid)))  # ended at once, but whoever inherits it has to take note


def test_a_session_of_the_weaker_mode_keeps_and_restarts(weaker: Sandbox) -> None:
    with weaker.session() as session:
        run(session, "x = 1")
        assert run(session, "print(x)").stdout == "1\n"
        assert run(session, "while True: pass", 0.3).timed_out
        assert "NameError" in run(session, "x").stderr


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
