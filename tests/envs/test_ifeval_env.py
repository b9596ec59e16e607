# pyright: reportArgumentType=false
# TensorDict.set takes a list of str, which its annotation leaves out
"""Prompts with instructions: rows, scoring on both faces, and the score's own data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

pytest.importorskip("if_verifiable")

from rlpost.data.conversation import Conversation
from rlpost.envs import ChatEnv, IFEvalEnv, IFEvalScoreData, IfEvalScorer
from rlpost.envs.build import build_env
from rlpost.envs.ifeval import ANSWER_PROMPT
from rlpost.errors import ConfigError, DataError
from rlpost.rewards.ifbench import IFBENCH
from rlpost.settings import IFBenchSettings
from tests.envs.own_rows import answer, answered, write_rows
from tests.rewards.instruction_data import (
    IFBENCH_ROWS,
    NLTK_DATA,
    find_nltk_data_in,
    needs_ifbench,
)
from tests.says import Says

QUOTED = {"key": 1, "prompt": "Quote it.", "instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
BOTH = {
    "key": 2,
    "prompt": "Quote two words, without a comma.",
    "instruction_id_list": ["startend:quotation", "length_constraints:number_words", "punctuation:no_comma"],
    "kwargs": [{}, {"num_words": 2, "relation": "at least", "keywords": None}, {}],
}
ROWS = [QUOTED, BOTH]
FOLLOWS_BOTH = '"One two"'


@pytest.fixture(autouse=True)
def nltk_data(monkeypatch: pytest.MonkeyPatch) -> None:
    find_nltk_data_in([str(NLTK_DATA)], monkeypatch)


def replied(env: ChatEnv, text: str, finish_reason: str = "stop") -> Conversation:
    return answered(env, text, finish_reason=finish_reason)[0]


def test_the_prompt_is_asked_as_it_stands() -> None:
    conversation = IFEvalEnv(ROWS, shuffle=False).draw()[0]
    assert conversation.messages == [{"role": "user", "content": "Quote it."}]
    assert conversation.task == QUOTED


def test_the_whole_reply_is_judged() -> None:
    env = IFEvalEnv([BOTH])
    right = replied(env, FOLLOWS_BOTH)
    assert (right.reward, right.accuracy_strict, right.accuracy_lenient, right.terminated) == (1.0, 1.0, 1.0, True)
    loosely = replied(env, f"Sure\n{FOLLOWS_BOTH}")
    assert loosely.reward == pytest.approx(0.3 * 2 / 3 + 0.2 + 0.1)
    assert (loosely.accuracy_strict, loosely.accuracy_lenient) == (0.0, 1.0)
    partly = replied(env, "One, two", "length")
    assert partly.reward == pytest.approx((0.3 + 0.1) / 3)
    assert (partly.accuracy_strict, partly.accuracy_lenient, partly.truncated) == (0.0, 0.0, True)
    assert (replied(env, "").reward, replied(env, f"<answer>{FOLLOWS_BOTH}</answer>").accuracy_strict) == (0.0, 0.0)
    assert env.max_reward == 1.0


def test_the_first_answer_block_alone_may_be_judged() -> None:
    env = IFEvalEnv([BOTH], answer_only=True)
    assert env.draw()[0].messages[0] == {"role": "system", "content": ANSWER_PROMPT}
    perfect = replied(env, f"<think>So, then</think>\n<answer>\n{FOLLOWS_BOTH}\n</answer>")
    assert perfect.reward == env.max_reward == pytest.approx(1.15)
    assert (perfect.accuracy_strict, perfect.accuracy_lenient) == (1.0, 1.0)
    assert perfect.reward_parts["answer_block"] == pytest.approx(0.1)
    assert perfect.reward_parts["think_block"] == pytest.approx(0.05)
    assert replied(env, f"<answer>{FOLLOWS_BOTH}</answer>").reward == pytest.approx(1.1)
    twice = replied(env, f"<answer>{FOLLOWS_BOTH}</answer><answer>no, no</answer>")
    assert (twice.reward, twice.accuracy_strict) == (pytest.approx(1.0), 1.0)
    bare = replied(env, FOLLOWS_BOTH)
    assert (bare.reward, bare.accuracy_strict, bare.accuracy_lenient) == (0.0, 0.0, 0.0)
    assert replied(env, "<think>a</think>").reward == pytest.approx(0.05)


def test_rewards_can_be_left_out_or_weighted() -> None:
    unscored = replied(IFEvalEnv(ROWS, compute_reward=False), FOLLOWS_BOTH)
    assert (unscored.reward, unscored.accuracy_strict, unscored.done) == (None, None, True)
    weighted = IFEvalEnv([BOTH], format_weights=[0.0, 0.0, 2.0, 0.0])
    assert replied(weighted, f"Sure\n{FOLLOWS_BOTH}").reward == weighted.max_reward == 2.0


# Rows


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (QUOTED | {"instruction_id_list": ["startend:quotations"]}, "instruction_id_list"),
        (QUOTED | {"kwargs": None}, "kwargs"),
        (QUOTED | {"kwargs": [{"words": 3}]}, "kwargs"),
        (QUOTED | {"prompt": " "}, "prompt"),
    ],
    ids=["kind", "null", "argument", "prompt"],
)
def test_a_bad_row_is_named_by_file_row_and_field(row: dict[str, Any], field: str, tmp_path: Path, says: Says) -> None:
    with says.refused("env", DataError, f"rows.jsonl, row 2, field '{field}': "):
        IFEvalEnv(str(write_rows(tmp_path, [BOTH, row]))).start()


def test_rows_with_some_kinds_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    sentences = {"num_sentences": 2, "relation": "at least"}
    counted = {"prompt": "Two.", "instruction_id_list": ["length_constraints:number_sentences"], "kwargs": [sentences]}
    file = str(write_rows(tmp_path, [QUOTED, counted, BOTH]))
    find_nltk_data_in([str(tmp_path)], monkeypatch)
    with pytest.raises(DataError, match=r"length_constraints:number_sentences .* punkt_tab"):
        IFEvalEnv(file, split="test", held_out=1.0).start()
    kinds = ["length_constraints:number_sentences"]
    env = IFEvalEnv(file, split="test", held_out=1.0, leave_out=kinds, shuffle=False)
    assert [conversation.task["key"] for conversation in env.draw(2)] == [1, 2]
    assert IFEvalEnv(file, split="test", held_out=1.0, leave_out=kinds, limit=1).num_tasks == 1
    with says.refused("env", DataError, "1 rows"):
        IFEvalEnv([counted], leave_out=kinds).start()
    with says.refused("env", ConfigError, "env.leave_out"):
        IFEvalEnv(ROWS, leave_out=["startend:quotations"]).start()


# The TensorDict face


def test_a_step_brings_the_verdicts_beside_the_reward() -> None:
    env = IFEvalEnv(ROWS, shuffle=False, num_envs=2)
    start = env.reset()
    assert "ifeval_score" not in start
    stepped = env.step(start.set("text_response", [f"Sure\n{FOLLOWS_BOTH}<|im_end|>", "One, two"]))["next"]
    assert stepped["reward"].tolist() == [[pytest.approx(0.3)], [pytest.approx(0.4 / 3)]]
    assert stepped["accuracy_lenient"].tolist() == [[1.0], [0.0]]
    score = stepped["ifeval_score"]
    assert isinstance(score, IFEvalScoreData)
    assert score.prompt_level_strict_acc.tolist() == [[0.0], [0.0]]
    assert score.prompt_level_loose_acc.tolist() == [[1.0], [0.0]]
    assert [row.tolist() for row in score.inst_level_strict_acc.unbind()] == [[0.0], [0.0, 1.0, 0.0]]
    assert [row.tolist() for row in score.inst_level_loose_acc.unbind()] == [[1.0], [0.0, 1.0, 0.0]]


def test_a_reply_whose_check_raises_is_invalid() -> None:
    row = {"prompt": "JSON.", "instruction_id_list": ["detectable_format:json_format"], "kwargs": [{}]}
    env = IFEvalEnv([row, QUOTED], shuffle=False, num_envs=2)
    stepped = env.step(env.reset().set("text_response", ["[" * 100_000, '"So."']))["next"]
    failed = stepped["conversation"][0]
    assert (failed.reward, failed.valid) == (None, False)
    assert "detectable_format:json_format" in failed.error
    assert math.isnan(stepped["reward"][0].item())
    assert stepped["reward"][1].tolist() == [1.0]
    score = stepped["ifeval_score"]
    assert math.isnan(score.prompt_level_strict_acc[0].item())
    assert math.isnan(score.inst_level_loose_acc.unbind()[0].item())
    assert score.inst_level_strict_acc.unbind()[1].tolist() == [1.0]


# The scorer by itself


def rows_to_score(*replies: str) -> TensorDict:
    names = {"text": "prompt", "instruction_id_list": "instruction_id_list", "kwargs": "kwargs"}
    columns = {key: NonTensorStack(*[row[name] for row in ROWS]) for key, name in names.items()}
    return TensorDict({**columns, "text_response": NonTensorStack(*replies)}, batch_size=[2])


def test_the_scorer_scores_a_tensordict() -> None:
    scored = IfEvalScorer()(rows_to_score('<think>a</think><answer>"So."</answer>', FOLLOWS_BOTH))
    assert scored["reward"].tolist() == [[pytest.approx(1.15)], [0.0]]
    assert scored["done"].tolist() == [[True], [True]]
    assert [row.tolist() for row in scored["ifeval_score"].inst_level_strict_acc.unbind()] == [[1.0], [0.0, 0.0, 0.0]]
    whole = IfEvalScorer(answer_only=False, score_key="score")(
        rows_to_score("So.", FOLLOWS_BOTH).set("reward", torch.tensor([[0.5], [0.5]]))
    )
    assert whole["reward"].tolist() == [[0.5], [1.5]]
    assert whole["score"].prompt_level_strict_acc.tolist() == [[0.0], [1.0]]


def test_the_scorer_ends_and_scores_any_chat() -> None:
    env = ChatEnv(1, tokenizer=None).append_transform(IfEvalScorer())
    kinds, arguments = NonTensorStack(["startend:quotation"]), NonTensorStack([{}])
    asked = {"text": NonTensorStack("Quote it."), "instruction_id_list": kinds, "kwargs": arguments}
    start = env.reset(TensorDict(asked, batch_size=[1]))
    stepped = env.step(start.set("text_response", ['<answer>"So."</answer>']))["next"]
    assert stepped["reward"].tolist() == [[pytest.approx(1.1)]]
    assert stepped["done"].tolist() == [[True]]
    assert stepped["accuracy_strict"].tolist() == [[1.0]]
    assert stepped["ifeval_score"].inst_level_loose_acc.unbind()[0].tolist() == [1.0]


def test_a_reward_of_ones_own_is_given_the_verdicts_and_blocks() -> None:
    given: list[Any] = []

    def bonus(score: IFEvalScoreData, **blocks: Any) -> torch.Tensor:
        given.append((score.inst_level_strict_acc.tolist(), blocks))
        return score.inst_level_loose_acc.sum() + 10 * len(blocks["answer_blocks"])

    env = ChatEnv(1).append_transform(IfEvalScorer(aggregate_reward=bonus))
    [conversation] = env.begin([{"query": "Quote it.", **BOTH}])
    answer(env, [conversation], "<think>t</think><answer>One two</answer>", finish_reason="length")
    assert conversation.reward == 12.0
    assert (conversation.truncated, conversation.reward_parts) == (True, {})
    blocks = {"think_blocks": ["t"], "answer_blocks": ["One two"], "complete": False}
    assert given == [([0.0, 1.0, 1.0], blocks)]


def test_the_scorer_may_leave_the_reward_to_others() -> None:
    scored = IfEvalScorer(aggregate_reward=False)(rows_to_score('<answer>"So."</answer>', ""))
    assert "reward" not in scored
    assert scored["ifeval_score"].prompt_level_strict_acc.tolist() == [[1.0], [0.0]]


def test_completions_are_learned_from_where_rows_have_them() -> None:
    learned = list(IFEvalEnv([QUOTED | {"completion": '"So."'}]).demonstrations())
    assert learned[0].where.endswith(", row 1")
    assert learned[0].messages == [{"role": "user", "content": "Quote it."}, {"role": "assistant", "content": '"So."'}]
    with pytest.raises(DataError, match=r"row 2 .*'completion'"):
        list(IFEvalEnv([QUOTED | {"completion": '"So."'}, BOTH]).demonstrations())


@needs_ifbench
def test_ifbench_is_played_and_has_no_gold_answers() -> None:
    settings = IFBenchSettings(
        path=str(IFBENCH_ROWS), split="test", held_out=1.0, leave_out=["words:start_verb"], shuffle=False
    )
    env = build_env(settings)
    assert (type(env).__name__, env.num_tasks) == ("IFBenchEnv", 294)
    words = "kaleidoscope nebula nebula " + "whisper " * 3 + "labyrinth " * 5 + "paradox " * 7
    assert replied(env, words).reward == 1.0
    assert env.rehearse() == ["the instructions of 294 rows can be checked; no reply is known to be right"]


def test_the_scorer_takes_ifbench_too() -> None:
    scorer = IfEvalScorer(answer_only=False, instructions=IFBENCH)
    task = {"instruction_id_list": ["format:no_whitespace"], "kwargs": [{"N": None}]}
    assert scorer.judge(task, "one").strict == [True]
    assert scorer.judge(task, "one two").strict == [False]
