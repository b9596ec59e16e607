"""Rewards of files, in processes of their own: the rows at fault are found, and no others pay for them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlpost.config.plugins import load_plugins
from rlpost.errors import ConfigError, DataError, RewardError
from rlpost.rewards.functions import Finished, Rewards, WorkerReward, load_reward, load_rewards
from rlpost.rewards.score import Score
from rlpost.settings import DatasetSettings

SECONDS = 1.5

FILE = """
import asyncio, ctypes, os, sys, time

calls = []

def act(completions, **columns):
    calls.append(len(completions))
    if "raise" in completions:
        raise ValueError("a reply I do not like")
    if "exit" in completions:
        sys.exit(2)
    if "leave" in completions:
        os._exit(2)
    if "crash" in completions:
        ctypes.string_at(0)
    if "sleep" in completions:
        time.sleep(60)
    if "power" in completions:
        7 ** 10 ** 9
    if "short" in completions:
        return []
    if "loud" in completions:
        print("so it is\\n" + 50 * ("x" * 1_000_000))
    if "loud and wrong" in completions:
        print("I was at row 7")
        raise ValueError
    return [float("nan") if text == "nan" else float(len(text)) for text in completions]

async def judge(completions, **columns):
    if "blocks" in completions:
        time.sleep(60)
    if "never" in completions:
        await asyncio.sleep(60)
    await asyncio.sleep(0.1)
    return [float(len(text)) for text in completions]

def process(completions):
    return [os.getpid() for _ in completions]

def meet(mine, other):
    open(mine, "w").close()
    while not os.path.exists(other):
        time.sleep(0.01)

def one(completions, folder):
    meet(folder[0] + "/one", folder[0] + "/other")
    return [1.0 for _ in completions]

def other(completions, folder):
    meet(folder[0] + "/other", folder[0] + "/one")
    return [2.0 for _ in completions]

def pops(completions, tags, log_metric):
    log_metric("tags", len(tags))
    return [tag.pop() for tag in tags]

def counts_calls(completions):
    calls.append(len(completions))
    return [len(calls) for _ in completions]

