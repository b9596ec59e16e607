"""Which environment a command plays that names a run: `env=RUN`, a teacher, a model."""

import json
import shlex
from typing import Any

import pytest

from rlpost.catalog import EVAL, TRAIN_DISTILL, TRAIN_DPO, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.cli.plan import compose_and_check
from rlpost.errors import ConfigError
from rlpost.runs.kept import environment_of_runs
from tests.model_folders import write_model
from tests.run_folders import make_run

TINY = ["model=tiny", "policy=transformers"]


def a_run(folder, verb, *overrides, model="builtin:tiny"):
    make_run(folder, [{"step": 1}], overrides=overrides)
    (folder / "command.txt").write_text(f"rlpost {verb}\n")
    env = {"path": next((each.partition("=")[2] for each in overrides if each.startswith("env.path=")), None)}
    (folder / "config.yaml").write_text(json.dumps({"env": env, "model": {"path": model}}))
    saved = folder / "checkpoints" / "step-000001"
    write_model(saved / "model")
    (saved / "state").mkdir()
    (saved / "state" / "state.json").write_text("{}")
    (folder / "checkpoints" / "latest").symlink_to("step-000001")


@pytest.fixture(autouse=True)
def rows(tmp_path, here):
    lines = [{"prompt": f"{n} + 1?", "answer": str(n + 1), "completion": str(n + 1)} for n in range(20)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    a_run(
        tmp_path / "runs" / "mine",
        "train grpo",
        "env=dataset",
        "env.path=mine.jsonl",
        "env.reward=exact",
        "env.limit=15",
        'env.system_prompt=" Be brief. "',
        "env.max_completion_tokens=17",
        "optim.lr=0.01",
    )


def env_of(command: Command[Any], *words: str) -> tuple[Any, str]:
    composed = compose_and_check(command, list(words), as_json=False)
    return composed.settings.env, composed.environment_note


@pytest.mark.parametrize("word", ["env=runs/mine", "env=mine", "env=./runs/mine"])
@pytest.mark.parametrize("command", [TRAIN_GRPO, TRAIN_SFT, EVAL])
def test_env_of_a_run_is_its_rows_reward_and_limits(command, word):
    env, told = env_of(command, *TINY, word)

    assert (env.path, env.reward, env.max_completion_tokens, env.system_prompt) == (
        "mine.jsonl",
        ["exact"],
        17,
        " Be brief. ",
    )
    assert env.limit == (None if command is EVAL else 15)  # which chose among the training prompts
    assert "runs/mine" in told


def test_words_beside_env_of_a_run_come_first():
    env, _ = env_of(TRAIN_GRPO, *TINY, "env.max_completion_tokens=9", "env=runs/mine")

    assert (env.path, env.max_completion_tokens) == ("mine.jsonl", 9)


@pytest.mark.parametrize(
    ("command", "words"),
    [(TRAIN_DISTILL, ["model=tiny", "teacher=runs/mine"]), (TRAIN_GRPO, ["model=runs/mine"])],
)
def test_a_teachers_or_models_run_gives_the_environment(command, words):
    taken = environment_of_runs(command, words, [])

    assert taken.words == words
    assert [f"{each.key}={each.text}" for each in taken.kept][:3] == [
        "env=dataset",
        "env.path=mine.jsonl",
        "env.reward=exact",
    ]
    assert "runs/mine" in taken.note
    assert "mine.jsonl" in taken.note


@pytest.mark.parametrize("words", [["env=countdown"], ["env=dataset", "env.path=other.jsonl"]])
def test_another_environment_that_is_named_wins(words):
    taken = environment_of_runs(TRAIN_DISTILL, ["model=tiny", "teacher=runs/mine", *words], [])

    assert taken.kept == []
    assert "mine.jsonl" in taken.note
    assert words[0] in taken.note


def test_pairs_are_not_taken_from_the_models_run():
    taken = environment_of_runs(TRAIN_DPO, ["model=runs/mine", "env.path=pairs.jsonl"], [])

    assert (taken.kept, taken.note) == ([], "")


def test_a_run_on_pairs_is_evaluated_where_it_began(tmp_path):
    runs = tmp_path / "runs"
    a_run(runs / "liked", "train dpo", "env.path=pairs.jsonl", model="runs/mine/checkpoints/step-000001")
    a_run(runs / "twice", "train dpo", "env.path=more.jsonl", model="runs/liked/checkpoints/step-000001")

    taken = environment_of_runs(EVAL, ["model=runs/twice"], [])

    assert [(each.key, each.text) for each in taken.kept][:3] == [
        ("env", "dataset"),
        ("env.path", "mine.jsonl"),
        ("env.reward", "exact"),
    ]


def test_a_run_on_pairs_that_began_from_no_run_asks_for_an_environment(tmp_path):
    a_run(tmp_path / "runs" / "liked", "train dpo", "env.path=pairs.jsonl")

    with pytest.raises(ConfigError, match="runs/liked"):
        environment_of_runs(EVAL, ["model=runs/liked"], [])
    assert environment_of_runs(EVAL, ["model=runs/liked", "env=gsm8k"], []).kept == []


def test_code_of_a_run_is_asked_for_with_the_whole_command(tmp_path):
    a_run(tmp_path / "runs" / "coded", "train grpo", "env=dataset", "env.path=mine.jsonl", "env.reward=./r.py:score")
    typed = ["rlpost", "train", "distill", "teacher=runs/coded", "--name", "mine 2"]

    with pytest.raises(ConfigError) as raised:
        environment_of_runs(TRAIN_DISTILL, ["teacher=runs/coded"], typed)

    _, _, command = str(raised.value).rpartition(": ")
    assert shlex.split(command) == [*typed, "env.reward=./r.py:score"]
    words = ["teacher=runs/coded", "env.reward=./r.py:score"]
    assert [each.key for each in environment_of_runs(TRAIN_DISTILL, words, typed).kept] == ["env", "env.path"]


def test_a_mistyped_run_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"runs/nine.*runs/mine"):
        environment_of_runs(TRAIN_GRPO, ["env=runs/nine"], [])
