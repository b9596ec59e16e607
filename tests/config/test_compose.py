"""Words in, settings out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

import rlpost
from rlpost.catalog import CHOICES, COMMANDS, EVAL, TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.config.schema import built_in_folder, class_of, describe, options, recipes
from rlpost.errors import ConfigError
from rlpost.policies.drawing import training_sampling
from rlpost.settings import (
    ArithmeticSettings,
    AutoPolicySettings,
    EvalSettings,
    GRPOSettings,
    GSM8KSettings,
    Operation,
)
from tests.model_folders import write_model
from tests.says import Says

EVERY_OPTION = [(group, option) for group in CHOICES for option in options(group)]


def composed(word: str) -> object:
    return compose(TRAIN_GRPO, [word]).settings


def test_the_defaults_are_smollm2_on_sums() -> None:
    composed = compose(TRAIN_GRPO)
    settings = composed.settings
    assert type(settings) is GRPOSettings
    assert settings.model.path == "packaged:smollm2"
    assert type(settings.env) is ArithmeticSettings
    assert settings.env.operations == [Operation.add]
    assert type(settings.policy) is AutoPolicySettings
    temperature = training_sampling(settings.sampling, settings.env).temperature
    assert (settings.env.split, temperature, settings.steps) == ("train", 1.0, 60)
    assert composed.choices == TRAIN_GRPO.choices
    assert composed.overrides == []


def test_evaluation_is_greedy_on_held_out_prompts() -> None:
    settings = compose(EVAL).settings
    assert type(settings) is EvalSettings
    assert (settings.env.split, settings.eval.k, settings.sampling.temperature) == ("test", [1], None)
    assert compose(EVAL, ["env=gsm8k"]).settings.env.split == "test"


def test_every_row_is_chosen_by_an_option() -> None:
    chosen = {(group, class_of(group, option)) for group, option in EVERY_OPTION}
    assert chosen == {(group, row.cls) for group, rows in CHOICES.items() for row in rows.values()}


def test_conf_holds_nothing_but_values_of_options_and_commands() -> None:
    folder = built_in_folder("conf")
    files = {str(file.relative_to(folder)): yaml.safe_load(file.read_text()) for file in folder.rglob("*.*")}
    assert set(files) <= {f"{c.name}.yaml" for c in COMMANDS} | {f"{g}/{o}.yaml" for g, o in EVERY_OPTION}
    assert [name for name, content in files.items() if "/" in name and not set(content) - {"defaults"}] == []


def test_a_users_file_may_build_on_an_option_and_hide_one(here: Path) -> None:
    assert compose(TRAIN_GRPO, ["env=gsm8k"]).settings.env.limit is None  # Hydra knows the option as a row by now
    (here / "conf" / "env").mkdir(parents=True)
    (here / "conf" / "env" / "few.yaml").write_text("# Few\ndefaults: [gsm8k, _self_]\nlimit: 3\n")
    settings = compose(TRAIN_GRPO, ["env=few"]).settings.env
    assert (type(settings), settings.limit, describe("env", "few")) == (GSM8KSettings, 3, "Few")
    (here / "conf" / "env" / "gsm8k.yaml").write_text("# Mine\ndefaults: [gsm8k_schema, _self_]\nlimit: 7\n")
    assert (compose(TRAIN_GRPO, ["env=gsm8k"]).settings.env.limit, describe("env", "gsm8k")) == (7, "Mine")
    assert compose(TRAIN_GRPO, ["env=few"]).settings.env.limit == 3


@pytest.mark.parametrize("name", list(recipes()))
def test_every_recipe_composes_to_what_it_says(name: str, tmp_path: Path) -> None:
    content = yaml.safe_load(recipes()[name].read_text())
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 1 + 1?", "answer": "2"}\n')
    rows = [f"env.path={tmp_path}/rows.jsonl"] if "env.path" in content else []
    verb = content.pop("command")
    command = next(c for c in COMMANDS if c.verb == verb)
    composed = compose(command, [f"recipe={name}", *rows])
    written = dict(word.split("=", 1) for word in composed.overrides)
    assert sorted(written) == sorted(content)
    assert {key: getattr(composed.settings, key) for key in ("steps", "epochs") if key in content} == {
        key: value for key, value in content.items() if key in ("steps", "epochs")
    }
    assert composed.settings.optim.lr == float(content["optim.lr"])


def test_a_model_with_a_slash_is_a_path_on_the_default_option() -> None:
    composed = compose(TRAIN_GRPO, ["model=Qwen/Qwen2.5-0.5B"])
    assert composed.settings.model.path == "Qwen/Qwen2.5-0.5B"
    assert composed.choices["model"] == "smollm2"
    assert composed.overrides == ["model.path=Qwen/Qwen2.5-0.5B"]


def test_a_run_folder_can_be_the_model(here: Path) -> None:
    write_model(here / "runs" / "a" / "checkpoints" / "latest" / "model")
    assert compose(EVAL, ["model=runs/a"]).settings.model.path == "runs/a"
    assert compose(EVAL, ["model=a"]).settings.model.path == "runs/a"


def test_what_cannot_work_is_refused_with_the_nearest_right_word(here: Path, says: Says) -> None:
    wrong = [
        "optm.lr=1",
        "learning_rate=1",
        "env.path=x",
        "sampling=1",
        "advantage=rloo",
        "bananas=1",
        "hydra.run.dir=x",
        "model=qwne",
        "env=[gsm8k]",
        "policy=",
        "env=gsm8k_schema",
        "model.path=qwen",
        "recipe=gsm8k-smollm-cpu",
        "env._target_=os.system",
        "model.path=${oc.env:HOME}",
        "group_size=1",
        "minibatch_size=12",
        "sampling.temperature=0",
        "optim.lr=-1",
        "deterministic=true",
        "env.split=test",
    ]
    says.refusals("train", ConfigError, composed, wrong)
    says.refusals("eval", ConfigError, lambda word: compose(EVAL, [word]), ["steps=3", "optim=adamw"])


def test_determinism_needs_a_policy_that_can_keep_it() -> None:
    assert compose(TRAIN_GRPO, ["deterministic=true", "policy=transformers"]).settings.deterministic
    assert compose(TRAIN_GRPO, ["deterministic=true", "policy=scripted"]).settings.deterministic
    with pytest.raises(ConfigError, match="policy=transformers"):
        compose(TRAIN_GRPO, ["deterministic=true", "policy=vllm"])


def test_the_users_conf_and_recipes_come_first(here: Path) -> None:
    (here / "conf" / "model").mkdir(parents=True)
    (here / "conf" / "model" / "mine.yaml").write_text("# Mine\npath: me/mine\n")
    (here / "conf" / "model" / "tiny.yaml").write_text("defaults: [model_schema, _self_]\npath: me/tiny\n")
    (here / "recipes").mkdir()
    (here / "recipes" / "own.yaml").write_text("command: eval\nmodel: mine\n")
    assert compose(TRAIN_GRPO, ["model=mine"]).settings.model.path == "me/mine"
    assert compose(TRAIN_GRPO, ["model=tiny"]).settings.model.path == "me/tiny"
    assert compose(EVAL, ["recipe=own"]).settings.model.path == "me/mine"
    assert compose(TRAIN_GRPO, ["model=qwen"]).settings.model.path == "Qwen/Qwen2.5-0.5B-Instruct"


def test_a_wheel_finds_its_own_copy_of_conf(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = here / "site-packages" / "rlpost"
    copy = package / "_builtin" / "conf"
    shutil.copytree(built_in_folder("conf"), copy)
    (copy / "model" / "smollm2.yaml").write_text("# In the wheel\npath: in/wheel\n")
    monkeypatch.setattr(rlpost, "__file__", str(package / "__init__.py"))
    assert compose(TRAIN_GRPO).settings.model.path == "in/wheel"
    with pytest.raises(ConfigError, match="rlpost"):
        built_in_folder("recipes")


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("env", "limit: 3\n"),
        ("env", "defaults: [gsm8k_schema, _self_]\nlimt: 3\n"),
        ("env", "defaults: [gsm8k_schema, _self_]\nlimit: many\n"),
        ("env", "defaults: [gsm9k_schema, _self_]\n"),
        ("env", "limit: [3\n"),
        ("model", "_target_: os.system\npath: x/y\n"),
        ("model", "dtype: float32\n"),
    ],
)
def test_a_users_broken_file_is_a_configuration_error(group: str, text: str, here: Path, says: Says) -> None:
    (here / "conf" / group).mkdir(parents=True)
    (here / "conf" / group / "mine.yaml").write_text(text)
    says.refusals("config", ConfigError, composed, [f"{group}=mine"])


def test_keys_of_a_recipe_may_be_nested(here: Path) -> None:
    (here / "x.yaml").write_text("command: train grpo\noptim:\n  lr: 1e-6\n  schedule: cosine\noptim.beta1: 0.5\n")
    optim = compose(TRAIN_GRPO, ["recipe=./x.yaml"]).settings.optim
    assert (optim.lr, optim.schedule.name, optim.beta1) == (1e-6, "cosine", 0.5)


def test_a_broken_recipe_names_its_file(here: Path, says: Says) -> None:
    def with_recipe(text: str) -> object:
        (here / "x.yaml").write_text(text)
        return composed("recipe=./x.yaml")

    wrong = [
        "model: qwen\n",
        "",
        "command: train gpro\n",
        "command: eval\n",
        "command: train grpo\noptim:\n  lrr: 1\n",
        "command: train grpo\nstepz: 3\n",
        "command: train grpo\nsteps: many\n",
        "command: train grpo\nrecipe: other\n",
        "command: train grpo\nsteps: 1\nsteps: 2\n",
        "command: [train\n",
        "- command\n",
    ]
    says.refusals("config", ConfigError, with_recipe, wrong)
