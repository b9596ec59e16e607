"""Rows and rewards of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlpost.data.conversation import Conversation
from rlpost.envs.dataset import DatasetEnv
from rlpost.envs.proof import cases_of, prove
from rlpost.envs.row_checks import as_answer
from rlpost.errors import ConfigError, DataError, RewardError
from rlpost.settings import DatasetSettings
from tests.envs.own_rows import answered, env_of, write_rows
from tests.says import Says

ROWS = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1), "level": n % 3} for n in range(40)]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi. What do you want?"},
    {"role": "user", "content": "1 + 1"},
]


def reward_file(folder: Path, returned: str) -> list[str]:
    (folder / "r.py").write_text(f"def score(completions, **columns):\n    return {returned}\n")
    return [f"{folder}/r.py:score"]


@pytest.mark.parametrize(
    ("row", "settings", "asked"),
    [
        ({"text": "no", "prompt": "Yes?"}, {}, "Yes?"),
        ({"text": "no", "messages": "Yes?"}, {}, "Yes?"),
        ({"text": "no", "question": "Yes?"}, {}, "Yes?"),
        ({"prompt": "x", "a": 1, "b": 2}, {"prompt_template": "{a} plus {b}"}, "1 plus 2"),
        ({"a": 1, "b": 2}, {"prompt_template": "{a} plus {b}"}, "1 plus 2"),
    ],
)
def test_the_prompt_is_found_or_written(row: dict[str, Any], settings: Any, asked: str, tmp_path: Path) -> None:
    env = env_of(tmp_path, [row | {"answer": "1"}], **settings)
    assert [message["content"] for message in env.draw()[0].messages] == [asked]


@pytest.mark.parametrize("template", ["always", "{open"])
def test_a_template_without_a_field_is_refused(template: str, says: Says) -> None:
    with says.refused("env", ConfigError, "env.prompt_template"):
        DatasetSettings(path="x", reward=["exact"], prompt_template=template)


def test_drawing_messages_leaves_the_rows_as_they_are(tmp_path: Path) -> None:
    env = env_of(tmp_path, [{"prompt": CHAT, "answer": "2"}])
    env.draw()[0].messages[0]["content"] = "changed"
    assert env.draw()[0].messages == CHAT


BAD_PROMPTS = [
    " ",
    3,
    [*CHAT, {"role": "system", "content": "a"}],
    [*CHAT, {"role": "user"}],
    [{"role": "user", "content": ["a"]}],
    [{"role": "user", "content": "a", "images": ["a.png"]}],
]
BAD_ROWS = [
    {"answer": "1"},
    {"promt": "a", "answer": "1"},
    {"prompt": "a"},
    *({"prompt": "a", "answer": bad} for bad in (None, True, float("nan"), " ")),
    ["a"],
    [ROWS[0]],
    *({"prompt": bad, "answer": "1"} for bad in BAD_PROMPTS),
]


def test_a_bad_row_is_named_by_file_row_and_field(tmp_path: Path, says: Says) -> None:
    told = []
    for row in BAD_ROWS:
        env = env_of(tmp_path, [*ROWS, row])
        with pytest.raises(DataError, match=r"/rows\.jsonl, row 41, ") as raised:
            env.start()
        told.append(f"{row}\n  {str(raised.value).partition(', row 41, ')[2]}")
    says("env", "\n".join(told))


@pytest.mark.parametrize(
    ("key", "value"), [("prompt_column", "promt"), ("answer_column", "anwser"), ("prompt_template", "{levle}")]
)
def test_a_wrong_column_is_answered_with_the_nearest(key: str, value: str, tmp_path: Path, says: Says) -> None:
    with says.refused("env", DataError, "rows.jsonl, row 1, field "):
        env_of(tmp_path, ROWS, **{key: value}).start()


def test_an_answer_is_needed_by_built_in_rewards_alone(tmp_path: Path) -> None:
    rows, own = [{"prompt": "a"}], reward_file(tmp_path, "[1.0]")
    env_of(tmp_path, rows, reward=own).start()
    with pytest.raises(DataError, match="'answer': missing"):
        env_of(tmp_path, rows, reward=[*own, "exact"]).start()
    with pytest.raises(DataError, match=r"field 'answer': .* number"):
        env_of(tmp_path, [{"prompt": "a", "answer": "none"}], reward=["number"]).start()


def test_what_ends_together_is_scored_together(tmp_path: Path) -> None:
    reward = reward_file(tmp_path, "[len(completions) + level for level in columns['level']]")
    drawn = answered(env_of(tmp_path, ROWS, reward=reward), "a", "b", "c", "d")
    assert [c.reward for c in drawn] == [4.0, 5.0, 6.0, 4.0]
    assert all(c.terminated and c.accuracy_strict is None for c in drawn)


def test_a_reward_sees_what_was_asked(tmp_path: Path) -> None:
    reward = reward_file(tmp_path, "[float(p == 'Say: x') for p in columns['prompts']]")
    rows = [{"prompt": "x", "answer": "1"}]
    env = env_of(tmp_path, rows, reward=reward, prompt_template="Say: {prompt}", system_prompt="S")
    assert answered(env, "1")[0].reward == 1.0


def test_a_failed_row_is_invalid_and_the_others_are_not(tmp_path: Path) -> None:
    env = env_of(tmp_path, ROWS, reward=reward_file(tmp_path, "[1 / len(c) for c in completions]"))
    drawn = answered(env, "ab", "")
    assert [(c.valid, c.reward) for c in drawn] == [(True, 0.5), (False, None)]
    assert "line 2: ZeroDivisionError" in (drawn[1].error or "")
    with pytest.raises(RewardError, match="2 completions"):
        answered(env, "", "")


def test_train_and_test_share_no_prompt_of_messages(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{n}"}], "answer": "1"} for n in range(30)] * 2
    envs = [env_of(tmp_path, rows, held_out=0.3, split=split) for split in ("train", "test")]
    train, test = ({task["prompt"][0]["content"] for task in env.rows} for env in envs)
    assert not train & test
    assert len(train | test) == 30


def test_numbers_are_answers_in_full() -> None:
    values = ["a", 7, 7.5, 1e20, 1e-7, True, None, [1], float("nan")]
    assert list(map(as_answer, values)) == ["a", "7", "7.5", "1" + "0" * 20, "0.0000001", None, None, None, None]


WORKED = "2 + 2 = 4\n#### 4"


@pytest.mark.parametrize("gold", ["Paris", "new york", "aa", "Yes.", WORKED])
def test_answers_prove_the_built_in_rewards(gold: str, tmp_path: Path) -> None:
    for reward in ["number"] if gold == WORKED else ["exact", "contains"]:
        assert prove(env_of(tmp_path, [{"prompt": "a", "answer": gold}], reward=[reward])).holds


@pytest.mark.parametrize(
    ("returned", "failed", "gold", "corrupted"),
    [
        ("[float(c == a) for c, a in zip(completions, columns['answer'])]", 0, [1.0] * 3, [0.0] * 6),
        ("[float(c == '') for c in completions]", 3, [0.0] * 3, [1.0, 0.0] * 3),
        ("[0.5 for _ in completions]", 0, [0.5] * 3, [0.5] * 6),
    ],
    ids=["right", "backwards", "constant"],
)
def test_ones_own_reward_is_tried_on_every_answer(
    returned: str, failed: int, gold: list[float], corrupted: list[float], tmp_path: Path, says: Says
) -> None:
    proof = prove(env_of(tmp_path, ROWS[:3], reward=reward_file(tmp_path, returned)))
    assert (len(proof.failures), proof.gold, proof.corrupted) == (failed, gold, corrupted)
    assert proof.holds == (gold > corrupted)
    says("env", "\n".join(proof.lines()))


def test_answers_that_are_objects_are_gold_replies(tmp_path: Path) -> None:
    rows = [{"prompt": f"Row {n}", "answer": {"name": "Ann", "ages": [n]}} for n in (1, 2)]
    as_json = "[float(c == __import__('json').dumps(a)) for c, a in zip(completions, columns['answer'])]"
    env = env_of(tmp_path, rows, reward=(tried := reward_file(tmp_path, as_json)))
    assert [case.gold for case in cases_of(env, 2)] == ['{"name": "Ann", "ages": [1]}', '{"name": "Ann", "ages": [2]}']
    proof = prove(env)
    assert (set(proof.gold), set(proof.corrupted)) == ({1.0}, {0.0})
    said = env_of(tmp_path, [{"prompt": "Hi", "answer": [{"role": "assistant", "content": "Ho"}]}], reward=tried)
    assert [case.gold for case in cases_of(said, 1)] == ["Ho"]


def test_a_gold_reply_may_have_several_turns(tmp_path: Path) -> None:
    class Passwords(DatasetEnv):
        def next_message(self, conversation: Conversation) -> str | None:
            return "Next?" if conversation.turns < 2 else None

        def gold_reply(self, task: Any) -> list[str]:
            return ["Sesame", task["answer"]]

    rows = write_rows(tmp_path, [{"prompt": "Passwords?", "answer": "42"}])
    env = Passwords(DatasetSettings(path=str(rows), reward=["exact"], held_out=0.0), max_steps=2)
    proof = prove(env)
    assert (proof.holds, proof.replies) == (True, 3)
    assert [case.gold for case in cases_of(env, 1)] == ["42"]
    said = [message["content"] for message in env.answered(env.rows[0])]
    assert said == ["Passwords?", "Sesame", "Next?", "42"]


def test_a_proof_needs_answers(tmp_path: Path) -> None:
    env = env_of(tmp_path, [{"prompt": "a"}], reward=reward_file(tmp_path, "[1.0]"))
    with pytest.raises(DataError, match=r"rows\.jsonl, row 1 .*env\.answer_column"):
        prove(env)


def test_a_limit_holds_for_held_out_rows_too() -> None:
    assert DatasetSettings(path="a", reward=[], limit=5, eval_limit=7).held_out_for(None).limit == 7
    assert DatasetSettings(path="a", reward=[], limit=5, eval_limit=7).held_out_for(3).limit == 5
    assert DatasetSettings(path="a", reward=[], eval_limit=7).held_out_for(3).limit is None


def test_another_template_leaves_the_same_rows_held_out(tmp_path: Path) -> None:
    """The rows have no column of prompts: the template alone writes them."""
    rows = [{"a": n, "b": n * n, "answer": str(n)} for n in range(60)]

    def held_out(template: str) -> list[int]:
        env = env_of(tmp_path, rows, prompt_template=template, split="test", held_out=0.3)
        return [task["a"] for task in env.rows]

    assert 0 < len(held_out("{a}?")) < 60
    assert held_out("{a}?") == held_out("Add {a} to {b}!")
