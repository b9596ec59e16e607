"""Shares with their intervals, and what an evaluation plays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rlpost.data.conversation import Completion, Conversation
from rlpost.envs import DatasetChatEnv
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.errors import RewardError
from rlpost.evaluate import Proportion, evaluate, summarise
from rlpost.policies import ScriptedPolicy
from rlpost.policies.base import Request
from rlpost.rewards.score import Score
from rlpost.screen import evaluation_line
from rlpost.settings import SamplingSettings

GREEDY = SamplingSettings(temperature=0.0)
Make = Callable[..., Conversation]


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (10, 40, 0.1419, 0.4019),
        (0, 20, 0.0, 0.1611),
        (20, 20, 0.8389, 1.0),
        (1, 1, 0.2065, 1.0),
        (250, 500, 0.4563, 0.5437),
    ],
)
def test_wilson_intervals_worked_out_by_hand(successes: int, trials: int, low: float, high: float) -> None:
    share = Proportion.of(successes, trials)
    assert share.value == successes / trials
    assert (share.low, share.high) == pytest.approx((low, high), abs=5e-5)


def test_a_share_reads_as_percent_with_its_interval() -> None:
    assert str(Proportion.of(10, 40)) == " 25.0%  [14.2%, 40.2%]"


def four(conversation: Make) -> list[Conversation]:
    """Rewards 1, 0.5, 0 and one that failed; the second was cut; lengths 2, 4, 3 and 9."""
    return [
        conversation(0, reward=1.0, accuracy_lenient=1.0, accuracy_strict=1.0, reward_parts={"a": 1.0}),
        conversation(1, reward=0.5, accuracy_lenient=1.0, accuracy_strict=0.0, response_ids=[7] * 4,
                     finish_reason="length", reward_parts={"a": 0.2, "b": 0.3}),
        conversation(2, reward=0.0, accuracy_lenient=0.0, accuracy_strict=0.0, response_ids=[7] * 3, mask=[1, 0, 1]),
        conversation(3, reward=None, valid=False, response_ids=[7] * 9, finish_reason="length", error="ValueError: x"),
    ]  # fmt: skip


def test_a_failed_reward_is_left_out_of_everything_and_counted(conversation: Make) -> None:
    result = summarise(four(conversation))
    assert (result.num_prompts, result.num_failed) == (3, 1)
    assert result.accuracy_lenient == Proportion.of(2, 3)
    assert result.accuracy_strict == Proportion.of(1, 3)
    assert result.truncated == Proportion.of(1, 3)
    assert result.reward_mean == 0.5
    assert result.reward_parts == pytest.approx({"a": 0.6, "b": 0.3})  # over those that have the part
    assert result.tokens_mean == pytest.approx((2 + 4 + 2) / 3)  # sampled ids only


def test_an_accuracy_that_few_prompts_have_says_how_many(conversation: Make) -> None:
    played = four(conversation)
    played[1].accuracy_lenient = None
    result = summarise(played)
    lines = result.lines()
    assert lines[:3] == [
        "3 prompts, 95% intervals",
        "  accuracy, lenient    50.0%  [9.5%, 90.5%] of 2 prompts",
        "  accuracy, strict     33.3%  [6.1%, 79.2%]",
    ]
    assert evaluation_line(result.metrics(), "now").startswith(
        "held-out now:  accuracy 50.0% [9.5%, 90.5%] of 2 prompts  reward"
    )
    metrics = result.metrics()
    assert (metrics["eval/accuracy_lenient_prompts"], metrics["eval/prompts"]) == (2.0, 3.0)
    assert "eval/accuracy_strict_prompts" not in metrics


def test_a_result_reads_as_a_small_table(conversation: Make) -> None:
    assert summarise(four(conversation)).lines() == [
        "3 prompts, 95% intervals",
        "  accuracy, lenient    66.7%  [20.8%, 93.9%]",
        "  accuracy, strict     33.3%  [6.1%, 79.2%]",
        "  truncated            33.3%  [6.1%, 79.2%]",
        "  reward               0.500   (a 0.600, b 0.300)",
        "  tokens per answer      2.7",
        "  reward failed            1   (left out above)",
    ]


def test_its_figures_carry_the_names_of_the_metrics(conversation: Make) -> None:
    metrics = summarise(four(conversation)).metrics()
    share = Proportion.of(2, 3)
    assert metrics["eval/prompts"] == 3
    assert metrics["eval/failed"] == 1
    assert metrics["eval/reward"] == 0.5
    assert metrics["eval/truncated"] == pytest.approx(1 / 3)
    assert metrics["eval/tokens_mean"] == pytest.approx(8 / 3)
    assert [metrics[f"eval/accuracy_lenient{end}"] for end in ("", "_low", "_high")] == [
        share.value,
        share.low,
        share.high,
    ]


def test_a_measure_the_task_does_not_have_is_none_and_no_metric(conversation: Make) -> None:
    result = summarise([conversation(), conversation(1)])
    assert (result.accuracy_lenient, result.accuracy_strict) == (None, None)
    assert not [name for name in result.metrics() if "accuracy" in name]
    assert result.as_dict()["accuracy_strict"] is None
    assert result.as_dict()["truncated"] == {
        "value": 0.0,
        "low": 0.0,
        "high": pytest.approx(0.6576, abs=1e-4),
        "trials": 2,
    }
    assert [line.split()[0] for line in result.lines()] == ["2", "truncated", "reward", "tokens"]


def test_an_evaluation_whose_every_reward_failed_is_an_error(conversation: Make) -> None:
    failed = conversation(reward=None, valid=False, error="ValueError: no such column")
    with pytest.raises(RewardError, match="all 2 rewards of the evaluation failed; the first: ValueError: no such"):
        summarise([failed, failed])


# Playing


class Reader(ScriptedPolicy):
    """Answers sums rightly where the second operand is even, and remembers how it was asked."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(["-"], tokenizer, sampling=SamplingSettings())
        self.asked: list[tuple[int, SamplingSettings]] = []
        self.questions: list[str] = []

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        self.asked.append((len(requests), sampling))
        made = []
        for request in requests:
            words = self.tokenizer.decode(request.prompt_ids).split("What is ")[1].split("?")[0]
            self.questions.append(words)
            a, b = (int(word) for word in words.split(" + "))
            made.append(self._complete(str(a + b) if b % 2 == 0 else "no idea", request.max_tokens))
        return made