async def gives_reasons(completions):
    calls.append(len(completions))
    return [KeyError("no verdict") if text == "bad" else len(calls) for text in completions]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def rewards(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes the rewards of these functions of the file."""
    monkeypatch.setattr("rlpost.rewards.workers.STACK_SECONDS", 20.0)
    made: list[Rewards] = []

    def make(*names: str) -> Rewards:
        functions = [load_reward(f"{file}:{name}") for name in names]
        made.append(Rewards(functions, [1.0] * len(functions), None, SECONDS))
        return made[-1]

    yield make
    for each in made:
        each.close()


def finished(*replies: str, **columns: Any) -> list[Finished]:
    return [Finished("p?", reply, [1, 2], columns, []) for reply in replies]


def values(scores: list[Score]) -> list[float | None]:
    return [score.reward if score.valid else None for score in scores]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("raise", "mine.py:act failed: {file}, line 9: ValueError: a reply I do not like"),
        ("exit", "mine.py:act failed: {file}, line 11: SystemExit: 2"),
        ("leave", "mine.py:act failed: its process ended with exit code 2"),
        ("crash", "mine.py:act failed: its process was ended by SIGSEGV"),
        ("sleep", "mine.py:act did not return within 1.5 s, at line 17: raise env.reward_timeout_seconds if it"),
        ("power", "mine.py:act did not return within 1.5 s, at line 19: raise env.reward_timeout_seconds if it"),
        ("nan", "mine.py:act returned nan, which is not a finite number"),
        ("loud and wrong", "mine.py:act failed: {file}, line 26: ValueError; it printed: I was at row 7"),
    ],
)
def test_only_the_row_at_fault_is_an_error(rewards: Any, file: Path, reply: str, said: str) -> None:
    first, bad, last = rewards("act").score(finished("a", reply, "abc"))
    assert (first.reward, first.valid, first.error) == (1.0, True, None)
    assert (last.reward, last.valid, last.error) == (3.0, True, None)
    assert not bad.valid
    assert bad.reward != bad.reward  # NaN, and never a 0
    assert said.format(file=file) in (bad.error or "")


def test_an_exception_returned_for_a_row_is_its_error_and_nothing_is_called_again(rewards: Any, file: Path) -> None:
    reward = rewards("gives_reasons")
    assert values(reward.score(finished("a", "bad", "abc"))) == [1.0, None, 1.0]
    scores = reward.score(finished("bad", "a"))
    assert values(scores) == [None, 2.0]  # the second call of all
    assert scores[0].error == f"{file}:gives_reasons failed: {file}: KeyError: 'no verdict'"


def test_a_list_of_the_wrong_length_is_an_error_of_the_call_and_no_row_is_tried_alone(rewards: Any) -> None:
    said = r"the first: .*mine.py:act returned 0 values: it must return a list of 2 numbers, one a completion"
    with pytest.raises(RewardError, match=said):
        rewards("act").score(finished("a", "short"))


def test_a_reward_that_prints_without_end_is_scored_and_not_seen(
    rewards: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="rlpost")
    made = rewards("act")
    made.timeout_seconds = 60.0
    assert values(made.score(finished("loud", "a"))) == [4.0, 1.0]
    assert capfd.readouterr() == ("", "")
    [printed] = [record.getMessage() for record in caplog.records]
    assert "mine.py:act printed: so it is xxx" in printed
    assert len(printed) < 2200


@pytest.mark.parametrize("reply", ["sleep", "leave"])
def test_a_function_that_loses_every_row_is_given_up_soon(rewards: Any, reply: str) -> None:
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"^no reward for any of 60 completions; the first: .*mine.py:act"):
        rewards("act").score(finished(*[reply] * 60))
    assert time.monotonic() - began < 60.0  # four deadlines and starts, not sixty: 90 s and more


def test_rows_after_three_that_were_lost_are_errors_that_say_so(rewards: Any) -> None:
    scores = rewards("act").score(finished("a", "leave", "leave", "leave", "abc"))
    assert values(scores) == [1.0, None, None, None, None]
    assert (scores[4].error or "").startswith("not tried after 3 others were lost: ")
    assert "ended with exit code 2" in (scores[4].error or "")


def test_rows_of_an_async_function_share_one_deadline_and_keep_their_process(rewards: Any) -> None:
    made = rewards("judge")
    pid = made.functions[0].worker.pid
    first, bad, last = made.score(finished("a", "never", "abc"))
    assert (first.reward, bad.valid, last.reward) == (1.0, False, 3.0)
    assert "mine.py:judge did not return within 1.5 s: raise" in (bad.error or "")
    assert made.functions[0].worker.pid == pid


def test_an_async_function_that_blocks_is_killed(rewards: Any) -> None:
    first, bad = rewards("judge").score(finished("a", "blocks"))
    assert (first.reward, bad.valid) == (1.0, False)
    assert "mine.py:judge did not return within 1.5 s, at line 31" in (bad.error or "")


def test_functions_of_files_run_at_the_same_time_in_processes_of_their_own(rewards: Any, tmp_path: Path) -> None:
    made = rewards("one", "other", "process", "one")
    made.timeout_seconds = 60.0
    [score] = made.score(finished("a", folder=str(tmp_path)))
    assert (score.parts["one"], score.parts["other"]) == (1.0, 2.0)
    assert score.parts["process"] not in (0.0, float(os.getpid()))


def test_a_warm_process_is_shared_and_ends_with_its_last_user(file: Path) -> None:
    settings = DatasetSettings(path="x", reward=[f"{file}:counts_calls"])
    first, second = load_rewards(settings), load_rewards(settings)
    assert first is not None
    assert second is not None
    counted = [values(each.score(finished("a")))[0] for each in (first, second, first)]
    assert counted == [1.0, 2.0, 3.0]
    reward = first.functions[0]
    assert isinstance(reward, WorkerReward)
    pid = reward.worker.pid
    first.close()
    assert Path(f"/proc/{pid}").exists()
    second.close()
    assert not Path(f"/proc/{pid}").exists()
    assert values(first.score(finished("a"))) == [1.0]  # a fresh one
    first.close()


def test_a_file_is_imported_once(tmp_path: Path) -> None:
    file, imports = tmp_path / "noted.py", tmp_path / "imports"
    file.write_text(
        f"open({str(imports)!r}, 'a').write('x')\ndef score(completions):\n    return [1.0 for _ in completions]\n"
    )
    loaded = load_rewards(DatasetSettings(path="x", reward=[f"{file}:score"], accuracy=f"{file}:score"))
    assert loaded is not None
    loaded.offer_columns([], "x")
    assert [score.accuracy_strict for score in loaded.score(finished("a"))] == [1.0]
    assert imports.read_text() == "x"
    loaded.close()


def test_each_row_has_copies_of_its_own(rewards: Any) -> None:
    shared = [5, 7]
    scores = rewards("pops").score(finished("a", "b", tags=shared))  # one list, as the rows of a group have
    assert [score.parts for score in scores] == [{"pops": 7.0, "tags": 2.0}] * 2
    assert shared == [5, 7]


def test_deliberate_errors_pass_through(tmp_path: Path) -> None:
    file = tmp_path / "deliberate.py"
    file.write_text(
        "from rlpost.errors import DataError\ndef f(completions):\n    raise DataError('the answers cannot be read')\n"
    )
    made = Rewards([load_reward(f"{file}:f")], [1.0])
    with pytest.raises(DataError, match=r"^the answers cannot be read"):
        made.score(finished("a", "b"))
    made.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os\nos._exit(3)\ndef f(completions): ...\n", "its process ended with exit code 3"),
        ("def f(completions): ...\nraise SystemExit('no')\n", "line 2: importing it failed: SystemExit: no"),
        ("f = 3\n", "is not a function but int"),
    ],
)
def test_a_file_that_does_not_import_is_a_configuration_error(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "fails.py").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_reward(f"{tmp_path}/fails.py:f")


def test_a_plugins_reward_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    plugin = tmp_path / "plugged.py"
    plugin.write_text(
        "import os, rlpost\nrlpost.register_reward('whose', lambda completions: [os.getpid() for _ in completions])\n"
    )
    load_plugins([str(plugin)])
    made = Rewards([load_reward("whose")], [1.0])
    [score] = made.score(finished("a"))
    assert score.valid
    assert score.reward != os.getpid()
    made.close()


def test_a_failure_is_named_in_the_log(rewards: Any, caplog: pytest.LogCaptureFixture) -> None:
    rewards("act").score(finished("a", "raise", "abc", "raise"))
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "2 of 4 rewards failed; the first: " in warning
    assert warning.endswith("line 9: ValueError: a reply I do not like")


ALARMS = """
import asyncio, signal, threading

def rung(seconds):
    def ring(number, frame):
        raise TimeoutError
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        while True:
            pass
    except TimeoutError:
        return float(threading.current_thread() is threading.main_thread())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

def plain(completions):
    return [rung(0.05) for _ in completions]

async def awaited(completions):
    await asyncio.sleep(0)
    return [rung(0.05) for _ in completions]
"""


@pytest.mark.parametrize("name", ["plain", "awaited"])
def test_a_function_may_set_an_alarm_of_its_own(name: str, tmp_path: Path) -> None:
    (tmp_path / "alarms.py").write_text(ALARMS)
    reward = load_reward(f"{tmp_path}/alarms.py:{name}")
    batch = [Finished("p?", reply, [1], {}, []) for reply in ("a", "b")]
    assert [score.reward for score in Rewards([reward], [1.0]).score(batch)] == [1.0, 1.0]


@pytest.mark.parametrize("name", ["plain", "awaited"])
def test_math_verify_judges_in_a_plain_function_and_in_an_async_one(name: str, tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    word = "async def" if name == "awaited" else "def"
    (tmp_path / "judge.py").write_text(
        f"from math_verify import parse, verify\n\n{word} {name}(completions, answer):\n"
        "    return [float(verify(parse(f'${a}$'), parse(f'${c}$'))) for c, a in zip(completions, answer)]\n"
    )
    reward = load_reward(f"{tmp_path}/judge.py:{name}")
    batch = [Finished("p?", reply, [1], {"answer": "1/2"}, []) for reply in ("0.5", "0.6")]
    assert [score.reward for score in Rewards([reward], [1.0]).score(batch)] == [1.0, 0.0]


def test_a_function_may_ask_for_the_step(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("def score(completions, step):\n    return [10.0 * s for s in step]\n")
    reward = load_reward(f"{tmp_path}/late.py:score")
    batch = [Finished("p?", "a", [1], {}, [], step=step) for step in (0, 3)]
    assert [score.reward for score in Rewards([reward], [1.0]).score(batch)] == [0.0, 30.0]
