"""Rewards of files, in processes of their own: the rows at fault are found, and no others pay for them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlpost.errors import ConfigError, RewardError
from rlpost.rewards.functions import Finished, Rewards, WorkerReward, load_reward, load_rewards
from rlpost.rewards.score import Score
from rlpost.settings import DatasetSettings
from tests.says import Says

pytestmark = pytest.mark.thorough

SECONDS = 1.5
Mine = Callable[..., Rewards]

# name -> what a reward does to a batch with the reply "bad"
FAULTS = {
    "raise": "raise ValueError('a reply I do not like')",
    "exit": "sys.exit(2)",
    "leave": "os._exit(2)",
    "crash": "ctypes.string_at(0)",
    "sleep": "time.sleep(60)",
    "power": "7 ** 10 ** 9",
    "nan": "return [float('nan') if text == 'bad' else float(len(text)) for text in completions]",
    "loud and wrong": "print('I was at row 7'); raise ValueError",
}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mine]:
    """Makes the rewards `names` of a file with this source."""
    monkeypatch.setattr("rlpost.rewards.workers.STACK_SECONDS", 3.0)
    file, made = tmp_path / "mine.py", list[Rewards]()

    def make(source: str, *names: str, seconds: float = SECONDS) -> Rewards:
        file.write_text(f"import asyncio, ctypes, os, signal, sys, time\n{source}")
        functions = [load_reward(f"{file}:{name}") for name in names]
        made.append(Rewards(functions, [1.0] * len(functions), None, seconds))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def failing(mine: Mine) -> Mine:
    """Makes the reward `act`, the length of a reply, that runs a statement for a batch with the reply "bad"."""

    def make(statement: str, define: str = "def", **options: Any) -> Rewards:
        source = f"""
{define} act(completions):
    if "bad" in completions:
        {statement}
    return [float(len(text)) for text in completions]
"""
        return mine(source, "act", **options)

    return make


def finished(*replies: str, **columns: Any) -> list[Finished]:
    return [Finished("p?", reply, [1, 2], columns, []) for reply in replies]


def values(scores: list[Score]) -> list[float | None]:
    return [score.reward if score.valid else None for score in scores]


@pytest.mark.parametrize("fault", FAULTS)
def test_only_the_row_at_fault_is_an_error(failing: Mine, fault: str, says: Says) -> None:
    first, bad, last = failing(FAULTS[fault]).score(finished("a", "bad", "abc"))
    assert (first.reward, first.valid, first.error) == (1.0, True, None)
    assert (last.reward, last.valid, last.error) == (3.0, True, None)
    assert not bad.valid
    assert bad.reward != bad.reward  # NaN, and never a 0
    says("reward", bad.error)


def test_an_exception_returned_for_a_row_is_its_error(mine: Mine) -> None:
    reward = mine(
        """
calls = []
async def judged(completions):
    calls.append(len(completions))
    return [KeyError("verdict") if text == "bad" else len(calls) for text in completions]
""",
        "judged",
    )
    assert values(reward.score(finished("a", "bad", "abc"))) == [1.0, None, 1.0]
    scores = reward.score(finished("bad", "a"))
    assert values(scores) == [None, 2.0]  # the second call of all: no row is tried alone
    assert (scores[0].error or "").endswith("mine.py: KeyError: 'verdict'")


def test_a_list_of_the_wrong_length_is_an_error_of_the_call(failing: Mine) -> None:
    with pytest.raises(RewardError, match=r"act .* 0 values: .* 2 numbers"):  # of both rows: none is tried alone
        failing("return []").score(finished("a", "bad"))


def test_a_reward_that_prints_without_end_is_scored_and_not_seen(
    failing: Mine, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="rlpost")
    made = failing(r"print('said\n' + 50 * ('x' * 1_000_000))", seconds=60.0)
    assert values(made.score(finished("bad", "a"))) == [3.0, 1.0]
    assert capfd.readouterr() == ("", "")
    [printed] = [record.getMessage() for record in caplog.records]
    assert "mine.py:act" in printed
    assert printed.partition(" printed: ")[2].startswith("said xxx")
    assert len(printed) < 2200


def test_a_function_that_loses_every_row_is_given_up_soon(failing: Mine) -> None:
    began = time.monotonic()
    with pytest.raises(RewardError, match=r" 60 .*mine\.py:act"):
        failing("time.sleep(60)").score(finished(*["bad"] * 60))
    assert time.monotonic() - began < 60.0  # four deadlines and starts, not sixty: 90 s and more


def test_rows_after_three_that_were_lost_are_not_tried(failing: Mine, says: Says) -> None:
    scores = failing("os._exit(2)").score(finished("a", "bad", "bad", "bad", "abc"))
    assert values(scores) == [1.0, None, None, None, None]
    says("reward", scores[4].error)


def test_rows_of_an_async_function_share_one_deadline(failing: Mine) -> None:
    made = failing("await asyncio.sleep(60)", "async def")
    [function] = made.functions
    assert isinstance(function, WorkerReward)
    pid = function.worker.pid
    first, bad, last = made.score(finished("a", "bad", "abc"))
    assert (first.reward, bad.valid, last.reward) == (1.0, False, 3.0)
    assert "1.5 s: raise" in (bad.error or "")
    assert function.worker.pid == pid  # which is not lost


def test_an_async_function_that_blocks_is_killed(failing: Mine) -> None:
    first, bad = failing("time.sleep(60)", "async def").score(finished("a", "bad"))
    assert (first.reward, bad.valid) == (1.0, False)
    assert "1.5 s, at line 5: " in (bad.error or "")


def test_functions_of_files_run_at_once_in_own_processes(mine: Mine, tmp_path: Path) -> None:
    source = """
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

def process(completions, log_metric):
    log_metric("pid", os.getpid())
    return [os.getpid() for _ in completions]
"""
    [score] = mine(source, "one", "other", "process", "one", seconds=60.0).score(finished("a", folder=str(tmp_path)))
    assert (score.parts["one"], score.parts["other"]) == (1.0, 2.0)
    assert score.parts["process"] == score.parts["pid"] != float(os.getpid())


def test_a_warm_process_is_shared_and_ends_with_its_last_user(tmp_path: Path) -> None:
    file = tmp_path / "counts.py"
    file.write_text("calls = []\ndef f(completions):\n    calls.append(1)\n    return [len(calls)]\n")
    settings = DatasetSettings(path="x", reward=[f"{file}:f"])
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os\nos._exit(3)\ndef f(completions): ...\n", "exit code 3"),
        ("def f(completions): ...\nraise SystemExit('no')\n", "line 2: .*SystemExit: no"),
        ("f = 3\n", "int"),
    ],
)
def test_a_file_that_does_not_import_is_a_configuration_error(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "fails.py").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_reward(f"{tmp_path}/fails.py:f")


def test_a_failure_is_named_in_the_log(failing: Mine, caplog: pytest.LogCaptureFixture, says: Says) -> None:
    failing("raise ValueError('bad')").score(finished("a", "bad", "abc", "bad"))
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    says("reward", warning)


@pytest.mark.parametrize("define", ["def", "async def"])
def test_a_function_may_set_an_alarm_of_its_own(mine: Mine, define: str) -> None:
    source = f"""
{define} alarmed(completions):
    rung = []
    signal.signal(signal.SIGALRM, lambda *_: rung.append(1))  # in the main thread alone
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(0.3)
    return [len(rung) for _ in completions]
"""
    assert values(mine(source, "alarmed").score(finished("a"))) == [1.0]
