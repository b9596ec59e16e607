from collections.abc import Iterator
from contextlib import closing
from itertools import islice

import pytest

from rlpost.data.conversation import Completion, Conversation
from rlpost.envs.build import build_env
from rlpost.envs.proof import prove
from rlpost.envs.reasoning import ReasoningGymEnv
from rlpost.errors import ConfigError, DataError, MissingExtraError
from rlpost.rewards.reasoning_tasks import Generator
from rlpost.settings import AnswerPlace, ReasoningGymSettings

pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def env() -> Iterator[ReasoningGymEnv]:
    env = ReasoningGymEnv("countdown", task_config={"min_numbers": 2, "max_numbers": 3}, limit=20, score_seconds=5.0)
    env.start()
    yield env
    env.close()


def replied(env: ReasoningGymEnv, *replies: str) -> list[Conversation]:
    """Answers to the first problem; {gold} in a reply is its right answer."""
    env.reset_dataloader()
    conversations = env.draw(1) + [Conversation(env.draw(1)[0].task, []) for _ in replies[1:]]
    for conversation, reply in zip(conversations, replies, strict=True):
        conversation.task = conversations[0].task
        text = reply.replace("{gold}", conversations[0].task["answer"])
        conversation.add_completion(Completion([], [], text, "stop", 0))
    env.advance(conversations)
    return conversations


def test_scores_are_the_generators_partial_credit_included(env: ReasoningGymEnv) -> None:
    replies = [
        "<answer>{gold}</answer>",
        "<answer>1</answer><answer> {gold} </answer>",
        "<answer>1 + 1</answer>",
        "{gold}",
    ]
    scored = replied(env, *replies, "Well.\n{gold}", "")
    assert [c.reward for c in scored] == [1.0, 1.0, 0.05, 0.0, 0.0, 0.0]  # 0.05: an expression of other numbers
    assert [c.accuracy_strict for c in scored] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert [c.accuracy_lenient for c in scored] == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    assert scored[0].reward_parts == {"score": 1.0, "unverified": 0.0}


def test_a_hostile_answer_earns_nothing_is_counted_and_leaves_the_others_alone(env: ReasoningGymEnv) -> None:
    hostile = ["<answer>9**9**9**9</answer>", "<answer>__import__('os').kill(1, 9)</answer>"]
    scored = replied(env, *hostile, "<answer>{gold}</answer>")
    assert [c.reward for c in scored] == [0.0, 0.0, 1.0]
    assert [c.reward_parts["unverified"] for c in scored] == [1.0, 1.0, 0.0]
    assert all(c.valid for c in scored)


def test_gold_answers_score_full_marks_and_corrupted_ones_do_not(env: ReasoningGymEnv) -> None:
    proof = prove(env)
    assert proof.holds, proof.lines()
    assert (proof.checked, proof.replies) == (20, 20 * 6)


def test_the_whole_reply_is_the_answer_where_that_is_asked_for() -> None:
    env = ReasoningGymEnv("leg_counting", answer_in_tags=False, limit=3)
    try:
        proof = prove(env)
        assert proof.holds, proof.lines()
        replied_all = replied(env, "{gold}", "It has {gold}", "Let me see.\n{gold}", "<answer>{gold}</answer>")
    finally:
        env.close()
    assert [c.accuracy_strict for c in replied_all] == [1.0, 0.0, 0.0, 0.0]
    assert [c.accuracy_lenient for c in replied_all] == [1.0, 0.0, 1.0, 1.0]
    assert replied_all[0].messages[0]["content"].startswith("Answer the question with the final answer alone")


def test_a_run_resumes_at_the_same_problem(env: ReasoningGymEnv) -> None:
    env.draw(3)
    state = env.state_dict()
    drawn = [conversation.task for conversation in env.draw(5)]
    env.load_state_dict(state)
    assert [conversation.task for conversation in env.draw(5)] == drawn
    config = '{"max_numbers": 3, "min_numbers": 2}'
    assert state["rows"].endswith(f"{config}, 0.2 held out, limit 20")
    assert state["rows"].startswith("train problems: countdown of reasoning-gym 0.")


def test_train_and_test_share_no_question_whatever_the_seed() -> None:
    config = {"min_animals": 1, "max_animals": 1, "max_instances": 2}
    sides = []
    for split, seed in (("train", 1), ("test", 2)):
        env = ReasoningGymEnv("leg_counting", task_config=config, split=split, seed=seed, held_out=0.4)
        with closing(env):
            env.start()
            sides.append({task["question"] for task in islice(env.order.iter_from(0), 300)})
    train, test = sides
    assert min(len(train), len(test)) > 10
    assert not train & test


def test_problems_do_not_depend_on_the_order_of_sets_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        generator = Generator("ransom_note", {})  # one of six whose questions do, in reasoning-gym itself
        told.append([generator.problem(1, number).question for number in range(5)])
        generator.close()
    assert told[0] == told[1]


def test_a_question_that_is_made_otherwise_by_now_is_not_scored_against_the_new_one(env: ReasoningGymEnv) -> None:
    env.reset_dataloader()
    conversation = env.draw(1)[0]
    conversation.task = {**conversation.task, "question": "What was it?"}
    conversation.add_completion(Completion([], [], "<answer>1</answer>", "stop", 0))
    with pytest.raises(DataError, match="asks another question under number"):
        env.advance([conversation])


def test_a_generator_that_names_no_answer_has_nothing_to_test_with(
    env: ReasoningGymEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    env.start()
    monkeypatch.setattr(env.order, "at", lambda position: {"question": "Colour it.", "answer": None})
    with pytest.raises(DataError, match=r"env.task=countdown names no right answer"):
        prove(env)


def test_what_the_process_refuses_is_an_error_here() -> None:
    with pytest.raises(ConfigError, match=r"env.task=leg_countin is none of .* did you mean leg_counting\?"):
        ReasoningGymEnv("leg_countin").start()


def test_without_reasoning_gym_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpost.imports.is_installed", lambda package: False)
    with pytest.raises(MissingExtraError, match=r"pip install 'rlpost\[reasoning-gym\]'"):
        ReasoningGymEnv("leg_counting").start()


def test_settings_reach_the_environment() -> None:
    settings = ReasoningGymSettings(
        task="countdown",
        task_config=["min_numbers:2", 'operators=["+","-"]', "name: some text"],
        answer_in=AnswerPlace.reply,
        score_seconds=1.5,
        held_out=0.5,
    )
    env = build_env(settings, num_prompts=1, group_size=1, seed=0)
    assert isinstance(env, ReasoningGymEnv)
    assert env.task_config == {"min_numbers": 2, "operators": ["+", "-"], "name": "some text"}
    assert (env.task, env.answer_in_tags, env.workers.seconds, env.held_out) == ("countdown", False, 1.5, 0.5)
    with pytest.raises(ConfigError, match=r"env.task_config='min_numbers' names no setting: write 'env.task_config=\["):
        ReasoningGymSettings(task="countdown", task_config=["min_numbers"])
