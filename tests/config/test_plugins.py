"""Environments and rewards that a user's file adds."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlpost
from rlpost.catalog import CHOICES, EVAL, TRAIN_GRPO
from rlpost.config import plugins
from rlpost.config.compose import compose
from rlpost.errors import ConfigError
from rlpost.settings import DatasetSettings
from rlpost.settings.base import REWARDS

SETTINGS = '''
from dataclasses import dataclass
import rlpost
from rlpost.settings import EnvSettings

@dataclass
class MineSettings(EnvSettings):
    """A game of mine.

    More of it.
    """

    depth: int = 3  # how deep it goes
'''
ENV = SETTINGS + "rlpost.register_env('mine', MineSettings, lambda settings, **common: None)\n"


def plugin(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return f"plugin={folder / name}"


def test_a_registered_environment_is_chosen_and_set_like_any_other(tmp_path: Path) -> None:
    word = plugin(tmp_path, ENV)
    composed = compose(TRAIN_GRPO, ["env=mine", "env.depth=5", word])
    assert type(composed.settings.env) is CHOICES["env"]["mine"].cls
    assert getattr(composed.settings.env, "depth", None) == 5
    assert composed.settings.plugin == [str(tmp_path / "mine.py")]
    assert "depth: 5" in composed.yaml
    assert f"plugin:\n- {tmp_path / 'mine.py'}\n" in composed.yaml
    assert compose(TRAIN_GRPO, composed.overrides).settings == composed.settings
    assert compose(EVAL, ["env=mine", word]).settings.env.split == "test"


def test_typos_of_its_name_and_keys_are_answered(tmp_path: Path) -> None:
    word = plugin(tmp_path, ENV)
    with pytest.raises(ConfigError, match=r"env=mien is unknown; did you mean mine\?"):
        compose(TRAIN_GRPO, ["env=mien", word])
    with pytest.raises(ConfigError, match=r"did you mean env.depth\?"):
        compose(TRAIN_GRPO, ["env=mine", "env.detph=5", word])


def test_a_file_of_conf_may_build_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "env").mkdir(parents=True)
    (tmp_path / "conf" / "env" / "deep.yaml").write_text("defaults: [mine_schema, _self_]\ndepth: 9\n")
    settings = compose(TRAIN_GRPO, [plugin(tmp_path, ENV), "env=deep"]).settings
    assert getattr(settings.env, "depth", None) == 9


@pytest.mark.parametrize("line", ["plugin: mine.py", "env.reward: [./r.py:score, exact]", "env.accuracy: r.py:right"])
def test_a_recipe_names_no_code(line: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"command: train grpo\nenv: dataset\n{line}\n")
    with pytest.raises(ConfigError, match=r"r.yaml, line 3: a file cannot name code to run; .* on the command"):
        compose(TRAIN_GRPO, [f"recipe={tmp_path / 'r.yaml'}"])


def test_a_file_of_conf_names_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "env").mkdir(parents=True)
    (tmp_path / "conf" / "env" / "rows.yaml").write_text(
        "defaults: [dataset_schema, _self_]\npath: me/rows\nreward: ['./r.py:score']\n"
    )
    with pytest.raises(ConfigError, match=r"env.reward stands in conf/, and a file cannot name code to run"):
        compose(TRAIN_GRPO, ["env=rows"])
    assert compose(TRAIN_GRPO, ["env=rows", "env.reward=exact"]).choices["env"] == "rows"


def test_a_recipe_may_choose_what_a_plugin_on_the_command_line_registers(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("command: train grpo\nenv: mine\nenv.depth: 5\n")
    composed = compose(TRAIN_GRPO, [f"recipe={tmp_path / 'r.yaml'}", plugin(tmp_path, ENV)])
    assert composed.choices["env"] == "mine"


def test_several_plugins_and_registered_rewards(tmp_path: Path) -> None:
    plugin(tmp_path, ENV)
    plugin(tmp_path, "import rlpost\nrlpost.register_reward('kind', lambda completions: [1.0])\n", "kind.py")
    words = [f"plugin=[{tmp_path}/mine.py,{tmp_path}/kind.py]", "env=dataset", "env.path=me/rows", "env.reward=kind"]
    settings = compose(TRAIN_GRPO, words).settings
    assert isinstance(settings.env, DatasetSettings)
    assert settings.env.reward == ["kind"]
    with pytest.raises(ConfigError, match=r"env.reward=kidn is not a reward; did you mean kind\?"):
        compose(TRAIN_GRPO, [*words, "env.reward=kidn"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", "registers nothing: end it with rlpost.register_env"),
        ("x = 1\ny = x / 0\n", "line 2: importing it failed: ZeroDivisionError"),
        (
            SETTINGS + "rlpost.register_env('gsm8k', MineSettings, print)\n",
            r"register_env\('gsm8k'\): the name is taken",
        ),
        (ENV + "rlpost.register_env('mine', MineSettings, print)\n", r"register_env\('mine'\): the name is taken"),
        (
            SETTINGS + "rlpost.register_env('mine', dict, print)\n",
            "dict is not derived from rlpost.settings.EnvSettings",
        ),
        (SETTINGS + "rlpost.register_env('mine', MineSettings(), print)\n", "is not derived from"),
        (SETTINGS + "rlpost.register_env('my env', MineSettings, print)\n", "a name is letters, digits"),
        (
            SETTINGS + "class Bare(EnvSettings): ...\nrlpost.register_env('mine', Bare, print)\n",
            "Bare is not a dataclass: put @dataclass above it",
        ),
        (
            ENV.replace("depth: int = 3", "depth: dict[str, int] | None = None"),
            "MineSettings.depth has a type that cannot be set",
        ),
        ("import rlpost\nrlpost.register_reward('exact', print)\n", r"register_reward\('exact'\): the name is taken"),
    ],
)
def test_a_plugin_that_cannot_be_used_says_why(text: str, said: str, tmp_path: Path) -> None:
    word = plugin(tmp_path, text)
    before = dict(CHOICES["env"]), dict(REWARDS)
    with pytest.raises(ConfigError, match=said) as caught:
        compose(TRAIN_GRPO, [word])
    assert "mine.py" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert before == (CHOICES["env"], REWARDS)


def test_a_plugin_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plugin=./nowhere.py: there is no file ./nowhere.py"):
        compose(TRAIN_GRPO, ["plugin=./nowhere.py"])


def test_a_plugin_in_conf_comes_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = (Path(rlpost.__file__).parents[1] / "conf" / "eval.yaml").read_text()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "eval.yaml").write_text(own + "plugin: [mine.py]\n")
    with pytest.raises(ConfigError, match="plugin stands in conf/"):
        compose(EVAL)


def test_plugins_are_taken_out_of_words(tmp_path: Path) -> None:
    assert plugins.without_plugins(["env.limit=3", plugin(tmp_path, ENV)]) == ["env.limit=3"]
    assert "mine" in CHOICES["env"]
