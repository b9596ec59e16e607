"""The prompts that an evaluation plays, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rlpost.data.conversation import Completion, Conversation
from rlpost.envs import DatasetChatEnv
from rlpost.envs.arithmetic import ArithmeticEnv
from rlpost.errors import RewardError
from rlpost.evaluation.play import EvalResult, play, summarise
from rlpost.evaluation.statistics import Share
from rlpost.policies import ScriptedPolicy
from rlpost.policies.base import Request
from rlpost.policies.drawing import evaluation_sampling
from rlpost.rewards.score import Score
from rlpost.screen import evaluation_line
from rlpost.settings import EvalSamplingSettings, SamplingSettings
from tests.says import Says

GREEDY = SamplingSettings(temperature=0.0)
Make = Callable[..., Conversation]


def share(successes: int, trials: int) -> Share:
    return Share.of([1.0] * successes + [0.0] * (trials - successes))


def four(conversation: Make) -> list[Conversation]:
    """Rewards 1, 0.5, 0 and one that failed; the second was cut; lengths 2, 4, 3 and 9."""
    return [
        conversation(0, reward=1.0, accuracy_lenient=1.0, accuracy_strict=1.0, reward_parts={"a": 1.0}),
        conversation(1, reward=0.5, accuracy_lenient=1.0, accuracy_strict=0.0, response_ids=[7] * 4,
                     finish_reason="length", reward_parts={"a": 0.2, "b": 0.3}),
        conversation(2, reward=0.0, accuracy_lenient=0.0, accuracy_strict=0.0, response_ids=[7] * 3, mask=[1, 0, 1]),
        conversation(3, reward=None, valid=False, response_ids=[7] * 9, finish_reason="length", error="ValueError: x"),
    ]  # fmt: skip


def test_a_failed_reward_is_left_out_of_everything_and_counted(conversation: Make, says: Says) -> None:
    result = summarise(four(conversation))
    assert (result.num_prompts, result.num_failed) == (3, 1)
    assert result.accuracy_lenient == share(2, 3)
    assert result.accuracy_strict == share(1, 3)
    assert result.truncated == share(1, 3)
    assert result.reward_mean == 0.5
    assert result.reward_parts == pytest.approx({"a": 0.6, "b": 0.3})  # over those that have the part
    assert result.tokens_mean == pytest.approx((2 + 4 + 2) / 3)  # sampled ids only
    says("eval", "\n".join(result.lines()))


def test_an_accuracy_that_few_prompts_have_says_how_many(conversation: Make, says: Says) -> None:
    played = four(conversation)
    played[1].accuracy_lenient = None
    result = summarise(played)
    says("eval", "\n".join([*result.lines(), evaluation_line(result.metrics(), "now")]))
    metrics = result.metrics()
    assert (metrics["eval/accuracy_lenient_prompts"], metrics["eval/prompts"]) == (2.0, 3.0)
    assert "eval/accuracy_strict_prompts" not in metrics


def test_instruction_accuracies_are_shares_of_all_instructions(conversation: Make) -> None:
    verdicts = [{"strict": [True, False, False], "loose": [True, True, False]}, {"strict": [True], "loose": [True]}]
    marks = [{"accuracy_strict": n, "accuracy_lenient": n, "instructions": row} for n, row in enumerate(verdicts)]
    played = [conversation(n, **each) for n, each in enumerate(marks)]
    result = summarise(played)
    assert {reading: share.value for reading, share in result.instructions.items()} == {"strict": 2 / 4, "loose": 3 / 4}
    assert result.metrics()["eval/instructions_loose"] == 3 / 4
    assert [line.split("[")[0].split() for line in result.lines()[1:4]] == [
        ["loose", "strict"],
        ["prompt", "level", "50.0%"],
        ["instruction", "level", "75.0%"],
    ]


def test_an_evaluation_whose_every_reward_failed_is_an_error(conversation: Make, says: Says) -> None:
    failed = conversation(reward=None, valid=False, error="ValueError: no such column")
    with says.refused("eval", RewardError, "2"):
        summarise([failed, failed])


# Several completions a prompt


def right_and_wrong(conversation: Make, marks: str, prompt: int, answers: str = "") -> list[Conversation]:
    """One completion for each of `marks`, r(ight) or w(rong), of one prompt; what they say, a letter each."""
    return [
        conversation(prompt, i, reward=float(mark == "r"), accuracy_lenient=float(mark == "r"),
                     accuracy_strict=0.0, answer=(answers[i].strip() if answers else None))
        for i, mark in enumerate(marks)
    ]  # fmt: skip


def test_several_completions_of_a_prompt_give_avg_pass_and_maj(conversation: Make) -> None:
    played = right_and_wrong(conversation, "rwww", 0, "5677") + right_and_wrong(conversation, "rrrw", 1, "555 ")
    result = summarise(played, k=[1, 2, 4], temperature=1.0)
    assert (result.num_prompts, result.num_samples) == (2, 4)
    assert result.accuracy_lenient is not None
    assert result.accuracy_lenient.value == 0.5  # (1/4 + 3/4) / 2
    values = {name: share.value for name, share in result.attempts.items()}
    assert values == pytest.approx(
        {
            "pass_at_2_lenient": (3 / 6 + 6 / 6) / 2,  # of 6 pairs
            "pass_at_2_strict": 0.0,
            "pass_at_4_lenient": 1.0,
            "pass_at_4_strict": 0.0,
            "maj_at_2_lenient": (3 * 0.5 / 6 + 1.0) / 2,  # 5 wins half of its three pairs; silence has no vote
            "maj_at_2_strict": 0.0,
            "maj_at_4_lenient": 0.5,  # 7 has most votes of the first prompt, 5 of the second
            "maj_at_4_strict": 0.0,
        }
    )
    assert result.metrics()["eval/pass_at_4_lenient"] == 1.0
    assert result.metrics()["eval/maj_at_2_lenient_low"] < 0.625


def test_no_votes_without_answers_no_attempts_without_accuracy(conversation: Make) -> None:
    result = summarise(right_and_wrong(conversation, "rw", 0), k=[2])
    assert list(result.attempts) == ["pass_at_2_lenient", "pass_at_2_strict"]
    unmeasured = summarise([conversation(0, i) for i in range(2)], k=[2], temperature=1.0)
    assert unmeasured.attempts == {}
    assert unmeasured.lines()[-1].endswith("no pass@k")


def test_a_prompt_of_too_few_scored_completions_has_no_pass_at_k(conversation: Make) -> None:
    played = right_and_wrong(conversation, "rw", 0) + right_and_wrong(conversation, "ww", 1)
    played[3].valid = False
    result = summarise(played, k=[2], temperature=1.0)
    assert (result.num_prompts, result.num_failed) == (2, 1)
    assert (result.attempts["pass_at_2_lenient"].value, result.attempts["pass_at_2_lenient"].prompts) == (1.0, 1)
    assert [line.split()[-2:] for line in result.lines() if line.startswith("  pass@2")] == [["1", "prompt"]]
    assert result.metrics()["eval/pass_at_2_lenient_prompts"] == 1.0


def test_the_interval_is_that_of_prompts_not_of_completions(conversation: Make) -> None:
    """Eight completions that always agree say no more than one."""
    one = summarise([c for p in range(20) for c in right_and_wrong(conversation, "r" if p % 2 else "w", p)])
    eight = summarise([c for p in range(20) for c in right_and_wrong(conversation, "rw"[p % 2 == 0] * 8, p)])
    assert one.accuracy_lenient == eight.accuracy_lenient


@pytest.mark.parametrize(
    ("samples", "temperature", "drawn_at"), [(1, None, 0.0), (8, None, 1.0), (1, 0.7, 0.7), (8, 0.7, 0.7)]
)
def test_one_completion_is_greedy_and_several_are_drawn(
    samples: int, temperature: float | None, drawn_at: float
) -> None:
    settings = EvalSamplingSettings(temperature, top_p=0.9)
    assert evaluation_sampling(settings, samples) == SamplingSettings(drawn_at, top_p=0.9)


# Playing


class Reader(ScriptedPolicy):
    """Answers sums rightly where the second operand is even, and remembers how it was asked."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(["-"], tokenizer, sampling=SamplingSettings())
        self.asked: list[tuple[int, SamplingSettings]] = []
        self.questions: list[str] = []

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        self.asked.append((len(requests), sampling))
        self.replies = []
        for request in requests:
            words = self.tokenizer.decode(request.prompt_ids).split("What is ")[1].split("?")[0]
            self.questions.append(words)
            a, b = (int(word) for word in words.split(" + "))
            self.replies.append(str(a + b) if b % 2 == 0 else "no idea")
        return super().generate(requests, sampling)