def sums() -> ArithmeticEnv:
    return ArithmeticEnv(split="test", seed=3)


def test_real_sums_are_played_and_scored(tiny_tokenizer: Any) -> None:
    policy = Reader(tiny_tokenizer)
    result = evaluate(sums(), policy, num_prompts=50, sampling=GREEDY)
    even = sum(int(question[-1]) % 2 == 0 for question in policy.questions)
    assert 10 < even < 40
    assert result.accuracy_lenient == result.accuracy_strict == Proportion.of(even, 50)
    assert policy.asked == [(50, GREEDY)]


def test_the_same_tasks_are_played_every_time(tiny_tokenizer: Any) -> None:
    policy, env = Reader(tiny_tokenizer), sums()
    first = evaluate(env, policy, num_prompts=20, sampling=GREEDY)
    second = evaluate(env, policy, num_prompts=20, sampling=GREEDY)
    assert policy.questions[:20] == policy.questions[20:]
    assert len(set(policy.questions)) == 20
    assert first == second


def test_progress_is_told_between_rounds_of_256(tiny_tokenizer: Any) -> None:
    told: list[tuple[int, int]] = []
    policy = Reader(tiny_tokenizer)
    progress = lambda done, total: told.append((done, total))  # noqa: E731
    evaluate(sums(), policy, num_prompts=300, sampling=GREEDY, progress=progress)
    assert told == [(0, 300), (256, 300), (300, 300)]
    assert [size for size, _ in policy.asked] == [256, 44]


def test_conversations_of_several_turns_are_played_to_their_end(tiny_tokenizer: Any) -> None:
    class Talk(DatasetChatEnv):
        def next_message(self, conversation: Conversation) -> str | None:
            return "more" if conversation.turns < conversation.task["turns"] else None

        def score(self, conversation: Conversation) -> Score:
            return Score(float(conversation.turns))

    rows = [{"question": "q", "turns": turns} for turns in (1, 3, 2)]
    policy = ScriptedPolicy(["x"], tiny_tokenizer, sampling=SamplingSettings())
    result = evaluate(Talk(rows, shuffle=False, max_steps=3), policy, num_prompts=3, sampling=GREEDY)
    assert result.reward_mean == 2.0
    assert result.num_prompts == 3


def test_a_reward_that_raises_is_counted_and_not_a_zero(tiny_tokenizer: Any) -> None:
    class Fussy(DatasetChatEnv):
        def score(self, conversation: Conversation) -> Score:
            return Score(1.0 / (conversation.task["number"] - 1))

    rows = [{"question": "q", "number": number} for number in (1, 2, 3)]
    policy = ScriptedPolicy(["x"], tiny_tokenizer, sampling=SamplingSettings())
    result = evaluate(Fussy(rows, shuffle=False), policy, num_prompts=3, sampling=GREEDY)
    assert (result.num_prompts, result.num_failed, result.reward_mean) == (2, 1, 0.75)
    with pytest.raises(RewardError, match="all 1 rewards of the evaluation failed; the first: ZeroDivisionError"):
        evaluate(Fussy(rows, shuffle=False), policy, num_prompts=1, sampling=GREEDY)
