"""Words in, settings out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import rlpost
from rlpost.catalog import CHOICES, COMMANDS, EVAL, TRAIN_GRPO, Command
from rlpost.config.comments import describe
from rlpost.config.compose import compose
from rlpost.config.schema import built_in_folder, class_of, options, recipes
from rlpost.errors import ConfigError, DataError
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

EVERY_OPTION = [(group, option) for group in CHOICES for option in options(group)]


def refusal(words: list[str], command: Command = TRAIN_GRPO) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(command, words)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_defaults_are_smollm2_on_sums() -> None:
    composed = compose(TRAIN_GRPO)
    settings = composed.settings
    assert type(settings) is GRPOSettings
    assert settings.model.path == "packaged:smollm2"
    assert type(settings.env) is ArithmeticSettings
    assert settings.env.operations == [Operation.add]
    assert type(settings.policy) is AutoPolicySettings
    assert (settings.env.split, training_sampling(settings.sampling, settings.env).temperature, settings.steps) == (
        "train",
        1.0,
        60,
    )
    assert composed.choices == {
        "model": "smollm2",
        "collector": "sync",
        "cluster": "none",
        "env": "arithmetic",
        "policy": "auto",
        "loss": "grpo",
        "optim": "adamw",
        "tracking": "none",
    }
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


def test_a_users_file_may_build_on_an_option_and_hide_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compose(TRAIN_GRPO, ["env=gsm8k"]).settings.env.limit is None  # Hydra knows the option as a row by now
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "env").mkdir(parents=True)
    (tmp_path / "conf" / "env" / "few.yaml").write_text("# Few\ndefaults: [gsm8k, _self_]\nlimit: 3\n")
    settings = compose(TRAIN_GRPO, ["env=few"]).settings.env
    assert (type(settings), settings.limit, describe("env", "few")) == (GSM8KSettings, 3, "Few")
    (tmp_path / "conf" / "env" / "gsm8k.yaml").write_text("# Mine\ndefaults: [gsm8k_schema, _self_]\nlimit: 7\n")
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


def test_a_users_override_replaces_the_recipes() -> None:
    settings = compose(TRAIN_GRPO, ["steps=2", "recipe=arithmetic-smollm2-cpu", "model=tiny"]).settings
    assert (settings.steps, settings.model.path) == (2, "builtin:tiny")


def test_a_model_with_a_slash_is_a_path_on_the_default_option() -> None:
    composed = compose(TRAIN_GRPO, ["model=Qwen/Qwen2.5-0.5B"])
    assert composed.settings.model.path == "Qwen/Qwen2.5-0.5B"
    assert composed.choices["model"] == "smollm2"
    assert composed.overrides == ["model.path=Qwen/Qwen2.5-0.5B"]


def test_a_run_folder_can_be_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "runs" / "a" / "checkpoints" / "latest" / "model")
    monkeypatch.chdir(tmp_path)
    assert compose(EVAL, ["model=runs/a"]).settings.model.path == "runs/a"
    assert compose(EVAL, ["model=a"]).settings.model.path == "runs/a"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("stesp=3", "stesp is not a setting of rlpost train grpo; did you mean steps?"),
        ("optm.lr=1", "optm.lr is not a setting of rlpost train grpo; did you mean optim.lr?"),
        ("learning_rate=1", "learning_rate is not a setting of rlpost train grpo; did you mean optim.lr?"),
        ("modle=qwen", "modle is not a setting of rlpost train grpo; did you mean model?"),
        ("env.path=x", "env.path is not a setting of env=arithmetic: it belongs to env=dataset and env=factory"),
        ("sampling=1", "sampling is a group of settings: set sampling.temperature, sampling.top_p"),
        ("advantage=rloo", "advantage.shuffle_rewards; did you mean advantage.estimator=rloo?"),
        ("bananas=1", "bananas is not a setting of rlpost train grpo; see rlpost config show train grpo"),
        ("hydra.run.dir=x", "hydra.run.dir is not a setting of rlpost train grpo; see rlpost config show train grpo"),
        ("model=qwne", "model=qwne is unknown; did you mean qwen?"),
        ("env=[gsm8k]", "env=[gsm8k] is unknown; it takes one option, not a list"),
        ("policy=", "policy= is unknown; it is one of auto, scripted, transformers, vllm"),
        (
            "env=gsm8k_schema",
            "env=gsm8k_schema is unknown; did you mean gsm8k?",
        ),
        ("model.path=qwen", "model.path=qwen is neither a folder nor a hub id; did you mean model=qwen?"),
        ("recipe=gsm8k-smollm-cpu", "recipe=gsm8k-smollm-cpu is unknown; did you mean gsm8k-smollm2-cpu?"),
        ("recipe=./none.yaml", "recipe=./none.yaml does not exist: give the path of a YAML file"),
        ("env._target_=os.system", "env._target_=os.system is refused: a setting cannot name code to run"),
        ("model.path=${oc.env:HOME}", "model.path=${oc.env:HOME} is refused: a value cannot refer to another"),
        ("group_size=1", "group_size=1 leaves nothing to compare a completion with: it must be at least 2"),
        ("minibatch_size=12", "minibatch_size=12 does not fit"),
        ("sampling.temperature=0", "training needs it above 0"),
        ("optim.lr=-1", "optim.lr=-1.0 is out of range: it must be above 0.0"),
        ("deterministic=true", "deterministic=true promises bitwise equal runs"),
        ("env.split=test", "env.split=test would train on what is held out to measure it: leave it out"),
    ],
)
def test_what_cannot_work_is_refused_with_the_nearest_right_word(word: str, message: str) -> None:
    assert message in refusal([word])


def test_determinism_needs_a_policy_that_can_keep_it() -> None:
    assert compose(TRAIN_GRPO, ["deterministic=true", "policy=transformers"]).settings.deterministic
    assert compose(TRAIN_GRPO, ["deterministic=true", "policy=scripted"]).settings.deterministic
    assert "policy=transformers" in refusal(["deterministic=true", "policy=vllm"])


def test_a_key_of_another_command_says_whose_it_is() -> None:
    assert refusal(["steps=3"], EVAL) == "steps is not a setting of rlpost eval: it belongs to rlpost train grpo"
    assert refusal(["optim=adamw"], EVAL) == "optim is not a setting of rlpost eval: it belongs to rlpost train grpo"


def test_a_missing_data_folder_is_a_data_error() -> None:
    with pytest.raises(DataError, match=r"env\.path=\./nowhere does not exist"):
        compose(TRAIN_GRPO, ["env=gsm8k", "env.path=./nowhere"])


def test_the_users_conf_and_recipes_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("# Mine\npath: me/mine\n")
    (tmp_path / "conf" / "model" / "tiny.yaml").write_text("defaults: [model_schema, _self_]\npath: me/tiny\n")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "own.yaml").write_text("command: eval\nmodel: mine\n")
    assert compose(TRAIN_GRPO, ["model=mine"]).settings.model.path == "me/mine"
    assert compose(TRAIN_GRPO, ["model=tiny"]).settings.model.path == "me/tiny"
    assert compose(EVAL, ["recipe=own"]).settings.model.path == "me/mine"
    assert compose(TRAIN_GRPO, ["model=qwen"]).settings.model.path == "Qwen/Qwen2.5-0.5B-Instruct"


def test_a_wheel_finds_its_own_copy_of_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "rlpost"
    copy = package / "_builtin" / "conf"
    shutil.copytree(built_in_folder("conf"), copy)
    (copy / "model" / "smollm2.yaml").write_text("# In the wheel\npath: in/wheel\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rlpost, "__file__", str(package / "__init__.py"))
    assert compose(TRAIN_GRPO).settings.model.path == "in/wheel"
    with pytest.raises(ConfigError, match="install rlpost again"):
        built_in_folder("recipes")


@pytest.mark.parametrize(
    ("group", "text", "message"),
    [
        ("env", "limit: 3\n", "conf/env/mine.yaml names no schema"),
        ("env", "defaults: [gsm8k_schema, _self_]\nlimt: 3\n", "limt"),
        ("env", "defaults: [gsm8k_schema, _self_]\nlimit: many\n", "many"),
        ("env", "defaults: [gsm9k_schema, _self_]\n", "gsm9k_schema"),
        ("env", "limit: [3\n", "does not compose"),
        ("model", "_target_: os.system\npath: x/y\n", "_target_"),
        ("model", "dtype: float32\n", "model.path has no value"),
    ],
)
def test_a_users_broken_file_is_a_configuration_error(
    group: str, text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / group).mkdir(parents=True)
    (tmp_path / "conf" / group / "mine.yaml").write_text(text)
    assert message in refusal([f"{group}=mine"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: qwen\n", "begin it with command: train grpo"),
        ("", "begin it with command: train grpo"),
        ("command: train gpro\n", "did you mean train grpo?"),
        ("command: eval\n", "is a recipe for rlpost eval, not for rlpost train grpo"),
        ("command: train grpo\noptim:\n  lr: 1\n", "write optim.lr: in place of the nested optim:"),
        ("command: train grpo\nstepz: 3\n", "did you mean steps?"),
        ("command: train grpo\nsteps: many\n", "x.yaml, line 2: steps=many is of the wrong type"),
        ("command: train grpo\nmodel.path: ${oc.env:HOME}\n", "is refused"),
        ("command: train grpo\nrecipe: other\n", "recipe is not a setting but a file of them"),
        ("command: train grpo\nsteps: 1\nsteps: 2\n", "line 3"),
        ("command: [train\n", "this is not YAML"),
        ("- command\n", "a recipe is a flat list of lines"),
    ],
)
def test_a_broken_recipe_names_its_file(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    error = refusal([f"recipe={file}"])
    assert message in error
    assert "x.yaml" in error


def test_composing_and_its_errors_import_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from rlpost.config.compose import compose\n"
        "from rlpost.catalog import TRAIN_GRPO\n"
        "from rlpost.errors import ConfigError\n"
        "compose(TRAIN_GRPO, ['recipe=gsm8k-qwen0.5b-gpu'])\n"
        "try: compose(TRAIN_GRPO, ['optm.lr=1'])\n"
        "except ConfigError: pass\n"
        "print([m for m in ('torch', 'transformers', 'tensordict', 'datasets', 'vllm') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
