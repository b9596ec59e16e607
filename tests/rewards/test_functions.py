"""Reward functions of one's own: what they are given, what they may return, what is said when they fail."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from rlpost.catalog import TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.config.compose import compose
from rlpost.errors import ConfigError, DataError, RewardError
from rlpost.rewards.calls import RewardFunction
from rlpost.rewards.functions import Finished, Rewards, load_reward, load_rewards
from rlpost.rewards.score import Score
from rlpost.settings import ArithmeticSettings, DatasetSettings


def finished(*replies: str, prompt: Any = "p?", **columns: list[Any]) -> list[Finished]:
    rows = [{name: values[i] for name, values in columns.items()} for i in range(len(replies))]
    answers = [[row["answer"]] if "answer" in row else [] for row in rows]
    return [Finished(prompt, r, [1, 2], row, right) for r, row, right in zip(replies, rows, answers, strict=True)]


def rewards(*functions: Callable[..., Any], weights: list[float] | None = None, accuracy: Any = None) -> Rewards:
    made = [RewardFunction(f.__name__, f.__name__, f) for f in functions]
    measure = None if accuracy is None else RewardFunction(accuracy.__name__, accuracy.__name__, accuracy)
    return Rewards(made, weights or [1.0] * len(made), measure)


def from_file(folder: Path, text: str, name: str = "score") -> Rewards:
    file = folder / "mine.py"
    file.write_text(text)
    return Rewards([load_reward(f"{file}:{name}")], [1.0])


def values(scores: list[Score]) -> list[float | None]:
    return [score.reward if score.valid else None for score in scores]


def length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def test_a_function_is_given_what_it_names_and_nothing_else() -> None:
    seen: dict[str, Any] = {}

    def score(completion_ids: Any, prompts: Any, level: Any, *, completions: Any) -> list[float]:
        seen.update(ids=completion_ids, prompts=prompts, level=level, completions=completions)
        return [1.0, 2.0]

    assert values(rewards(score).score(finished("a", "b", level=[3, 4], other=[5, 6]))) == [1.0, 2.0]
    assert seen == {"ids": [[1, 2], [1, 2]], "prompts": ["p?", "p?"], "level": [3, 4], "completions": ["a", "b"]}


def test_a_function_with_kwargs_is_given_everything() -> None:
    seen: dict[str, Any] = {}

    def score(prompts: Any, /, **everything: Any) -> list[float]:
        seen.update(everything)
        return [0.0]

    rewards(score).score(finished("a", level=[3], prompts=["a column of that name does not count"]))
    assert set(seen) == {"completions", "completion_ids", "level", "log_metric", "step"}


def test_prompts_of_messages_make_completions_of_messages() -> None:
    seen: list[Any] = []

    def score(prompts: Any, completions: Any) -> list[float]:
        seen.extend([prompts, completions])
        return [1.0]

    prompt = [{"role": "user", "content": "p?"}]
    rewards(score).score(finished("yes", prompt=prompt))
    assert seen == [[prompt], [[{"role": "assistant", "content": "yes"}]]]


def test_rewards_are_added_up_by_weight_and_told_apart() -> None:
    def one(completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]

    [score] = rewards(length, one, weights=[0.5, 2.0]).score(finished("abcd"))
    assert (score.reward, score.parts) == (4.0, {"length": 4.0, "one": 1.0})  # 0.5 * 4 + 2 * 1


def test_two_functions_of_one_name_get_a_suffix(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.py").write_text(f"def score(completions):\n    return [{value}] * len(completions)\n")
    settings = DatasetSettings(path="x", reward=[f"{tmp_path}/a.py:score", f"{tmp_path}/b.py:score", "contains"])
    loaded = load_rewards(settings)
    assert loaded is not None
    [score] = loaded.score(finished("x", answer=["x"]))
    assert (score.reward, score.parts) == (4.0, {"score": 1.0, "score_2": 2.0, "contains": 1.0})


def test_no_reward_takes_the_name_of_a_steps_own_figure_or_of_another(tmp_path: Path) -> None:
    names = ("mean", "score", "score", "score_2", "mean_2")
    for place, name in enumerate(names):
        (tmp_path / f"r{place}.py").write_text(f"def {name}(completions):\n    return [1] * len(completions)\n")
    reward = [f"{tmp_path}/r{place}.py:{name}" for place, name in enumerate(names)]
    loaded = load_rewards(DatasetSettings(path="x", reward=reward))
    assert loaded is not None
    [score] = loaded.score(finished("x"))
    assert (score.reward, list(score.parts)) == (5.0, ["mean_2", "score", "score_2", "score_2_2", "mean_2_2"])


@pytest.mark.parametrize("name", ["mean", "std", "failed"])
def test_an_environments_score_has_no_part_of_such_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"a part of a reward is named {name}"):
        Score(1.0, {name: 1.0})


def test_what_a_function_does_to_its_lists_changes_nothing() -> None:
    def greedy(completions: list[str], completion_ids: list[list[int]], tags: list[list[str]]) -> list[float]:
        completion_ids[0].clear()
        return [float(len(tags[0].pop()))]

    def other(completions: list[str], completion_ids: list[list[int]], tags: list[list[str]]) -> list[float]:
        return [float(len(tags[0]) + len(completion_ids[0]))]

    batch = finished("a", tags=[["abc"]])
    for _ in range(2):
        assert [s.parts for s in rewards(greedy, other).score(batch)] == [{"greedy": 3.0, "other": 3.0}]


def test_none_leaves_a_reward_out_of_its_row() -> None:
    def sometimes(completions: list[str]) -> list[float | None]:
        return [None if text == "no" else 5.0 for text in completions]

    first, second = rewards(length, sometimes).score(finished("yes", "no"))
    assert (first.reward, first.parts) == (8.0, {"length": 3.0, "sometimes": 5.0})
    assert (second.reward, second.parts) == (2.0, {"length": 2.0})
    first, second = rewards(sometimes).score(finished("yes", "no"))
    assert (first.valid, second.valid) == (True, False)
    assert second.error == "sometimes returned None: no reward applies to this row"


@pytest.mark.parametrize(
    "returned",
    [
        [True, False],
        (1, 0),
        numpy.array([1.0, 0.0]),
        [numpy.float32(1), numpy.bool_(False)],
        torch.tensor([1, 0]),
        [torch.tensor(1.0), torch.tensor([False])],
    ],
    ids=repr,
)
def test_bools_and_scalars_of_numpy_and_torch_are_numbers(returned: Any) -> None:
    def score(completions: list[str]) -> Any:
        return returned

    assert values(rewards(score).score(finished("a", "b"))) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "score returned None: it must return a list with one number a completion"),
        (1.0, "score returned float 1.0: it must return a list with one number a completion"),
        (["0"], "score returned str '0' at place 0 of its list: each value must be a number or None"),
        ([[1.0]], "score returned list [1.0] at place 0"),
        ([torch.tensor([1, 2])], "at place 0"),
    ],
    ids=repr,
)
def test_what_is_no_list_of_numbers_is_an_error_of_its_row(returned: Any, said: str) -> None:
    def score(completions: list[str]) -> Any:
        if "bad" in completions and not isinstance(returned, list):
            return returned
        return [returned[0] if text == "bad" else 1.0 for text in completions]

    good, bad = rewards(score).score(finished("good", "bad"))
    assert (good.reward, good.valid, bad.valid) == (1.0, True, False)
    assert said in (bad.error or "")
    with pytest.raises(RewardError, match="no reward for any of 2 completions; the first: score returned"):
        rewards(score).score(finished("bad", "bad"))


@pytest.mark.parametrize("returned", [[], [1.0], [1.0, 2.0, 3.0]], ids=len)
def test_a_list_of_the_wrong_length_is_an_error_of_the_call_and_no_row_is_tried_alone(returned: list[float]) -> None:
    calls: list[int] = []

    def score(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        return returned if len(completions) == 2 else [5.0]

    said = f"score returned {len(returned)} values: it must return a list of 2 numbers, one a completion"
    with pytest.raises(RewardError, match=f"no reward for any of 2 completions; the first: {said}"):
        rewards(score).score(finished("a", "b"))
    assert calls == [2]


@pytest.mark.parametrize(
    ("value", "weight", "said"),
    [
        (
            1e40,
            1.0,
            r"score returned 1e\+40, which is infinite in float32, where rewards are trained on: scale it down",
        ),
        (-3.5e38, 1.0, r"score returned -3.5e\+38, which is infinite in float32"),
        (1e30, 1e9, r"the rewards times env.reward_weights are 1e\+39, which is infinite in float32"),
        (10**400, 1.0, "score returned inf, which is not a finite number"),
    ],
)
def test_what_float32_cannot_hold_is_an_error_of_its_row(value: float, weight: float, said: str) -> None:
    calls: list[int] = []

    def score(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        return [value if text == "bad" else 3.4e38 / weight for text in completions]

    good, bad = Rewards([RewardFunction("score", "score", score)], [weight]).score(finished("good", "bad"))
    assert (good.valid, bad.valid, calls) == (True, False, [2])
    assert torch.tensor(good.reward, dtype=torch.float32).isfinite()
    assert re.match(said, bad.error or "")


def test_rows_that_raise_are_found_and_left_out(tmp_path: Path) -> None:
    mine = from_file(
        tmp_path, "def score(completions):\n    return [\n        1 / len(text) for text in completions\n    ]\n"
    )
    good, bad, other = mine.score(finished("ab", "", "a"))
    assert (good.reward, bad.valid, other.reward) == (0.5, False, 1.0)
    file = tmp_path / "mine.py"
    assert bad.error == f"{file}:score failed: {file}, line 3: ZeroDivisionError: division by zero"


def test_a_function_that_raises_for_every_row_stops_the_run_with_its_line(tmp_path: Path) -> None:
    mine = from_file(tmp_path, "import sys\ndef score(completions, **kw):\n    sys.exit('no')\n")
    with pytest.raises(RewardError, match=r"no reward for any of 2 completions.*mine.py, line 3: SystemExit: no"):
        mine.score(finished("a", "b"))
    [alone] = mine.score(finished("a"))
    assert not alone.valid


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
def test_a_value_that_is_no_finite_number_is_an_error_of_its_row_even_at_weight_0(value: Any) -> None:
    def score(completions: list[str]) -> list[Any]:
        return [value if text == "bad" else 1.0 for text in completions]

    good, bad = rewards(length, score, weights=[1.0, 0.0]).score(finished("good", "bad"))
    assert (good.reward, bad.valid) == (4.0, False)
    assert "which is not a finite number" in (bad.error or "")


def test_errors_of_data_are_not_taken_for_the_models() -> None:
    async def score(completions: list[str]) -> list[float]:
        raise DataError("the answers cannot be read")

    with pytest.raises(DataError, match="cannot be read"):
        rewards(score).score(finished("a", "b"))


def test_async_functions_are_awaited_together() -> None:
    said = asyncio.Event()

    async def listen(completions: list[str]) -> list[float]:
        await asyncio.wait_for(said.wait(), timeout=30)
        return [1.0 for _ in completions]

    async def speak(completions: list[str]) -> list[float]:
        said.set()
        return [2.0 for _ in completions]

    assert values(rewards(listen, speak, length).score(finished("a", "bb"))) == [4.0, 5.0]


async def awaits(completions: list[str]) -> list[float]:
    await asyncio.sleep(60)
    return [1.0]


RELEASED = threading.Event()


async def blocks(completions: list[str]) -> list[float]:
    RELEASED.wait(60)
    return [1.0]


def sleeps(completions: list[str]) -> list[float]:
    try:
        time.sleep(60)
    except Exception:  # noqa: BLE001  as a client that tries again does
        return [1.0]
    return [1.0]


@pytest.mark.parametrize("function", [awaits, blocks, sleeps])
def test_a_function_that_does_not_return_stops_the_run_by_name(function: Callable[..., Any]) -> None:
    async def quick(completions: list[str]) -> list[float]:
        return [1.0]

    RELEASED.clear()
    made = Rewards([RewardFunction(f.__name__, f.__name__, f) for f in (quick, function)], [1.0, 1.0], None, 0.5)
    began = time.monotonic()
    with pytest.raises(RewardError, match=f"^{function.__name__} did not return within 0.5 s: raise env.rew"):
        made.score(finished("a", "b"))
    assert time.monotonic() - began < 30
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    RELEASED.set()  # the one event loop is free again
    assert values(rewards(quick).score(finished("a"))) == [1.0]


def test_rows_of_an_async_function_fail_one_by_one() -> None:
    async def score(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        if "bad" in completions:
            raise TimeoutError("no reply")
        return [1.0 for _ in completions]

    good, bad = rewards(score).score(finished("good", "bad"))
    assert (good.reward, bad.error) == (1.0, "score failed: TimeoutError: no reply")


def test_a_reward_for_the_other_form_of_completions_is_answered_with_the_form_it_gets() -> None:
    def for_messages(completions: Any) -> list[float]:
        return [float(completion[0]["content"] == "a") for completion in completions]

    def for_texts(completions: Any) -> list[float]:
        return [float(bool(re.search("a", completion))) for completion in completions]

    chat = [{"role": "user", "content": "p?"}]
    [good] = rewards(for_messages).score(finished("a", prompt=chat))
    [bad] = rewards(for_messages).score(finished("a"))
    assert (good.reward, good.error) == (1.0, None)
    assert 'write completion for completion[0]["content"]' in (bad.error or "")
    [good] = rewards(for_texts).score(finished("a"))
    [bad] = rewards(for_texts).score(finished("a", prompt=chat))
    assert (good.reward, good.error) == (1.0, None)
    assert 'its text is completion[0]["content"]' in (bad.error or "")


def test_a_logged_metric_is_a_part_that_is_not_added_up() -> None:
    def score(completions: list[str], log_metric: Callable[[str, float], None]) -> list[float]:
        log_metric("brevity", 2)
        log_metric("brevity", 4)
        return [1.0 / (len(text) - 1) for text in completions]

    scores = rewards(score).score(finished("ab", "abc"))
    assert [s.parts for s in scores] == [{"score": 1.0, "brevity": 3.0}, {"score": 0.5, "brevity": 3.0}]
    assert values(scores) == [1.0, 0.5]
    assert [s.weights for s in scores] == [{"score": 1.0, "brevity": 0.0}] * 2
    good, bad = rewards(score).score(finished("ab", "a"))
    assert (good.parts, bad.valid) == ({"score": 1.0, "brevity": 3.0}, False)


def test_accuracy_is_measured_apart_from_the_reward() -> None:
    def right(completions: list[str]) -> list[bool | None]:
        return [None if text == "?" else text == "yes" for text in completions]

    scores = rewards(length, accuracy=right).score(finished("yes", "no", "?"))
    assert [s.accuracy_strict for s in scores] == [s.accuracy_lenient for s in scores] == [1.0, 0.0, None]
    assert [s.parts for s in scores] == [{"length": 3.0}, {"length": 2.0}, {"length": 1.0}]


def test_an_accuracy_is_0_or_1() -> None:
    with pytest.raises(RewardError, match=r"env.accuracy=length returned 3.0: it must return 0, 1 or None"):
        rewards(length, accuracy=length).score(finished("yes"))


@pytest.mark.parametrize(
    ("reward", "accuracy", "expected"),
    [
        (["number"], None, (0.0, 1.0)),
        (["contains", "exact"], None, (0.0, 0.0)),
        (["contains"], None, (None, None)),
        (["contains"], "number", (0.0, 1.0)),
        (["number"], "contains", (1.0, 1.0)),
    ],
)
def test_built_in_rewards_measure_accuracy(
    reward: list[str], accuracy: str | None, expected: tuple[float | None, float | None]
) -> None:
    loaded = load_rewards(DatasetSettings(path="x", reward=reward, accuracy=accuracy))
    assert loaded is not None
    [score] = loaded.score(finished("It is 7", answer=["7"]))
    assert (score.accuracy_strict, score.accuracy_lenient) == expected


def test_a_missing_column_is_named_with_the_nearest() -> None:
    def score(completions: Any, answr: Any) -> list[float]:
        return []

    with pytest.raises(DataError, match=r"score takes answr, which is not a column of my.jsonl; did you mean answer\?"):
        rewards(score).offer_columns(["prompt", "answer"], "my.jsonl")


@pytest.mark.parametrize("name", ["trainer_state", "log_extra"])
def test_what_rlpost_does_not_offer_is_said(name: str) -> None:
    made = rewards(eval(f"lambda completions, {name}: []"))
    with pytest.raises(ConfigError, match=f"takes {name}, which rlpost does not offer: write {name}=None there"):
        made.offer_columns(["prompt"], "my.jsonl")
    rewards(eval(f"lambda completions, {name}=None, **more: []")).offer_columns(["prompt"], "my.jsonl")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("numbr", r"numbr is not a reward; did you mean number\?"),
        ("{folder}/mine.py:scroe", r"defines no function scroe; did you mean score\?"),
        ("{folder}/mine.py:LIMIT", "is not a function but int"),
        ("{folder}/mien.py:score", r"there is no file .*mien.py; did you mean .*mine.py\?"),
    ],
)
def test_a_reward_that_is_not_there_is_a_configuration_error(reward: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("LIMIT = 3\ndef score(completions): ...\n")
    with pytest.raises(ConfigError, match=said):
        load_reward(reward.format(folder=tmp_path))


def test_an_environment_with_a_reward_of_its_own_loads_none() -> None:
    assert load_rewards(ArithmeticSettings()) is None


@pytest.mark.parametrize(("command", "more"), [(TRAIN_GRPO, []), (TRAIN_SFT, ["eval.accuracy=true"])])
def test_what_scores_replies_needs_a_reward(command: Command[Any], more: list[str], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "completion": "y"}\n')
    with pytest.raises(ConfigError, match=r"env.reward is empty: give FILE.py:FUNCTION"):
        compose(command, ["env=dataset", f"env.path={tmp_path}/rows.jsonl", "env.reward=[]", *more])
