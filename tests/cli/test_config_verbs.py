"""`rlpost config list, show, explain`: what they print, and as JSON."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from rlpost.catalog import COMMANDS, TRAIN_DISTILL, TRAIN_GRPO, Command
from rlpost.config import explain
from rlpost.config.compose import compose, merge_all
from rlpost.config.explain import value_of
from rlpost.config.schema import all_keys, docs_of, options, read_yaml, recipes
from tests.command_line import CommandLine
from tests.says import Says
from tests.settings_read import settings_classes

pytestmark = pytest.mark.thorough

# environments whose recipe is begun and then completed as it says; those that need no value, for one command
OF_EVERY_COMMAND = ("arithmetic", "dataset", "gsm8k", "mix", "reasoning_gym", "text_game")
OF_ONE = ("countdown", "ifbench", "ifeval", "math")


@pytest.mark.parametrize(
    "words",
    ["loss.clip_high loss.clip_high=0.25", "policy policy=vllm", "sampling eval", "env.reward"],
    ids=["a key with papers", "a group", "a part without options", "a key that needs a value"],
)
def test_what_is_asked_for_is_explained(words: str, rlpost: CommandLine, says: Says) -> None:
    says("config", rlpost(f"config explain {words}"))


def test_a_word_finds_the_settings_whose_name_or_meaning_has_it(rlpost: CommandLine) -> None:
    rows = rlpost.json("config explain kl")
    keys = [row["key"] for row in rows]
    assert "kl" in keys[0]  # names come before meanings
    assert {"loss.kl_coef", "loss.beta"} <= {*keys}  # 1: KL(student || teacher)
    assert "optim.lr" in rlpost("config explain learning")


def test_a_key_names_every_verb_and_option_that_has_it(rlpost: CommandLine) -> None:
    of = rlpost.json("config explain env.path")["of"]
    assert "train sft" in of
    assert "env=dataset, env=factory" in of
    assert "; of" not in rlpost.json("config explain env.max_completion_tokens")["of"]  # every environment


def test_the_last_place_that_sets_a_key_is_named(rlpost: CommandLine, here: Path) -> None:
    def who(words: str) -> str:
        return rlpost.json(f"config explain {words}")["set_by"]

    assert who("optim.lr") == "OptimSettings in rlpost/settings/training.py"
    assert who("optim.lr recipe=gsm8k-smollm2-cpu optim.lr=1") == "the command line"
    assert who("env.limit recipe=gsm8k-smollm2-cpu") == "EnvSettings in rlpost/settings/env.py"
    of_recipe = who("env.max_completion_tokens recipe=gsm8k-smollm2-cpu")
    assert of_recipe.endswith("recipes/gsm8k-smollm2-cpu.yaml, line 5")
    assert who("env.prompt_template recipe=gsm8k-smollm2-cpu env=arithmetic") == "conf/env/arithmetic.yaml, line 5"
    assert who("env eval") == "conf/eval.yaml, line 5"
    assert who("env.split eval") == "conf/eval.yaml, line 9"
    assert who("env") == "train grpo in rlpost/catalog.py"
    (here / "conf" / "env").mkdir(parents=True)
    (here / "conf" / "env" / "few.yaml").write_text("# Few\ndefaults: [gsm8k, _self_]\nlimit: 3\n")
    assert who("env.limit env=few") == "conf/env/few.yaml, line 3"
    assert who("env.path env=few") == "GSM8KSettings in rlpost/settings/env.py"


def test_an_option_is_explained_with_its_settings(rlpost: CommandLine) -> None:
    found = rlpost.json("config explain env=gsm8k")
    assert found["description"].startswith("Grade-school word problems")
    [path] = [row for row in found["keys"] if row["key"] == "env.path"]
    assert (path["text"], path["type"]) == ("openai/gsm8k", "text")
    assert path["meaning"] in rlpost("config explain env=gsm8k")
    assert "loss.clip_high=0.28" in rlpost("config explain loss=dapo")


def test_what_a_plugin_adds_is_listed_and_explained(rlpost: CommandLine, here: Path) -> None:
    (here / "mine.py").write_text(MINE)
    assert rlpost.json("config list env plugin=mine.py")["env"]["mine"].startswith("Of mine (")
    rewards = rlpost.json("config list reward plugin=mine.py")["reward"]
    assert (rewards["kind"], "exact" in rewards) == ("How kind.", True)
    keys = {row["key"]: row["meaning"] for row in rlpost.json("config explain env=mine plugin=mine.py")["keys"]}
    assert (keys["env.depth"], keys["env.width"]) == ("how deep it goes", "")


def test_a_key_of_another_option_is_explained_with_that_option(rlpost: CommandLine) -> None:
    assert rlpost("config explain env.digits env=arithmetic").startswith("env.digits=2\n")
    assert "policy=scripted\n" in rlpost("config explain policy.replies")


MINE = '''
from dataclasses import dataclass
import rlpost
from rlpost.settings import EnvSettings, doc

@dataclass
class MineSettings(EnvSettings):
    """Of mine."""

    depth: int = doc(3, "how deep it goes")
    width: int = 4  # a plain comment is no meaning

def kind(completions):
    """How kind."""

rlpost.register_env("mine", MineSettings, print)
rlpost.register_reward("kind", kind)
'''


def test_every_key_is_listed_with_value_and_meaning(rlpost: CommandLine) -> None:
    out = rlpost("config explain")
    lines = [line.strip() for line in out.splitlines()]
    assert lines[0] != ""
    keys = [line.partition("=")[0] for line in lines if line]
    assert set(keys) == {key.name for key in merge_all(TRAIN_GRPO).keys}
    [group_size] = [line for line in lines if line.startswith("group_size=")]
    assert group_size.split()[0] == "group_size=8"
    assert rlpost("config explain train grpo") == out
    assert "env.path=openai/gsm8k" in rlpost("config explain train grpo env=gsm8k")


def test_every_key_says_what_it_means() -> None:
    for cls in settings_classes():
        assert [field.name for field in dataclasses.fields(cls) if not docs_of(cls).get(field.name)] == [], cls


def test_papers_speak_of_keys_that_exist_and_values_that_fit() -> None:
    papers = read_yaml(Path(explain.__file__).parent / "papers.yaml")
    assert set(papers) <= set(all_keys(TRAIN_GRPO))
    fixed = {
        "group_size": "prompts_per_step=1",
        "minibatch_size": "prompts_per_step=512",
        "loss.max_ratio": "loss=two_sided",
    }
    for name, rows in papers.items():
        for value, paper, _ in rows:
            merged = merge_all(TRAIN_GRPO, [f"{name}={value}", *([fixed[name]] if name in fixed else [])])
            assert str(value_of(merged, name)) != ""
            assert re.search(r", arXiv:\d{4}\.\d{4,5}$", paper)


def test_explain_as_json(rlpost: CommandLine) -> None:
    meaning = rlpost.json("config explain optim.lr optim.lr=1e-6")
    assert (meaning["key"], meaning["value"]) == ("optim.lr", 1e-6)
    meaning = rlpost.json("config explain env.reward")
    assert meaning["value"] is None  # it needs one
    group = rlpost.json("config explain env")
    assert group["chosen"] == "arithmetic"
    assert group["set_by"].endswith("rlpost/catalog.py")
    [steps] = [row for row in rlpost.json("config explain") if row["key"] == "steps"]
    assert (steps.keys(), steps["value"], steps["text"]) == ({"key", "value", "text", "type", "meaning"}, 60, "60")


def test_list_and_show_as_json(rlpost: CommandLine) -> None:
    listed = rlpost.json("config list")
    assert listed["model"]["tiny"]
    assert set(listed["recipe"]) == set(recipes())
    shown = rlpost.json("config show eval env=gsm8k")
    assert (shown["verb"], shown["choices"]["env"], shown["overrides"]) == ("eval", "gsm8k", ["env=gsm8k"])
    assert shown["settings"]["sampling"]["top_p"] == 1.0


REFUSED = """
    config explain optm.lr
    config explain evn
    config explain optim.lr eval
    config list modl
    config show --recipe taken.yaml
    config show group_size=1 --recipe x.yaml
