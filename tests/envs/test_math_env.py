from collections.abc import Iterator

import pytest

from rlpost.data.conversation import Conversation
from rlpost.envs.math_problems import MathEnv
from rlpost.envs.proof import prove
from rlpost.errors import DataError
from tests.envs.own_rows import answered
from tests.says import Says

pytest.importorskip("math_verify")

ROWS = [
    {"problem": "1 / 2?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "level": "Level 1"},
    {"problem": "3 + 4?", "solution": "They are seven.", "answer": "7"},
    {"problem": "The pair?", "solution": r"$\boxed{\left( 3, \frac{\pi}{2} \right)}$", "answer": r"(3,\frac{\pi}{2})"},
    {"question": "Natalia?", "answer": "48/2 = <<48/2=24>>24\n#### 1,024"},
    {"question": "Its roots?", "answer": r"They are \boxed{\{1,2\}}."},
]


@pytest.fixture(scope="module")
def env() -> Iterator[MathEnv]:
    env = MathEnv(ROWS, shuffle=False, num_envs=5)
    yield env
    env.close()


def replied(env: MathEnv, *replies: str) -> list[Conversation]:
    env.reset_dataloader()
    return answered(env, *replies)


def test_the_right_answer_is_found_wherever_rows_have_it(env: MathEnv) -> None:
    conversations = env.draw(5)
    tasks = [conversation.task for conversation in conversations]
    assert [task["answer"] for task in tasks] == [r"\frac{1}{2}", "7", r"(3,\frac{\pi}{2})", "1,024", r"\{1,2\}"]
    assert [task["question"] for task in tasks] == ["1 / 2?", "3 + 4?", "The pair?", "Natalia?", "Its roots?"]
    assert tasks[0]["level"] == "Level 1"
    system, user = conversations[0].messages  # the prompt asks for a box and does not hold the answer
    assert r"\boxed{}" in system["content"]
    assert user == {"role": "user", "content": "1 / 2?"}


def test_replies_are_scored_together_by_their_own_words_alone(env: MathEnv) -> None:
    replies = (r"\boxed{0.5}", r"\boxed{8}", r"it is $(3, \pi/2)$", r"\boxed{1024}", "")
    scored = replied(env, *replies)
    assert [c.reward for c in scored] == [1.0, 0.1, 0.0, 1.0, 0.0]
    assert [c.accuracy_strict for c in scored] == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert [c.accuracy_lenient for c in scored] == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert [c.reward_parts["unverified"] for c in scored] == [0.0] * 5


def test_gold_answers_score_full_marks_and_corrupted_ones_do_not(env: MathEnv) -> None:
    proof = prove(env)
    assert proof.holds, proof.lines()
    assert proof.replies == 8 * len(ROWS)


def test_an_answer_nothing_compares_with_makes_the_sample_invalid() -> None:
    env = MathEnv([{"problem": "?", "answer": "$"}])
    [conversation] = replied(env, r"\boxed{3}")
    env.close()
    assert (conversation.valid, conversation.reward) == (False, None)
    assert "'$'" in (conversation.error or "")


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"problem": "And?", "solution": "none"}, "solution"),
        ({"problem": "And?", "answer": "  "}, "answer"),
        ({"problem": "And?"}, "solution"),
        ({"problme": "And?", "answer": "3"}, "problem"),
        ({"problem": " ", "answer": "3"}, "problem"),
        ({"problem": "And?", "answer": "3" * 501}, "answer"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(row: dict[str, str], field: str, says: Says) -> None:
    with says.refused("env", DataError, f", row 2, field '{field}': "):
        MathEnv([ROWS[0], row]).start()
