"""Problems of reasoning-core, played with a stand-in for the package: its seeds do not hold either."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.data.conversation import Completion, Conversation
from rlpost.envs.build import build_env
from rlpost.envs.proof import prove
from rlpost.envs.reasoning import ReasoningCoreEnv
from rlpost.errors import ConfigError, DataError, MissingExtraError
from tests.trainings import train_in, untimed

PACKAGE = """
import dataclasses, os, random, time

@dataclasses.dataclass
class Config:
    level: int = 0
    seed: int = None
    largest: int = 1000

class Entry:
    def __init__(self, config):
        a, b = random.SystemRandom().randrange(config.largest), 10 ** config.level
        self.prompt, self.answer = f"{a} + {b} = ?", str(a + b)
        self.metadata = {"sum": a + b, "_task": "sums"}

class Sums:
    def __init__(self, **config):
        self.config = Config(**config)
        self.fails = False

    def generate_example(self, level):
        self.config.level = level
        self.fails = not self.fails
        if self.fails:
            raise RuntimeError("no assignment found")
        return Entry(self.config)

class Broken(Sums):
    def generate_example(self, level):
        raise ModuleNotFoundError("No module named 'pyggp'")

class Slow(Sums):
    def generate_example(self, level):
        time.sleep(600)

class Uneven(Sums):  # each second problem is late
    def generate_example(self, level):
        flag = "uneven.flag"
        if os.path.exists(flag):
            os.remove(flag)
            time.sleep(600)
        open(flag, "w").close()
        return Entry(self.config)

class Unscored(Sums):
    pass

class Misscored(Sums):
    pass

TASKS = {"sums": Sums, "broken": Broken, "slow": Slow, "uneven": Uneven, "unscored": Unscored, "misscored": Misscored}

def list_tasks():
    return list(TASKS)

def get_task(name, **config):
    return TASKS[name](**config)

def score_answer(answer, entry):
    import json
    if entry["task"] == "unscored":
        raise ModuleNotFoundError("No module named 'pyggp'")
    if entry["task"] == "misscored":
        return 0.5
    right = json.loads(entry["metadata"])["sum"]
    if answer == "hang":
        time.sleep(600)
    if answer == "die":
        os._exit(3)
    return 1 if int(answer) == right else 0.25 if int(answer) % 10 == right % 10 else 0.0
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in for the package, and an empty cache, below the current folder."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "reasoning_core.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def env() -> Iterator[ReasoningCoreEnv]:
    with closing(ReasoningCoreEnv("sums", num_problems=20, problems="sums.jsonl", score_seconds=1.0)) as env:
        yield env


def replied(env: ReasoningCoreEnv, *replies: str) -> list[Conversation]:
    """Replies to the first problem; {gold} in one is its right answer."""
    [first] = env.draw(1)
    conversations = [Conversation(first.task, []) for _ in replies]
    for conversation, reply in zip(conversations, replies, strict=True):
        text = reply.replace("{gold}", first.task["answer"])
        conversation.add_completion(Completion([], [], text, "stop", 0))
    env.advance(conversations)
    return conversations


def test_problems_are_drawn_once_and_every_run_reads_the_same(env: ReasoningCoreEnv) -> None:
    env.start()
    rows = [dict(row) for row in env.rows]
    kept = Path("sums.jsonl").read_text()
    assert len({json.loads(line)["question"] for line in kept.splitlines()}) == 20
    with closing(ReasoningCoreEnv("sums", num_problems=20, problems="sums.jsonl")) as again:
        again.start()
        assert [dict(row) for row in again.rows] == rows
    with closing(ReasoningCoreEnv("sums", num_problems=20, problems="sums.jsonl", split="test")) as test:
        test.start()
        held_out = {row["question"] for row in test.rows}
    assert held_out
    assert held_out.isdisjoint(row["question"] for row in rows)
    assert len(held_out) + len(rows) == 20
    assert Path("sums.jsonl").read_text() == kept


def test_without_a_file_they_are_kept_in_the_cache_by_all_that_decides_them() -> None:
    names: list[Path] = []
    for settings in ({}, {"num_problems": 3}, {"num_problems": 4}, {"level": 1}, {"task_config": {"largest": 50}}):
        given: dict[str, Any] = {"num_problems": 2, **settings}
        with closing(ReasoningCoreEnv("sums", **given)) as env:
            env.start()
            names.append(env.file)
            assert len(env.file.read_text().splitlines()) == given["num_problems"]
    assert len(set(names)) == 5
    assert all(name.is_relative_to(Path("cache").resolve()) for name in names)


