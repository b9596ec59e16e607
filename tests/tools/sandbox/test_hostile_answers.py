"""Programs that lie about what they have done: an answer that is compared outside is what they gave, and no more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlpost.sandbox import Limits, Sandbox, Session
from tests.bubblewrap import needs_bubblewrap

pytestmark = needs_bubblewrap

SECONDS = 20.0


@pytest.fixture
def session() -> Iterator[Session]:
    with Sandbox(limits=Limits(memory_mb=128)).session() as session:
        yield session


def passes(session: Session, program: str, seconds: float = SECONDS) -> bool:
    """Whether `solve` squares its number: asked of the program, judged here."""
    session.run(program, timeout_seconds=seconds)
    answer = session.ask("solve(7)", timeout_seconds=seconds)
    return answer.given and answer.value == 49


# Each finds the report that says that a program has ended, in one of the ways Python offers, and sends it
FORGED = """
import os, sys
def send(nonce, ended=b"\\0"):
    for pipe in range(3, 64):
        try: os.write(pipe, nonce + ended)
        except OSError: pass
    os._exit(0)
"""

LIES = {
    "takes the nonce from a frame": FORGED
    + """
frame = sys._getframe()
while frame:
    for name, value in list(frame.f_locals.items()):
        if name == "nonce": send(value)
    frame = frame.f_back""",
    "takes the nonce from the collector": FORGED
    + """
import gc
for thing in gc.get_objects():
    if getattr(thing, "__name__", "") == "report": send(thing.__defaults__[0])""",
    "ends what it is run by": """
import gc
for thing in gc.get_objects():
    if getattr(thing, "__name__", "") == "report":
        thing.__defaults__[1][:] = [0]; thing(); __import__("os")._exit(0)""",
    "jumps over the question": """
import sys
def solve(n): sys.settrace(lambda *_: None); raise SystemExit(0)""",
    "equals everything": "class A:\n  __eq__ = lambda *_: True\ndef solve(n): return A()",
    "is an int that says otherwise": "class A(int):\n  __eq__ = lambda *_: True\ndef solve(n): return A(3)",
    "prints answers": "def solve(n):\n  for guess in range(60): print(guess)\n  return None",
    "prints for ascii": "import builtins\nbuiltins.ascii = lambda x: 'True'\ndef solve(n): return 0",
    "takes print away": "import builtins\nbuiltins.print = lambda *a, **k: None\ndef solve(n): return 49",
    "takes stdout away": "import sys\nsys.stdout = None\ndef solve(n): return 49",
    "leaves while it is asked": "import os\ndef solve(n): print(49); os._exit(0)",
    "is asked in two processes": "import os\ndef solve(n): return 49 if os.fork() == 0 and os._exit(0) else 0",
    "raises": "def solve(n): raise ValueError(49)",
    "gives what repr cannot write": "def solve(n): return object()",
    "gives what is too deep": "class A: __repr__ = lambda self: '[' * 30000 + ']' * 30000\nsolve = lambda n: A()",
    "gives signs without end": "class A: __repr__ = lambda self: '-' * 60000 + '1'\nsolve = lambda n: A()",
    "gives a call": "class A: __repr__ = lambda self: '__import__(\"os\").getpid()'\nsolve = lambda n: A()",
    "gives a sum": "class A: __repr__ = lambda self: '9**9**9'\nsolve = lambda n: A()",
    "gives more than is kept": "def solve(n): return [49] * 10**6",
    "replaces the module": "import sys\nsys.modules['__main__'] = sys\ndef solve(n): return -49",
}


@pytest.mark.parametrize("program", LIES.values(), ids=LIES.keys())
def test_no_lie_is_taken_for_the_answer(session: Session, program: str) -> None:
    assert not passes(session, program, 5.0)


def test_a_program_that_spins_when_it_is_asked_is_ended(session: Session) -> None:
    assert not passes(session, "def solve(n):\n  while True: pass", 1.0)
    assert session.restarts == 1


def test_an_honest_program_is_asked_any_number_of_things(session: Session) -> None:
    session.run("print('hello')\ndef solve(n): print('at work'); return n * n", timeout_seconds=SECONDS)
    assert session.ask("solve(7)", timeout_seconds=SECONDS).value == 49
    assert session.ask("[solve(n) for n in range(3)]", timeout_seconds=SECONDS).value == [0, 1, 4]
    assert session.ask("'é\\n', {'a': (1.5, None)}, {2}", timeout_seconds=SECONDS).value == (
        "é\n",
        {"a": (1.5, None)},
        {2},
    )
    none = session.ask("print(1)", timeout_seconds=SECONDS)
    assert (none.given, none.value) == (True, None)
    failed = session.ask("solve('x')", timeout_seconds=SECONDS)
    assert (failed.given, failed.value) == (False, None)
    assert "TypeError" in failed.execution.stderr
    assert not session.ask("1 +", timeout_seconds=SECONDS).given