def evaluate(env: DatasetChatEnv, policy: ScriptedPolicy, num_prompts: int) -> EvalResult:
    return summarise(play(env, policy, num_prompts=num_prompts, samples=1, sampling=GREEDY))


def sums() -> ArithmeticEnv:
    return ArithmeticEnv(split="test", seed=3)


def test_the_same_real_sums_are_played_and_scored_every_time(tiny_tokenizer: Any) -> None:
    policy, env = Reader(tiny_tokenizer), sums()
    first, second = (evaluate(env, policy, num_prompts=50) for _ in range(2))
    assert policy.questions[:50] == policy.questions[50:]
    assert len(set(policy.questions)) == 50
    assert policy.asked == [(50, GREEDY)] * 2
    even = sum(int(question[-1]) % 2 == 0 for question in policy.questions[:50])
    assert 10 < even < 40
    assert first == second
    assert first.accuracy_lenient == first.accuracy_strict == share(even, 50)


def test_every_completion_of_a_prompt_has_a_seed_of_its_own(tiny_tokenizer: Any) -> None:
    seeds: list[int] = []

    class Noting(ScriptedPolicy):
        def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
            seeds.extend(request.seed for request in requests)
            return super().generate(requests, sampling)

    policy = Noting(["1", "2", "3"], tiny_tokenizer, sampling=SamplingSettings())
    played = play(sums(), policy, num_prompts=100, samples=3, sampling=SamplingSettings())
    assert [(c.group_id, c.sample) for c in played] == [(g, s) for g in range(100) for s in range(3)]
    assert [c.query for c in played[:3]] == [played[0].query] * 3
    assert len(set(seeds)) == 300
    assert [c.answer for c in played[:3]] == ["1", "2", "3"]
    assert len(played[0].messages) == 2  # the copies share nothing


