from collections.abc import Iterator
from contextlib import closing
from itertools import islice

import pytest

from rlpost.data.conversation import Conversation
from rlpost.envs.build import build_env
from rlpost.envs.proof import prove
from rlpost.envs.reasoning import ReasoningGymEnv
from rlpost.errors import ConfigError, DataError
from rlpost.rewards.reasoning_tasks import Generator
from rlpost.settings import AnswerPlace, ReasoningGymSettings
from tests.envs.episodes import answered, say
from tests.says import Says

pytestmark = pytest.mark.thorough

pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def env() -> Iterator[ReasoningGymEnv]:
    env = ReasoningGymEnv("countdown", task_config={"min_numbers": 2, "max_numbers": 3}, limit=20, score_seconds=5.0)
    env.start()
    yield env
    env.close()


def replied(env: ReasoningGymEnv, *replies: str) -> list[Conversation]:
    """Scored replies to the first problem."""
    env.reset_dataloader()
    return answered(env, env.draw(1)[0].task, *replies)


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


def test_the_whole_reply_is_the_answer_if_asked_for(says: Says) -> None:
    env = ReasoningGymEnv("leg_counting", answer_in_tags=False, limit=3)
    with closing(env):
        proof = prove(env)
        assert proof.holds, proof.lines()
        scored = replied(env, "{gold}", "It has {gold}", "Let me see.\n{gold}", "<answer>{gold}</answer>")
    assert [c.accuracy_strict for c in scored] == [1.0, 0.0, 0.0, 0.0]
    assert [c.accuracy_lenient for c in scored] == [1.0, 0.0, 1.0, 1.0]
    says("env", scored[0].messages[0]["content"])


def test_a_run_resumes_at_the_same_problem(env: ReasoningGymEnv) -> None:
    env.draw(3)
    state = env.state_dict()
    drawn = [conversation.task for conversation in env.draw(5)]
    env.load_state_dict(state)
    assert [conversation.task for conversation in env.draw(5)] == drawn
    named = ("train", "countdown", "reasoning-gym 0.", '{"max_numbers": 3, "min_numbers": 2}', "0.2", "limit 20")
    assert all(part in state["rows"] for part in named)


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


def test_problems_do_not_depend_on_the_order_of_sets_here(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        generator = Generator("ransom_note", {})  # one of six whose questions do, in reasoning-gym itself
        told.append([generator.problem(1, number).question for number in range(5)])
        generator.close()
    assert told[0] == told[1]


def test_a_question_that_has_changed_is_not_scored(env: ReasoningGymEnv) -> None:
    env.reset_dataloader()
    conversations = env.draw(1)
    conversations[0].task = {**conversations[0].task, "question": "What was it?"}
    with pytest.raises(DataError, match=r"env\.task=countdown"):
        say(env, conversations, "<answer>1</answer>")


def test_a_generator_that_names_no_answer_proves_nothing() -> None:
    with (
        closing(ReasoningGymEnv("graph_color", limit=1)) as env,
        pytest.raises(DataError, match=r"env\.task=graph_color"),
    ):
        prove(env)


def test_what_the_process_refuses_is_an_error_here() -> None:
    with pytest.raises(ConfigError, match=r"env\.task=leg_countin .*leg_counting\?"):
        ReasoningGymEnv("leg_countin").start()


def test_settings_reach_the_environment() -> None:
    settings = ReasoningGymSettings(
        task="countdown",
        task_config=["min_numbers:2", 'operators:["+","-"]', "name: some text"],
        answer_in=AnswerPlace.reply,
        score_seconds=1.5,
        held_out=0.5,
    )
    env = build_env(settings, num_prompts=1, group_size=1, seed=0)
    assert isinstance(env, ReasoningGymEnv)
    assert env.task_config == {"min_numbers": 2, "operators": ["+", "-"], "name": "some text"}
    assert (env.task, env.answer_in_tags, env.workers.seconds, env.held_out) == ("countdown", False, 1.5, 0.5)
    with pytest.raises(ConfigError, match=r"env\.task_config='min_numbers'"):
        ReasoningGymSettings(task="countdown", task_config=["min_numbers"])
