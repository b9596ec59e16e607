# pyright: reportArgumentType=false
# TensorDict.set takes a list of str, which its annotation leaves out
"""Prompts with instructions: rows, scoring on both faces, the score's own data, and the proof."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

pytest.importorskip("if_verifiable")

from rlpost.data.conversation import Completion, Conversation
from rlpost.envs import ChatEnv, IFEvalEnv, IFEvalScoreData, IfEvalScorer
from rlpost.envs.build import build_env
from rlpost.envs.ifeval import ANSWER_PROMPT
from rlpost.envs.proof import prove
from rlpost.errors import ConfigError, DataError
from rlpost.rewards.ifbench import IFBENCH
from rlpost.settings import IFBenchSettings
from tests.rewards.instruction_data import (
    IFBENCH_ROWS,
    IFEVAL_ROWS,
    NLTK_DATA,
    find_nltk_data_in,
    needs_ifbench,
    needs_ifeval,
)

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


def file_of(rows: list[dict[str, Any]], folder: Path) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def replied(env: ChatEnv, text: str, finish_reason: str = "stop") -> Conversation:
    conversation = env.draw()[0]
    conversation.add_completion(Completion([], [], text, finish_reason, 0))
    env.advance([conversation])
    return conversation


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


def test_a_check_that_raises_makes_the_reply_invalid_and_names_the_instruction() -> None:
    row = {"prompt": "JSON.", "instruction_id_list": ["detectable_format:json_format"], "kwargs": [{}]}
    failed = replied(IFEvalEnv([row]), "[" * 100_000)
    assert (failed.reward, failed.valid) == (None, False)
    assert "detectable_format:json_format cannot be checked" in (failed.error or "")


# Rows


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"instruction_id_list": ["startend:quotations"]}, "'instruction_id_list': .*did you mean startend:quotation"),
        ({"kwargs": []}, "field 'kwargs': there are 0 for 1 instructions"),
        ({"kwargs": [{"words": 3}]}, "field 'kwargs': startend:quotation has no argument 'words'"),
        ({"prompt": " "}, "field 'prompt': is empty"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_file_row_and_field(
    broken: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = file_of([BOTH, {**QUOTED, **broken}], tmp_path)
    with pytest.raises(DataError, match=rf"rows.jsonl, row 2, .*{message}"):
        IFEvalEnv(str(file)).start()


def test_a_row_without_instructions_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 1, field 'instruction_id_list': missing"):
        IFEvalEnv(str(file_of([{"prompt": "Why?"}], tmp_path))).start()
    with pytest.raises(DataError, match="the dataset, row 1, field 'kwargs'"):
        IFEvalEnv([{**QUOTED, "kwargs": None}]).start()


def test_rows_with_some_kinds_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = {"num_sentences": 2, "relation": "at least"}
    counted = {"prompt": "Two.", "instruction_id_list": ["length_constraints:number_sentences"], "kwargs": [sentences]}
    file = str(file_of([QUOTED, counted, BOTH], tmp_path))
    find_nltk_data_in([str(tmp_path)], monkeypatch)
    with pytest.raises(DataError, match="length_constraints:number_sentences needs NLTK's punkt_tab"):
        IFEvalEnv(file, split="test", held_out=1.0).start()
    kinds = ["length_constraints:number_sentences"]
    env = IFEvalEnv(file, split="test", held_out=1.0, leave_out=kinds, shuffle=False)
    assert [conversation.task["key"] for conversation in env.draw(2)] == [1, 2]
    assert IFEvalEnv(file, split="test", held_out=1.0, leave_out=kinds, limit=1).num_tasks == 1
    with pytest.raises(DataError, match="leaves none of 1 rows"):
        IFEvalEnv([counted], leave_out=kinds).start()
    with pytest.raises(ConfigError, match="not an instruction of IFEval; did you mean startend:quotation"):
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


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_the_reward_is_the_same_in_every_input_mode(mode: str, tiny_tokenizer: Any) -> None:
    env = IFEvalEnv([BOTH], tokenizer=tiny_tokenizer, input_mode=mode)
    ids = tiny_tokenizer(FOLLOWS_BOTH, add_special_tokens=False)["input_ids"]
    reply = {
        "text": {"response": NonTensorStack(FOLLOWS_BOTH)},
        "tokens": {"response": torch.nested.nested_tensor([torch.tensor(ids)], layout=torch.jagged)},
    }
    stepped = env.step(env.reset().update(TensorDict(reply, batch_size=[1])))["next"]
    assert (stepped["reward"].tolist(), stepped["accuracy_strict"].tolist()) == ([[1.0]], [[1.0]])


def test_a_reply_whose_check_failed_has_no_verdict() -> None:
    row = {"prompt": "JSON.", "instruction_id_list": ["detectable_format:json_format"], "kwargs": [{}]}
    env = IFEvalEnv([row, QUOTED], shuffle=False, num_envs=2)
    stepped = env.step(env.reset().set("text_response", ["[" * 100_000, '"So."']))["next"]
    assert stepped["reward"][1].tolist() == [1.0]
    assert math.isnan(stepped["reward"][0].item())
    score = stepped["ifeval_score"]
    assert math.isnan(score.prompt_level_strict_acc[0].item())
    assert math.isnan(score.inst_level_loose_acc.unbind()[0].item())
    assert score.inst_level_strict_acc.unbind()[1].tolist() == [1.0]


# The scorer by itself


def rows_to_score(*replies: str) -> TensorDict:
    return TensorDict(
        {
            "text": NonTensorStack("Quote it.", "Quote two words, without a comma."),
            "instruction_id_list": NonTensorStack(*[row["instruction_id_list"] for row in ROWS]),
            "kwargs": NonTensorStack(*[row["kwargs"] for row in ROWS]),
            "text_response": NonTensorStack(*replies),
        },
        batch_size=[2],
    )


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


def test_the_scorer_ends_and_scores_the_conversations_of_any_chat() -> None:
    env = ChatEnv(1, tokenizer=None).append_transform(IfEvalScorer())
    asked = TensorDict(
        {
            "text": NonTensorStack("Quote it."),
            "instruction_id_list": NonTensorStack(["startend:quotation"]),
            "kwargs": NonTensorStack([{}]),
        },
        batch_size=[1],
    )
    stepped = env.step(env.reset(asked).set("text_response", ['<answer>"So."</answer>']))["next"]
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
    conversation = env.begin([{"query": "Quote it.", **BOTH}])[0]
    conversation.add_completion(Completion([], [], "<think>t</think><answer>One two</answer>", "length", 0))
    env.advance([conversation])
    assert conversation.reward == 12.0
    assert (conversation.truncated, conversation.reward_parts) == (True, {})
    blocks = {"think_blocks": ["t"], "answer_blocks": ["One two"], "complete": False}
    assert given == [([0.0, 1.0, 1.0], blocks)]


def test_the_scorer_may_leave_the_reward_to_others() -> None:
    scored = IfEvalScorer(aggregate_reward=False)(rows_to_score('<answer>"So."</answer>', ""))
    assert "reward" not in scored
    assert scored["ifeval_score"].prompt_level_strict_acc.tolist() == [[1.0], [0.0]]


def test_the_scorer_takes_ifbench_too() -> None:
    scorer = IfEvalScorer(answer_only=False, instructions=IFBENCH)
    task = {"instruction_id_list": ["format:no_whitespace"], "kwargs": [{"N": None}]}
    assert scorer.judge(task, "one").strict == [True]
    assert scorer.judge(task, "one two").strict == [False]


# The proof


@needs_ifeval
@pytest.mark.parametrize("answer_only", [False, True])
def test_replies_made_for_each_instruction_of_the_dataset_are_scored_rightly(answer_only: bool) -> None:
    env = IFEvalEnv(str(IFEVAL_ROWS), split="test", held_out=1.0, answer_only=answer_only)
    assert env.num_tasks == 541
    proof = prove(env)
    assert proof.failures == []
    assert proof.lines()[0].startswith("380 replies made to follow an instruction and ")
    assert proof.replies == 380 * (5 if answer_only else 4)


def test_a_proof_finds_a_reward_that_is_wrong() -> None:
    class Blind(IFEvalEnv):
        def score(self, conversation: Conversation) -> Any:
            return IFEvalEnv([QUOTED]).scorer.score_conversation(replied(IFEvalEnv([QUOTED]), '"So."'))

    assert len(prove(Blind([QUOTED])).failures) == 3


def test_completions_are_learned_from_where_rows_have_them() -> None:
    learned = list(IFEvalEnv([{**QUOTED, "completion": '"So."'}]).demonstrations())
    assert [(one.where, one.messages) for one in learned] == [
        ("the dataset, row 1", [{"role": "user", "content": "Quote it."}, {"role": "assistant", "content": '"So."'}])
    ]
    with pytest.raises(DataError, match=r"row 2 has no answer to learn from, .*: add a field 'completion'"):
        list(IFEvalEnv([{**QUOTED, "completion": '"So."'}, BOTH]).demonstrations())


@needs_ifbench
def test_ifbench_is_played_and_says_that_it_has_no_gold_answers() -> None:
    settings = IFBenchSettings(
        path=str(IFBENCH_ROWS), split="test", held_out=1.0, leave_out=["words:start_verb"], shuffle=False
    )
    env = build_env(settings, num_prompts=1, group_size=1, seed=0)
    assert (type(env).__name__, env.num_tasks) == ("IFBenchEnv", 294)
    words = "kaleidoscope nebula nebula " + "whisper " * 3 + "labyrinth " * 5 + "paradox " * 7
    assert replied(env, words).reward == 1.0
    with pytest.raises(
        DataError, match="all 294 rows of the split test can be checked, but IFBench has no gold answers"
    ):
        prove(env)
