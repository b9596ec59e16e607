"""Reward functions of one's own: their arguments, the values they may return, and the errors when they fail."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from rlpost.catalog import TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.config.compose import compose
from rlpost.errors import ConfigError, DataError, RewardError
from rlpost.rewards.calls import RewardFunction
from rlpost.rewards.functions import Finished, Rewards, load_rewards
from rlpost.rewards.score import Score
from rlpost.settings import DatasetSettings
from tests.says import Says

CHAT = [{"role": "user", "content": "p?"}]


def finished(*replies: str, prompt: Any = "p?", **columns: list[Any]) -> list[Finished]:
    rows = [{name: values[i] for name, values in columns.items()} for i in range(len(replies))]
    answers = [[row["answer"]] if "answer" in row else [] for row in rows]
    return [Finished(prompt, r, [1, 2], row, right) for r, row, right in zip(replies, rows, answers, strict=True)]


def rewards(*functions: Callable[..., Any], weights: list[float] | None = None, accuracy: Any = None) -> Rewards:
    made = [RewardFunction(f.__name__, f.__name__, f) for f in functions]
    measure = None if accuracy is None else RewardFunction(accuracy.__name__, accuracy.__name__, accuracy)
    return Rewards(made, weights or [1.0] * len(made), measure)


def values(scores: list[Score]) -> list[float | None]:
    return [score.reward if score.valid else None for score in scores]


def length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def test_a_function_is_given_what_it_names_and_nothing_else() -> None:
    seen: dict[str, Any] = {}

    def score(completion_ids: Any, prompts: Any, level: Any, *, completions: Any) -> list[float]:
        seen.update(ids=completion_ids, prompts=prompts, level=level, completions=completions)
        return [1.0, 2.0]

    assert values(rewards(score).score(finished("a", "b", prompt=CHAT, level=[3, 4], other=[5, 6]))) == [1.0, 2.0]
    replies = [[{"role": "assistant", "content": text}] for text in "ab"]
    assert seen == {"ids": [[1, 2], [1, 2]], "prompts": [CHAT, CHAT], "level": [3, 4], "completions": replies}


def test_a_function_with_kwargs_is_given_everything() -> None:
    seen: dict[str, Any] = {}

    def score(prompts: Any, **everything: Any) -> list[float]:
        seen.update(everything)
        return [0.0]

    [row] = finished("a", level=[3], prompts=["a column of that name does not count"])
    rewards(score).score([replace(row, step=7)])
    assert set(seen) == {"completions", "completion_ids", "level", "log_metric", "step"}
    assert seen["step"] == [7]


def test_rewards_are_added_up_by_weight() -> None:
    def one(completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]

    [score] = rewards(length, one, weights=[0.5, 2.0]).score(finished("abcd"))
    assert (score.reward, score.parts) == (4.0, {"length": 4.0, "one": 1.0})  # 0.5 * 4 + 2 * 1


def test_each_reward_has_a_name_of_its_own(tmp_path: Path) -> None:
    names = ("mean", "score", "score", "score_2", "mean_2")
    for place, name in enumerate(names, 1):
        (tmp_path / f"r{place}.py").write_text(f"def {name}(completions):\n    return [{place}] * len(completions)\n")
    reward = [f"{tmp_path}/r{place}.py:{name}" for place, name in enumerate(names, 1)]
    loaded = load_rewards(DatasetSettings(path="x", reward=[*reward, "contains"]))
    assert loaded is not None
    [score] = loaded.score(finished("x", answer=["x"]))
    assert score.reward == 16.0
    assert score.parts == {"mean_2": 1, "score": 2, "score_2": 3, "score_2_2": 4, "mean_2_2": 5, "contains": 1}


@pytest.mark.parametrize("name", ["mean", "std", "failed"])
def test_a_score_has_no_part_of_such_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"reward/{name}"):
        Score(1.0, {name: 1.0})


def test_what_a_function_does_to_its_lists_changes_nothing() -> None:
    def greedy(completions: list[str], completion_ids: list[list[int]], tags: list[list[str]]) -> list[float]:
        completion_ids[0].clear()
        return [float(len(each.pop())) for each in tags]

    def other(completions: list[str], completion_ids: list[list[int]], tags: list[list[str]]) -> list[float]:
        return [float(len(tags[0]) + len(completion_ids[0])) for _ in completions]

    shared = ["abc"]  # as the rows of a group have
    for _ in range(2):
        scores = rewards(greedy, other).score(finished("a", "b", tags=[shared, shared]))
        assert [score.parts for score in scores] == [{"greedy": 3.0, "other": 3.0}] * 2
    assert shared == ["abc"]


def test_none_leaves_a_reward_out_of_its_row(says: Says) -> None:
    def sometimes(completions: list[str]) -> list[float | None]:
        return [None if text == "no" else 5.0 for text in completions]

    first, second = rewards(length, sometimes).score(finished("yes", "no"))
    assert (first.reward, first.parts) == (8.0, {"length": 3.0, "sometimes": 5.0})
    assert (second.reward, second.parts) == (2.0, {"length": 2.0})
    first, second = rewards(sometimes).score(finished("yes", "no"))
    assert (first.valid, second.valid) == (True, False)
    says("reward", second.error)


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


@pytest.mark.parametrize("returned", [None, 1.0, ["0"], [[1.0]], [torch.tensor([1, 2])]], ids=repr)
def test_what_is_no_list_of_numbers_is_an_error_of_its_row(returned: Any, says: Says) -> None:
    def score(completions: list[str]) -> Any:
        if "bad" in completions and not isinstance(returned, list):
            return returned
        return [returned[0] if text == "bad" else 1.0 for text in completions]

    good, bad = rewards(score).score(finished("good", "bad"))
    assert (good.reward, good.valid, bad.valid) == (1.0, True, False)
    says("reward", bad.error)
    [alone] = rewards(score).score(finished("bad"))
    assert not alone.valid
    with pytest.raises(RewardError, match="of 2 completions"):
        rewards(score).score(finished("bad", "bad"))


@pytest.mark.parametrize("returned", [[], [1.0], [1.0, 2.0, 3.0]], ids=len)
def test_a_list_of_the_wrong_length_is_an_error_of_the_call(returned: list[float]) -> None:
    calls: list[int] = []

    def score(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        return returned if len(completions) == 2 else [5.0]

    with pytest.raises(RewardError, match=f"{len(returned)} values: .* 2 numbers"):
        rewards(score).score(finished("a", "b"))
    assert calls == [2]  # no row is tried alone


@pytest.mark.parametrize(
    ("weight", "good", "bad", "shown"),
    [
        (1.0, 3.4e38, 1e40, "1e+40"),  # float32 ends at 3.4028e38
        (1.0, 3.4e38, -3.5e38, "-3.5e+38"),
        (1e9, 3.4e29, 1e30, "1e+39"),  # the sum
        (0.0, 1.0, float("inf"), "inf"),
        (0.0, 1.0, float("nan"), "nan"),
    ],
)
def test_what_float32_cannot_hold_is_an_error_of_its_row(weight: float, good: float, bad: Any, shown: str) -> None:
    calls: list[int] = []

    def score(completions: list[str]) -> list[Any]:
        calls.append(len(completions))
        return [bad if text == "bad" else good for text in completions]

    kept, failed = rewards(length, score, weights=[1.0, weight]).score(finished("good", "bad"))
    assert (kept.reward, failed.valid, calls) == (pytest.approx(4 + weight * good), False, [2])
    assert torch.tensor(kept.reward, dtype=torch.float32).isfinite()
    assert f" {shown}, " in (failed.error or "")


def test_errors_of_data_are_not_taken_for_the_models() -> None:
    async def score(completions: list[str]) -> list[float]:
        raise DataError("no answers")

    with pytest.raises(DataError, match=r"^no answers"):
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
def test_a_function_that_does_not_return_stops_the_run(function: Callable[..., Any]) -> None:
    async def quick(completions: list[str]) -> list[float]:
        return [1.0]

    RELEASED.clear()
    made = Rewards([RewardFunction(f.__name__, f.__name__, f) for f in (quick, function)], [1.0, 1.0], None, 0.5)
    began = time.monotonic()
    with pytest.raises(RewardError, match=rf"^{function.__name__} .* 0\.5 s: .*env\.reward_timeout_seconds"):
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
            raise TimeoutError("late")
        return [1.0 for _ in completions]

    good, bad = rewards(score).score(finished("good", "bad"))
    assert (good.reward, bad.valid) == (1.0, False)
    assert (bad.error or "").endswith("TimeoutError: late")


def test_a_reward_for_the_other_form_of_completions_gets_a_hint(says: Says) -> None:
    def for_messages(completions: Any) -> list[float]:
        return [float(completion[0]["content"] == "a") for completion in completions]

    def for_texts(completions: Any) -> list[float]:
        return [float(bool(re.search("a", completion))) for completion in completions]

    texts, chat = finished("a"), finished("a", prompt=CHAT)
    for function, right, wrong in ((for_messages, chat, texts), (for_texts, texts, chat)):
        [good], [bad] = rewards(function).score(right), rewards(function).score(wrong)
        assert (good.reward, bad.valid) == (1.0, False)
        says("reward", (bad.error or "").partition("; ")[2])


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
    with pytest.raises(RewardError, match=r"env\.accuracy=length .*3\.0"):
        rewards(length, accuracy=length).score(finished("yes"))


@pytest.mark.parametrize(
    ("reward", "accuracy", "expected"),
    [
        (["contains", "exact"], None, (0.0, 0.0)),
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


def test_a_missing_column_is_named_with_the_nearest(says: Says) -> None:
    def score(completions: Any, answr: Any) -> list[float]:
        return []

    with says.refused("reward", DataError, "answr"):
        rewards(score).offer_columns(["prompt", "answer"], "my.jsonl")


@pytest.mark.parametrize("name", ["trainer_state", "log_extra"])
def test_what_trl_alone_offers_is_refused_unless_optional(name: str) -> None:
    made = rewards(eval(f"lambda completions, {name}: []"))
    with pytest.raises(ConfigError, match=f"write {name}=None"):
        made.offer_columns(["prompt"], "my.jsonl")
    rewards(eval(f"lambda completions, {name}=None, **more: []")).offer_columns(["prompt"], "my.jsonl")


@pytest.mark.parametrize(("command", "more"), [(TRAIN_GRPO, []), (TRAIN_SFT, ["eval.accuracy=true"])])
def test_what_scores_replies_needs_a_reward(command: Command[Any], more: list[str], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "completion": "y"}\n')
    with pytest.raises(ConfigError, match=r"env\.reward.*FILE\.py:FUNCTION"):
        compose(command, ["env=dataset", f"env.path={tmp_path}/rows.jsonl", "env.reward=[]", *more])
