"""Environments and rewards that a user's file adds."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpost.catalog import CHOICES, EVAL, TRAIN_GRPO
from rlpost.config import plugins
from rlpost.config.compose import compose
from rlpost.errors import ConfigError
from rlpost.settings import DatasetSettings
from rlpost.settings.base import REWARDS
from tests.says import Says

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


def test_a_registered_environment_is_set_like_any_other(tmp_path: Path) -> None:
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
    for typo, meant in (("env=mien", r"mine\?"), ("env.detph=5", r"env\.depth\?")):
        with pytest.raises(ConfigError, match=meant):
            compose(TRAIN_GRPO, ["env=mine", typo, word])


def test_a_file_of_conf_may_build_on_it(here: Path) -> None:
    (here / "conf" / "env").mkdir(parents=True)
    (here / "conf" / "env" / "deep.yaml").write_text("defaults: [mine_schema, _self_]\ndepth: 9\n")
    settings = compose(TRAIN_GRPO, [plugin(here, ENV), "env=deep"]).settings
    assert getattr(settings.env, "depth", None) == 9
    rows = "defaults: [dataset_schema, _self_]\npath: me/rows\nreward: ['./r.py:score']\n"
    (here / "conf" / "env" / "rows.yaml").write_text(rows)
    assert compose(TRAIN_GRPO, ["env=rows", "env.reward=exact"]).choices["env"] == "rows"


def test_a_recipe_may_choose_what_a_plugin_given_here_registers(tmp_path: Path) -> None:
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
    with pytest.raises(ConfigError, match=r"kind\?"):
        compose(TRAIN_GRPO, [*words, "env.reward=kidn"])


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n",
        "x = 1\ny = x / 0\n",
        SETTINGS + "rlpost.register_env('gsm8k', MineSettings, print)\n",
        ENV + "rlpost.register_env('mine', MineSettings, print)\n",
        SETTINGS + "rlpost.register_env('mine', dict, print)\n",
        SETTINGS + "rlpost.register_env('my env', MineSettings, print)\n",
        SETTINGS + "class Bare(EnvSettings): ...\nrlpost.register_env('mine', Bare, print)\n",
        ENV.replace("depth: int = 3", "depth: dict[str, int] | None = None"),
        "import rlpost\nrlpost.register_reward('exact', print)\n",
    ],
    ids=lambda text: text.splitlines()[-1],
)
def test_a_plugin_that_cannot_be_used_says_why(text: str, tmp_path: Path, says: Says) -> None:
    before = dict(CHOICES["env"]), dict(REWARDS)
    word = plugin(tmp_path, text)
    says.refusals("config", ConfigError, lambda word: compose(TRAIN_GRPO, [word]), [word])
    assert before == (CHOICES["env"], REWARDS)


def test_plugins_are_taken_out_of_words(tmp_path: Path) -> None:
    assert plugins.without_plugins(["env.limit=3", plugin(tmp_path, ENV)]) == ["env.limit=3"]
    assert "mine" in CHOICES["env"]