def test_scores_are_the_packages_and_say_what_could_not_be_scored(env: ReasoningCoreEnv) -> None:
    partly = "<answer>1{gold}</answer>"
    replies = ["<answer>{gold}</answer>", partly, "{gold}", "", "<answer>no number</answer>", "<answer>hang</answer>"]
    scored = replied(env, *replies, "<answer>die</answer>", "<answer>" + "1" * 30_000 + "</answer>", replies[0])
    assert [c.reward for c in scored] == [1.0, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert [c.reward_parts["unverified"] for c in scored] == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    assert [c.accuracy_lenient for c in scored[:3]] == [1.0, 0.0, 1.0]
    assert all(c.valid for c in scored)


def test_gold_answers_score_full_marks_and_corrupted_ones_do_not() -> None:
    words = ["env=reasoning_core", "env.task=sums", "env.num_problems=10", "env.problems=ten.jsonl", "env.level=2"]
    with closing(build_env(compose(TRAIN_GRPO, words).settings.env)) as env:
        proof = prove(env)
    assert proof.holds
    assert proof.checked > 5


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"task": "sum"}, ConfigError, r"env.task=sum is not a task that reasoning-core lists; did you mean sums"),
        (
            {"task": "sums", "task_config": {"larges": 3}},
            ConfigError,
            r"env.task=sums does not have; did you mean larg",
        ),
        ({"task": "sums", "task_config": {"level": 3}}, ConfigError, r"env.task_config sets level"),
        ({"task": "broken"}, DataError, r"env.task=broken made no problem 20 times in a row: ModuleNotFound.*pyggp"),
        (
            {"task": "slow", "draw_seconds": 0.2},
            DataError,
            r"env.task=slow made no problem 3 times in a row: did not return within 0.2",
        ),
        (
            {"task": "sums", "task_config": {"largest": 3}},
            DataError,
            r"made 3 different problems in .* draws: give env.num_problems=3 or less",
        ),
        ({"task": "sums", "problems": "/proc/none/a.jsonl"}, DataError, r"cannot write the problems to /proc/none"),
    ],
)
def test_what_cannot_be_drawn_is_an_error_by_name(settings: dict[str, Any], error: type[Exception], said: str) -> None:
    with (
        closing(ReasoningCoreEnv(**{"num_problems": 5, "problems": "new.jsonl", **settings})) as env,
        pytest.raises(error, match=said),
    ):
        env.start()
    assert not Path("new.jsonl").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"level": 1}, r"sums.jsonl holds problems of env.task=sums env.level=0 .*, not of .*env.level=1"),
        ({"task_config": {"largest": 5}}, r"task_config=\[\] .*, not of .*env.task_config=\[largest:5\]"),
        ({"num_problems": 21}, r"env.num_problems=20, not of .*env.num_problems=21: give another env.problems"),
    ],
)
def test_a_file_of_other_problems_is_refused(settings: dict[str, Any], said: str, env: ReasoningCoreEnv) -> None:
    env.start()
    with (
        closing(ReasoningCoreEnv("sums", **{"num_problems": 20, "problems": "sums.jsonl", **settings})) as other,
        pytest.raises(DataError, match=said),
    ):
        other.start()


def test_a_file_with_a_config_is_read_again() -> None:
    for _ in range(2):
        with closing(ReasoningCoreEnv("sums", num_problems=5, task_config={"largest": 50})) as env:
            env.start()
            assert env.rows[0]["task_config"] == {"largest": 50}


def test_a_late_draw_loses_no_other_problem() -> None:
    with closing(ReasoningCoreEnv("uneven", num_problems=3, draw_seconds=0.3)) as env:
        env.start()
        assert len(env.file.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("task", "said"), [("unscored", "ModuleNotFoundError: No module named 'pyggp'"), ("misscored", "the score 0.5")]
)
def test_a_task_that_does_not_score_its_own_answer_is_refused(task: str, said: str) -> None:
    with (
        closing(ReasoningCoreEnv(task, num_problems=5)) as env,
        pytest.raises(DataError, match=rf"env.task={task} does not score its own answer '\d+': .*{said}"),
    ):
        env.start()


def test_a_prompt_from_outside_is_refused(env: ReasoningCoreEnv) -> None:
    [conversation] = env.begin([{"query": "1 + 1 = ?"}])
    conversation.add_completion(Completion([], [], "<answer>2</answer>", "stop", 0))
    with pytest.raises(DataError, match=r"scores replies to its own problems alone"):
        env.advance([conversation])


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, env: ReasoningCoreEnv) -> None:
    monkeypatch.setattr("rlpost.imports.is_installed", lambda package: False)
    with pytest.raises(MissingExtraError, match=r"needs reasoning_core.*rlpost\[reasoning-core\]"):
        env.start()


def test_it_is_trained_and_a_resumed_run_is_the_same() -> None:
    words = [
        *("model=tiny", "env=reasoning_core", "env.task=sums", "env.num_problems=12", "env.max_completion_tokens=32"),
        *("policy=scripted", 'policy.replies=["<answer>1</answer>","2"]', "prompts_per_step=4", "group_size=2"),
        *("eval.enabled=false", "checkpoint.every=2", "steps=3", "optim.schedule=constant"),
    ]
    assert train_in(TRAIN_GRPO, Path("whole"), words) == 0
    assert train_in(TRAIN_GRPO, Path("parts"), [*words, "steps=2"]) == 0
    assert train_in(TRAIN_GRPO, Path("parts"), words, resume="latest") == 0
    assert untimed(Path("parts")) == untimed(Path("whole"))