"""


def test_what_is_refused_is_one_line_and_writes_nothing(rlpost: CommandLine, says: Says) -> None:
    taken = Path("taken.yaml")
    taken.write_text("command: eval\n")
    says("config", rlpost.refusals(REFUSED))
    assert taken.read_text() == "command: eval\n"
    assert not Path("x.yaml").exists()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["train", "grpo", "env=gsm8k", "policy=vllm", "optim.lr=1e-6", "model=me/mine"],
        ["eval", "policy=scripted", 'policy.replies=["yes: 1", "null", "1e-6", "a # b", "\\u00e9\\t"]'],
        ["env.system_prompt=Think,\nthen: 'answer' # now", "env.prompt_template=[{question}]", "model.revision=1e-6"],
    ],
)
def test_show_writes_a_recipe_of_the_same_settings(words: list[str], rlpost: CommandLine) -> None:
    file = Path("mine.yaml")
    out = rlpost(["config", "show", *words, "--recipe", str(file)])
    command = next(c for c in COMMANDS if f"rlpost {c.verb} recipe={file}\n" in out)
    wanted = compose(command, [word for word in words if "=" in word]).settings
    assert compose(command, [f"recipe={file}"]).settings == wanted
    uncommented = re.sub(r"(?m)^# ([a-z_0-9.]+: )", r"\1", file.read_text())
    assert len(re.findall(r"(?m)^[a-z_0-9.]+: ", uncommented)) > len(wanted.__dataclass_fields__) + 15
    file.write_text(uncommented)
    assert compose(command, [f"recipe={file}"]).settings == wanted


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_what_is_said_of_a_written_recipe_holds_when_it_is_done(command: Command[Any], rlpost: CommandLine) -> None:
    Path("r.py").write_text("def score(completions):\n    return [0.0 for _ in completions]\n")
    values = {
        "env.path": "me/rows",
        "env.task": "leg_counting",
        "env.id": "FrozenLake-v1",
        "env.sources": "[arithmetic,countdown]",
    }
    teacher = "teacher=builtin:tiny" if command is TRAIN_DISTILL else ""
    envs = (*OF_EVERY_COMMAND, *(OF_ONE if command is TRAIN_GRPO else ()))
    for env in (env for env in envs if env in options("env", command)):
        found = rlpost.json(f"config show {command.verb} env={env} {teacher} --recipe {env}.yaml")
        text = Path(f"{env}.yaml").read_text()
        for key in found["needed"]:
            text = text.replace(f"# {key}: ???", f"{key}: {values[key]}")
        Path(f"{env}.yaml").write_text(text)
        words = found["use"].replace("FILE.py:FUNCTION", "r.py:score").removeprefix(f"rlpost {command.verb} ").split()
        assert compose(command, words).choices["env"] == env
