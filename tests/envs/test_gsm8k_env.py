# pyright: reportArgumentType=false
# TensorDict.set takes a list of str, which its annotation leaves out

import os
from pathlib import Path

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from rlpost.data.chat import Continuation
from rlpost.data.conversation import Conversation
from rlpost.envs import ChatEnv, GSM8KEnv, GSM8KPrepareQuestion, GSM8KRewardParser, make_gsm8k_env
from rlpost.envs.proof import prove
from rlpost.errors import DataError
from rlpost.model.conversion import tiny_tokenizer
from rlpost.rewards.score import Score
from tests.envs.own_rows import answer, answered, write_rows
from tests.says import Says

ROWS = [
    {"question": "2 + 2?", "answer": "2+2 = <<2+2=4>>4\n#### 4"},
    {"question": "1000 + 4?", "answer": "It is 1,004.\n#### 1,004"},
    {"question": "2 - 5?", "answer": "2-5 = -3\n#### -3"},
]
DATA = Path(os.environ.get("RLPOST_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "gsm8k"


def replied(env: GSM8KEnv, text: str, finish_reason: str = "stop") -> Conversation:
    return answered(env, text, finish_reason=finish_reason)[0]


def test_a_task_holds_question_solution_and_final_answer(tmp_path: Path) -> None:
    conversation = GSM8KEnv(str(write_rows(tmp_path, ROWS)), shuffle=False, held_out=0).draw()[0]
    assert conversation.task == {"question": "2 + 2?", "solution": "2+2 = <<2+2=4>>4", "answer": "4"}
    assert [m["role"] for m in conversation.messages] == ["system", "user"]
    assert conversation.query == "2 + 2?"


def test_a_reply_is_scored_without_the_tags_of_the_system_prompt() -> None:
    env = GSM8KEnv(ROWS, shuffle=False, limit=1)
    right = replied(env, "<think>2+2</think><answer>4</answer>")
    assert (right.reward, right.accuracy_strict, right.accuracy_lenient, right.terminated) == (1.0, 1.0, 1.0, True)
    none = replied(env, "The answer is 4.")
    assert (none.reward, none.accuracy_strict, none.accuracy_lenient) == (0.0, 0.0, 1.0)
    cut = replied(env, "<think>2+2", "length")
    assert (cut.reward, cut.truncated) == (0.0, True)


def test_rewards_can_be_left_out_or_tiered() -> None:
    unscored = replied(GSM8KEnv(ROWS, compute_reward=False), "<answer>4</answer>")
    assert (unscored.reward, unscored.done) == (None, True)
    env = GSM8KEnv(ROWS, shuffle=False, tiers=(5.0, 1.0, -1.0))
    assert [replied(env, text).reward for text in ("<answer>4</answer>", "<answer>5</answer>", "4")] == [5.0, 1.0, -1.0]


def test_a_row_without_final_answer_is_named_by_row_and_field(tmp_path: Path) -> None:
    bad = {"question": "And?", "answer": "no number"}
    with pytest.raises(DataError, match=r"rows\.jsonl, row 4, field 'answer': .*'#### '"):
        GSM8KEnv(str(write_rows(tmp_path, [*ROWS, bad]))).start()
    with pytest.raises(DataError, match="row 1, field 'answer'"):
        GSM8KEnv([bad]).start()


def test_building_reads_nothing_and_starting_does(tmp_path: Path) -> None:
    env = GSM8KEnv(str(tmp_path / "nothing"))
    with pytest.raises(DataError, match="nothing"):
        env.start()


def test_the_parser_scores_a_tensordict() -> None:
    replies, answers, before = zip(
        ("<think>a</think><answer>4</answer><|im_end|>\n", "2+2\n#### 4", 0.5),
        ("<answer>5</answer>", "#### 4", 0.0),
        ("<think>a</think>", "4", 0.0),
        ("<answer>1004.0</answer>", "1,004", 0.0),
        strict=True,
    )
    given = {"text": {"response": NonTensorStack(*replies)}, "answer": NonTensorStack(*answers)}
    scored = GSM8KRewardParser()(TensorDict({**given, "reward": torch.tensor(before)[:, None]}, batch_size=[4]))
    assert scored["reward"].shape == torch.Size([4, 1, 1])
    assert scored["reward"].flatten().tolist() == pytest.approx([1.5, 0.1, 0.0, 1.0])
    assert scored["reward_answer"].flatten().tolist() == [1.0, 1.0, 0.0, 1.0]
    assert scored["reward_think"].flatten().tolist() == [1.0, 0.0, 1.0, 0.0]
    assert scored["reward_right"].flatten().tolist() == [1.0, 0.0, 0.0, 1.0]
    assert scored["success"].flatten().tolist() == [True, False, False, True]
    assert scored["done"].flatten().tolist() == [True, True, False, True]


def test_the_parser_adds_to_a_reward_and_ends_any_chat() -> None:
    env = ChatEnv(1, tokenizer=None).append_transform(GSM8KRewardParser())
    start = env.reset(TensorDict({"text": NonTensorStack("2+2?"), "answer": NonTensorStack("#### 4")}, batch_size=[1]))
    stepped = env.step(start.set("text_response", ["<answer>4</answer><|im_end|>"]))
    assert stepped["next", "reward"].tolist() == [[1.0]]
    assert stepped["next", "reward_parts", "format"].item() == pytest.approx(0.1)
    assert stepped["next", "done"].tolist() == [[True]]
    assert stepped["next", "accuracy_strict"].tolist() == [[1.0]]


def test_a_prepared_question_ends_inside_the_reasoning() -> None:
    prepare = GSM8KPrepareQuestion()
    prompt = prepare.prepare("2 + 2?")
    assert prompt.endswith("User: 2 + 2?\n\nAssistant: <think>")
    prepared = prepare(TensorDict({"text": NonTensorStack("2 + 2?")}, batch_size=[1]))
    assert prepared["text"] == [prompt]
    renamed = GSM8KPrepareQuestion("Q: {question}", in_key="query", out_key="prompt")
    written = renamed(TensorDict({"query": NonTensorStack("Why?")}, batch_size=[1]))
    assert (written["query"], written["prompt"]) == (["Why?"], ["Q: Why?"])


def test_an_environment_made_of_transforms_scores_alike() -> None:
    env = make_gsm8k_env(ROWS, num_envs=2, repeats=2, group_repeats=True)
    drawn = env.draw()
    assert [c.group_id for c in drawn] == [0, 0, 1, 1]
    assert [m["role"] for m in drawn[0].messages] == ["user"]
    assert drawn[0].query.endswith("Assistant: <think>")
    Continuation(tiny_tokenizer()).begin(drawn[0])
    assert drawn[0].prompt_text == drawn[0].query  # nothing follows what the model is to go on from
    answer(env, drawn, *(f"<answer>{conversation.task['answer']}</answer>" for conversation in drawn))
    assert [(c.reward, c.accuracy_strict, c.terminated) for c in drawn] == [(1.0, 1.0, True)] * 4


def test_a_proof_holds_on_true_answers_and_names_what_fails(says: Says) -> None:
    proof = prove(GSM8KEnv(ROWS))
    assert (proof.holds, proof.checked, proof.replies) == (True, 3, 3 * 8)

    class Blind(GSM8KEnv):
        def score(self, conversation: Conversation) -> Score:
            return Score(1.0, accuracy_strict=1.0, accuracy_lenient=1.0)

    blind = prove(Blind(ROWS[:1]))
    assert (blind.holds, len(blind.failures)) == (False, 7)
    says("env", "\n".join([*proof.lines(), *blind.lines()]))


def test_a_proof_of_nothing_does_not_hold() -> None:
    class Empty(GSM8KEnv):
        def all_tasks(self):
            return iter(())

    assert not prove(Empty(ROWS)).holds
    with pytest.raises(DataError, match="gold answers"):
        prove(ChatEnv())


@pytest.mark.skipif(not DATA.is_dir(), reason="the GSM8K files are not on this machine")
@pytest.mark.parametrize(("split", "rows"), [("train", 7473), ("test", 1319)])
def test_every_gold_answer_of_the_dataset_scores_full_marks(split: str, rows: int) -> None:
    proof = prove(GSM8KEnv(str(DATA), split=split))
    assert (proof.checked, proof.failures) == (rows, [])
