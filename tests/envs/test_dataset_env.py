"""Rows and rewards of one's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpost.data.conversation import Completion, Conversation
from rlpost.envs.build import build_env
from rlpost.envs.dataset import DatasetEnv
from rlpost.envs.proof import cases_of, prove
from rlpost.envs.row_checks import as_answer
from rlpost.errors import ConfigError, DataError, RewardError
from rlpost.settings import DatasetSettings

ROWS = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1), "level": n % 3} for n in range(40)]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi. What do you want?"},
    {"role": "user", "content": "1 + 1"},
]


def env_of(folder: Path, rows: Sequence[Any], *, size: int = 1, **settings: Any) -> Any:
    """The environment of `rows`, all of them for training."""
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    made = DatasetSettings(**{"path": str(file), "reward": ["exact"], "held_out": 0.0, "shuffle": False, **settings})
    return build_env(made, num_prompts=size, group_size=1, seed=0)


def reward_file(folder: Path, body: str) -> list[str]:
    (folder / "r.py").write_text(f"def score(completions, **columns):\n    {body}\n")
    return [f"{folder}/r.py:score"]


def answer(env: Any, conversations: Sequence[Conversation], *replies: str) -> None:
    for conversation, reply in zip(conversations, replies, strict=True):
        conversation.add_completion(Completion([7], [-0.5], reply, "stop", 0))
    env.advance(conversations)


def contents(env: Any) -> list[str]:
    return [message["content"] for message in env.draw()[0].messages]


@pytest.mark.parametrize("column", ["prompt", "messages", "question"])
def test_the_prompt_is_found(column: str, tmp_path: Path) -> None:
    rows = [{"text": "no", column: "Yes?", "answer": "1"}]
    assert contents(env_of(tmp_path, rows)) == ["Yes?"]


def test_a_template_is_filled_with_any_field(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "a": 1, "b": 2, "answer": "3"}]
    assert contents(env_of(tmp_path, rows, prompt_template="{a} plus {b}")) == ["1 plus 2"]
    without = [{"a": 1, "b": 2, "answer": "3"}]
    assert contents(env_of(tmp_path, without, prompt_template="{a} plus {b}")) == ["1 plus 2"]


def test_a_template_without_a_field_makes_every_prompt_the_same() -> None:
    with pytest.raises(ConfigError, match="has no field such as"):
        DatasetSettings(path="x", reward=["exact"], prompt_template="always")
    with pytest.raises(ConfigError, match="does not fit"):
        DatasetSettings(path="x", reward=["exact"], prompt_template="{open")


def test_drawing_messages_leaves_the_rows_as_they_are(tmp_path: Path) -> None:
    env = env_of(tmp_path, [{"prompt": CHAT, "answer": "2"}])
    env.draw()[0].messages[0]["content"] = "changed"
    assert env.draw()[0].messages == CHAT


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"answer": "1"}, "field 'prompt': missing; the row has answer"),
        ({"promt": "a", "answer": "1"}, "missing; did you mean promt? the row has promt, answer"),
        ({"prompt": " ", "answer": "1"}, "field 'prompt': is empty"),
        ({"prompt": 3, "answer": "1"}, "field 'prompt': must be text, and is int"),
        ({"prompt": "a"}, "field 'answer': missing; the row has prompt; name one of them with env.answer_column"),
        ({"prompt": "a", "answer": None}, "field 'answer': must be text or a finite number, and is null"),
        ({"prompt": "a", "answer": True}, "field 'answer': must be text or a finite number, and is bool"),
        ({"prompt": "a", "answer": float("nan")}, "must be text or a finite number, and is the number nan"),
        ({"prompt": "a", "answer": " "}, "field 'answer': is empty"),
        (["a"], "the row is not an object of named fields but a list"),
        ([ROWS[0]], "named fields but a list; if the file is one list, name it .json"),
    ],
)
def test_a_bad_row_is_named_by_file_row_and_field(row: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        env_of(tmp_path, [*ROWS, row]).start()
    assert str(caught.value).startswith(f"{tmp_path}/rows.jsonl, row 41, ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "has no messages"),
        ([{"role": "assistant", "content": "a"}], "has to end with a user's message"),
        ([*CHAT, {"role": "system", "content": "a"}], "has to end with a user's message"),
        (["a"], "message 1 is not an object with role and content but text"),
        ([{"role": "usr", "content": "a"}], "message 1 has the role 'usr': it must be one of system, developer, user"),
        ([*CHAT, {"role": "user"}], "message 5 has no content"),
        ([{"role": "user", "content": ["a"]}], "message 1 has content of type text: rlpost trains on text only"),
        ([{"role": "user", "content": "a", "tool_calls": [1]}], "message 1 has malformed tool_calls"),
        ([{"role": "user", "content": "a", "images": ["a.png"]}], "message 1 has images: rlpost trains on text only"),
    ],
)
def test_bad_messages_are_named_by_row_and_field(messages: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        env_of(tmp_path, [{"prompt": CHAT, "answer": "2"}, {"prompt": messages, "answer": "2"}]).start()
    assert "rows.jsonl, row 2, field 'prompt': " in str(caught.value)
    assert said in str(caught.value)


def test_a_wrong_column_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 1, field 'promt': missing; did you mean prompt\?"):
        env_of(tmp_path, ROWS, prompt_column="promt").start()
    with pytest.raises(DataError, match=r"row 1, field 'anwser': missing; did you mean answer\?"):
        env_of(tmp_path, ROWS, answer_column="anwser").start()
    with pytest.raises(DataError, match=r"row 1, field 'levle': missing; did you mean level\?"):
        env_of(tmp_path, ROWS, prompt_template="{levle}").start()


def test_a_template_does_not_go_with_messages(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env.prompt_template is for prompts of text"):
        env_of(tmp_path, [{"prompt": CHAT, "answer": "2"}], prompt_template="{prompt}").start()


def test_an_answer_is_needed_by_built_in_rewards_alone(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}]
    env_of(tmp_path, rows, reward=reward_file(tmp_path, "return [1.0]")).start()
    with pytest.raises(DataError, match="field 'answer': missing"):
        env_of(tmp_path, rows, reward=[*reward_file(tmp_path, "return [1.0]"), "exact"]).start()
    with pytest.raises(DataError, match="field 'answer': has no number, which the reward number looks for"):
        env_of(tmp_path, [{"prompt": "a", "answer": "none"}], reward=["number"]).start()


def test_what_ends_together_is_scored_together(tmp_path: Path) -> None:
    reward = reward_file(tmp_path, "return [len(completions) + level for level in columns['level']]")
    env = env_of(tmp_path, ROWS, size=4, reward=reward)
    drawn = env.draw()
    answer(env, drawn, "a", "b", "c", "d")
    assert [c.reward for c in drawn] == [4.0, 5.0, 6.0, 4.0]
    assert all(c.terminated and c.accuracy_strict is None for c in drawn)


def test_a_reward_sees_what_was_asked(tmp_path: Path) -> None:
    same = "return [float(p == '{0}') for p in columns['prompts']]"
    rows = [{"prompt": "x", "answer": "1"}]
    env = env_of(
        tmp_path,
        rows,
        reward=reward_file(tmp_path, same.format("Say: x")),
        prompt_template="Say: {prompt}",
        system_prompt="S",
    )
    drawn = env.draw()
    answer(env, drawn, "1")
    assert drawn[0].reward == 1.0


def test_a_failed_row_is_invalid_and_the_others_are_not(tmp_path: Path) -> None:
    env = env_of(tmp_path, ROWS, size=2, reward=reward_file(tmp_path, "return [1 / len(c) for c in completions]"))
    drawn = env.draw()
    answer(env, drawn, "ab", "")
    assert [(c.valid, c.reward) for c in drawn] == [(True, 0.5), (False, None)]
    assert "line 2: ZeroDivisionError" in (drawn[1].error or "")
    with pytest.raises(RewardError, match="no reward for any of 2 completions"):
        answer(env, env.draw(), "", "")


def test_a_reward_that_wants_a_missing_column_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text("def score(completions, levle): ...\n")
    with pytest.raises(DataError, match=r"takes levle, which is not a column of .*rows.jsonl; did you mean level\?"):
        env_of(tmp_path, ROWS, reward=[f"{tmp_path}/w.py:score"]).start()


def test_train_and_test_share_no_prompt_of_messages(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{n}"}], "answer": "1"} for n in range(30)] * 2
    sides = []
    for split in ("train", "test"):
        env = env_of(tmp_path, rows, held_out=0.3, split=split)
        env.start()
        sides.append({task["prompt"][0]["content"] for task in env.rows})
    assert sides[0] & sides[1] == set()
    assert len(sides[0] | sides[1]) == 30


def test_numbers_are_answers_in_full() -> None:
    values = ["a", 7, 7.5, 1e20, 1e-7, True, None, [1], float("nan")]
    assert list(map(as_answer, values)) == ["a", "7", "7.5", "1" + "0" * 20, "0.0000001", None, None, None, None]


@pytest.mark.parametrize("gold", ["Paris", "new york", "aa", "Yes."])
def test_answers_that_are_words_prove_them_too(gold: str, tmp_path: Path) -> None:
    for reward in ("exact", "contains"):
        assert prove(env_of(tmp_path, [{"prompt": "a", "answer": gold}], reward=[reward])).failures == []


def test_worked_answers_prove_the_reward_number(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "2 + 2 = 4\n#### 4"}]
    assert prove(env_of(tmp_path, rows, reward=["number"])).holds


def test_ones_own_rewards_are_tried_on_every_answer(tmp_path: Path) -> None:
    tried = reward_file(tmp_path, "return [float(c == a) for c, a in zip(completions, columns['answer'])]")
    proof = prove(env_of(tmp_path, ROWS[:3], reward=tried))
    assert (proof.failures, proof.gold, proof.corrupted) == ([], [1.0] * 3, [0.0] * 6)
    assert proof.lines() == [
        "3 gold answers and 6 corrupted ones: no corrupted one earns more than its gold answer",
        "  on average the gold answers earn 1, the others 0",
    ]
    (tmp_path / "other").mkdir()
    backwards = reward_file(tmp_path / "other", "return [float(c == '') for c in completions]")
    failures = prove(env_of(tmp_path, ROWS[:1], reward=backwards)).failures
    assert failures == [
        f"{tmp_path}/rows.jsonl, row 1: the corrupted reply '' got reward 1.0, strict accuracy None, lenient accuracy "
        "None"
    ]


def test_a_reward_that_gives_everything_the_same_proves_nothing(tmp_path: Path) -> None:
    proof = prove(env_of(tmp_path, ROWS[:3], reward=reward_file(tmp_path, "return [0.5 for _ in completions]")))
    assert not proof.holds
    assert proof.lines()[0] == "3 gold answers and 6 corrupted ones: the reward does not tell them apart"


def test_answers_that_are_objects_are_gold_replies(tmp_path: Path) -> None:
    rows = [{"prompt": f"Row {n}", "answer": {"name": "Ann", "ages": [n]}} for n in (1, 2)]
    tried = reward_file(
        tmp_path, "return [float(c == __import__('json').dumps(a)) for c, a in zip(completions, columns['answer'])]"
    )
    env = env_of(tmp_path, rows, reward=tried)
    assert [case.gold for case in cases_of(env, 2)] == ['{"name": "Ann", "ages": [1]}', '{"name": "Ann", "ages": [2]}']
    assert prove(env).lines()[1] == "  on average the gold answers earn 1, the others 0"
    said = env_of(tmp_path, [{"prompt": "Hi", "answer": [{"role": "assistant", "content": "Ho"}]}], reward=tried)
    assert [case.gold for case in cases_of(said, 1)] == ["Ho"]


def test_a_gold_reply_may_have_several_turns(tmp_path: Path) -> None:
    class Passwords(DatasetEnv):
        def next_message(self, conversation: Conversation) -> str | None:
            return "And the other?" if conversation.turns < 2 else None

        def gold_reply(self, task: Any) -> list[str]:
            return ["Sesame", task["answer"]]

    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Passwords?", "answer": "42"}\n')
    env = Passwords(DatasetSettings(path=str(rows), reward=["exact"], held_out=0.0), max_steps=2)
    assert prove(env).lines() == ["1 gold answers and 2 corrupted ones: all scored rightly"]
    assert [case.gold for case in cases_of(env, 1)] == ["42"]
    assert [message["content"] for message in env.answered(env.rows[0])] == [
        "Passwords?",
        "Sesame",
        "And the other?",
        "42",
    ]


def test_failures_of_one_cause_are_one_line_of_a_proof(tmp_path: Path) -> None:
    tried = reward_file(tmp_path, "return [float(c == '') for c in completions]")
    lines = prove(env_of(tmp_path, ROWS[:3], reward=tried)).lines()
    assert lines[1].strip() == (
        "3 wrong scores: the corrupted reply '' got reward 1.0, strict accuracy None, lenient accuracy None "
        f"({tmp_path}/rows.jsonl, rows 1, 2, 3)"
    )
    assert len(lines) == 3


def test_a_proof_needs_answers(tmp_path: Path) -> None:
    env = env_of(tmp_path, [{"prompt": "a"}], reward=reward_file(tmp_path, "return [1.0]"))
    with pytest.raises(DataError, match=r"rows.jsonl, row 1 has no answer.*env.answer_column"):
        prove(env)


def test_it_resumes_where_it_was(tmp_path: Path) -> None:
    env = env_of(tmp_path, ROWS, shuffle=True)
    env.draw(7)
    resumed = env_of(tmp_path, ROWS, shuffle=True)
    resumed.load_state_dict(json.loads(json.dumps(env.state_dict())))
    assert [c.query for c in resumed.draw(9)] == [c.query for c in env.draw(9)]


def test_a_limit_holds_for_held_out_rows_too() -> None:
    assert DatasetSettings(path="a", reward=[], limit=5, eval_limit=7).held_out_for(None).limit == 7
    assert DatasetSettings(path="a", reward=[], limit=5, eval_limit=7).held_out_for(3).limit == 5
    assert DatasetSettings(path="a", reward=[], eval_limit=7).held_out_for(3).limit is None


def test_another_template_leaves_the_same_rows_held_out(tmp_path: Path) -> None:
    """The rows have no column of prompts: the template alone writes them."""
    rows = [{"a": n, "b": n * n, "answer": str(n)} for n in range(60)]

    def held_out(template: str) -> list[int]:
        env = env_of(tmp_path, rows, prompt_template=template, split="test", held_out=0.3)
        env.start()
        return [task["a"] for task in env.rows]

    assert 0 < len(held_out("{a}?")) < 60
    assert held_out("{a}?") == held_out("Add {a} to {b}!")