def test_conversations_of_several_turns_are_played_to_their_end(tiny_tokenizer: Any) -> None:
    class Talk(DatasetChatEnv):
        def next_message(self, conversation: Conversation) -> str | None:
            return "more" if conversation.turns < conversation.task["turns"] else None

        def score(self, conversation: Conversation) -> Score:
            return Score(float(conversation.turns))

    rows = [{"question": "q", "turns": turns} for turns in (1, 3, 2)]
    policy = ScriptedPolicy(["x"], tiny_tokenizer, sampling=SamplingSettings())
    result = evaluate(Talk(rows, shuffle=False, max_steps=3), policy, num_prompts=3)
    assert result.reward_mean == 2.0
    assert result.num_prompts == 3


def test_a_reward_that_raises_is_counted_and_not_a_zero(tiny_tokenizer: Any) -> None:
    class Fussy(DatasetChatEnv):
        def score(self, conversation: Conversation) -> Score:
            return Score(1.0 / (conversation.task["number"] - 1))

    rows = [{"question": "q", "number": number} for number in (1, 2, 3)]
    policy = ScriptedPolicy(["x"], tiny_tokenizer, sampling=SamplingSettings())
    result = evaluate(Fussy(rows, shuffle=False), policy, num_prompts=3)
    assert (result.num_prompts, result.num_failed, result.reward_mean) == (2, 1, 0.75)
    with pytest.raises(RewardError, match=r"1 .*ZeroDivisionError"):
        evaluate(Fussy(rows, shuffle=False), policy, num_prompts=1)
