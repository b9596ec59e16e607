"""Problems of reasoning-core, played with a stand-in for the package: its seeds do not hold either."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.envs.build import build_env
from rlpost.envs.proof import prove
from rlpost.envs.reasoning import ReasoningCoreEnv
from rlpost.errors import ConfigError, DataError
from tests.envs.episodes import answered, say
from tests.says import Says
from tests.trainings import ends_alike, train_in_parts

PACKAGE = (Path(__file__).parent / "stubs" / "reasoning_core.py").read_text()


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for the package, and an empty cache, below the current folder."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "reasoning_core.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def sums(**settings: Any) -> ReasoningCoreEnv:
    """The environment of 20 problems, if `settings` do not say otherwise."""
    given = {"task": "sums", "num_problems": 20, "problems": "sums.jsonl", "score_seconds": 1.0}
    return ReasoningCoreEnv(**given | settings)


@pytest.fixture
def env() -> Iterator[ReasoningCoreEnv]:
    with closing(sums()) as env:
        yield env


def test_problems_are_drawn_once_and_every_run_reads_the_same(env: ReasoningCoreEnv) -> None:
    env.start()
    rows = [dict(row) for row in env.rows]
    kept = Path("sums.jsonl").read_text()
    assert len({json.loads(line)["question"] for line in kept.splitlines()}) == 20
    with closing(sums()) as again, closing(sums(split="test")) as test:
        again.start()
        assert [dict(row) for row in again.rows] == rows
        test.start()
        held_out = {row["question"] for row in test.rows}
    assert held_out
    assert held_out.isdisjoint(row["question"] for row in rows)
    assert len(held_out) + len(rows) == 20
    assert Path("sums.jsonl").read_text() == kept


def test_the_cache_keeps_them_by_all_that_decides_them() -> None:
    names: list[Path] = []
    for settings in ({}, {"num_problems": 3}, {"num_problems": 4}, {"level": 1}, {"task_config": {"largest": 50}}):
        given: dict[str, Any] = {"num_problems": 2, "problems": None, **settings}
        with closing(sums(**given)) as env:
            env.start()
            names.append(env.file)
            assert len(env.file.read_text().splitlines()) == given["num_problems"]
    assert len(set(names)) == 5
    assert all(name.is_relative_to(Path("cache").resolve()) for name in names)


def test_scores_are_the_packages_and_the_unscored_are_counted(env: ReasoningCoreEnv) -> None:
    partly = "<answer>1{gold}</answer>"
    replies = ["<answer>{gold}</answer>", partly, "{gold}", "", "<answer>no number</answer>", "<answer>hang</answer>"]
    scored = answered(
        env, env.draw(1)[0].task, *replies, "<answer>die</answer>", "<answer>" + "1" * 30_000 + "</answer>", replies[0]
    )
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
    ("settings", "error", "part"),
    [
        ({"task": "sum"}, ConfigError, "did you mean sums"),
        ({"task_config": {"larges": 3}}, ConfigError, "did you mean larg"),
        ({"task_config": {"level": 3}}, ConfigError, "env.task_config sets level"),
        ({"task": "broken"}, DataError, "20 times in a row: ModuleNotFoundError"),
        ({"task": "slow", "draw_seconds": 0.2}, DataError, "3 times in a row: did not return within 0.2"),
        ({"task_config": {"largest": 3}}, DataError, "env.num_problems=3"),
        ({"problems": "/proc/none/a.jsonl"}, DataError, "/proc/none"),
    ],
)
def test_what_cannot_be_drawn_is_an_error_by_name(settings: dict[str, Any], error: type[Exception], part: str) -> None:
    with closing(sums(**{"num_problems": 5, **settings})) as env, pytest.raises(error, match=re.escape(part)):
        env.start()
    assert not Path("sums.jsonl").exists()


@pytest.mark.parametrize(
    "settings", [{"level": 1}, {"task_config": {"largest": 5}}, {"num_problems": 21}], ids=["level", "config", "number"]
)
def test_a_file_of_other_problems_is_refused(settings: dict[str, Any], env: ReasoningCoreEnv, says: Says) -> None:
    env.start()
    with closing(sums(**settings)) as other, says.refused("env", DataError, "sums.jsonl"):
        other.start()


def test_a_file_with_a_config_is_read_again() -> None:
    for _ in range(2):
        with closing(sums(num_problems=5, task_config={"largest": 50})) as env:
            env.start()
            assert env.rows[0]["task_config"] == {"largest": 50}


def test_a_late_draw_loses_no_other_problem() -> None:
    with closing(ReasoningCoreEnv("uneven", num_problems=3, draw_seconds=0.3)) as env:
        env.start()
        assert len(env.file.read_text().splitlines()) == 3


@pytest.mark.parametrize(("task", "part"), [("unscored", "ModuleNotFoundError"), ("misscored", "0.5")])
def test_a_task_that_does_not_score_its_own_answer_is_refused(task: str, part: str) -> None:
    with (
        closing(sums(task=task, num_problems=5)) as env,
        pytest.raises(DataError, match=rf"env.task={task} .*'\d+': .*{part}"),
    ):
        env.start()


def test_a_prompt_from_outside_is_refused(env: ReasoningCoreEnv) -> None:
    with pytest.raises(DataError, match="env=reasoning_core"):
        say(env, env.begin([{"query": "1 + 1 = ?"}]), "<answer>2</answer>")


def test_it_is_trained_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    words = [
        *("model=tiny", "env=reasoning_core", "env.task=sums", "env.num_problems=12", "env.max_completion_tokens=32"),
        *("policy=scripted", 'policy.replies=["<answer>1</answer>","2"]', "prompts_per_step=4", "group_size=2"),
        *("eval.enabled=false", "optim.schedule=constant"),
    ]
    assert ends_alike(*train_in_parts(TRAIN_GRPO, tmp_path, words))
