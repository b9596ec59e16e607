"""Parts that one file of a user's own adds: each is given on the command line, and a training really uses it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlpost.cli.main import run
from rlpost.runs.reader import read_run
from tests.trainings import metrics, rollouts, untimed

pytestmark = pytest.mark.thorough

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(\w+)[ ]?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = (
    "model=tiny policy=transformers model.autocast=none deterministic=true eval.enabled=false steps=2 "
    "prompts_per_step=2 group_size=4 env.max_completion_tokens=8"
)
ENV = '''
from dataclasses import dataclass
import rlpost
from rlpost.envs import DatasetChatEnv
from rlpost.rewards.score import Score
from rlpost.settings import EnvSettings

@dataclass
class LettersSettings(EnvSettings):
    """Answer in lower case."""

    bonus: float = 0.0  # added to each reward

class Letters(DatasetChatEnv):
    def __init__(self, settings, **common):
        self.bonus = settings.bonus
        super().__init__([{"question": f"Name a thing with {letter}."} for letter in "abcdefgh"], **common)

    def score(self, conversation):
        return Score(sum(map(str.islower, conversation.response_text)) / 8 + self.bonus)

rlpost.register_env("letters", LettersSettings, Letters)
'''
REWARD = """
import rlpost

def short(completions, **others):
    return [-len(reply) for reply in completions]

rlpost.register_reward("short", short)
"""
TOOL = '''
import rlpost

def look_up(country: str) -> str:
    """Look up the capital of a country.

    Args:
        country: Its English name.
    """
    return f"It is {country[::-1]}."

rlpost.register_tool("look_up", look_up)
'''
CALL = '<tool_call>{"name": "look_up", "arguments": {"country": "Peru"}}</tool_call>'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an environment whose rewards random weights can earn."""
    monkeypatch.chdir(tmp_path)
    Path("letters.py").write_text(ENV)
    return tmp_path


TORCHRL_LOADED = """
import sys
from rlpost.cli.main import run

code = run(sys.argv[1:])
print(code, sorted(name for name in sys.modules if name.startswith("rlpost.torchrl")))
"""


def train(line: str) -> Path:
    """Train as `rlpost train LINE --name NAME` does; the run folder."""
    words = shlex.split(line)
    assert run(["train", *words]) == 0
    return Path("runs", next(name for flag, name in pairwise(words) if flag == "--name"))


def commands_of_the_page(name: str) -> list[str]:
    """Writes the plugin NAME.py of docs/plugins.md; returns the page's commands with it, each without `rlpost train`.

    Their environment is the letters', with two files of plugins.
    """
    blocks = BLOCK.findall((DOCS / "plugins.md").read_text())
    [text] = [text for _, file, text in blocks if file == f"{name}.py"]
    Path(f"{name}.py").write_text(text)
    plugin = f"plugin=./{name}.py"
    lines = [line for language, _, text in blocks if language == "sh" for line in text.splitlines() if plugin in line]
    more = f"env=letters plugin=[./letters.py,./{name}.py]"
    return [line.removeprefix("rlpost train ").replace(plugin, more) for line in lines]


def groups_of(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [[row for row in rows if row["group"] == group] for group in sorted({row["group"] for row in rows})]


def test_a_loss_of_ones_own_is_minimised() -> None:
    [command] = commands_of_the_page("asymmetric")
    for name, worse in (("asymmetric", 0.25), ("symmetric", 1.0)):
        line = command.replace("loss.worse=0.25", f"loss.worse={worse}").replace("--name asymmetric", f"--name {name}")
        folder = train(f"{line} {SMALL}")
        for step in (1, 2):  # one update a step: the ratio is 1, and the loss the mean of the weighted advantages
            advantages = [row["advantage"] for row in rollouts(folder, step)]
            assert min(advantages) < 0 < max(advantages)
            expected = -sum(a if a > 0 else worse * a for a in advantages) / len(advantages)
            assert metrics(folder)[step - 1]["loss/policy"] == pytest.approx(expected, abs=1e-6)
    assert untimed(Path("runs/asymmetric"))[1] != untimed(Path("runs/symmetric"))[1]


def test_an_estimator_of_ones_own_gives_the_advantages() -> None:
    [command] = commands_of_the_page("best")
    folder = train(f"{command} {SMALL}")
    for step in (1, 2):
        for group in groups_of(rollouts(folder, step)):
            most = max(row["reward"] for row in group)
            assert [row["advantage"] for row in group] == [float(row["reward"] == most) for row in group]
    assert all(row["grad_norm"] > 0 for row in metrics(folder))


def test_an_algorithm_of_ones_own_trains_and_goes_on_where_it_was_saved(capsys: pytest.CaptureFixture[str]) -> None:
    dry, first, resumed = commands_of_the_page("plain")
    assert run(["train", *shlex.split(f"{dry} {SMALL}")]) == 0
    assert "writes  runs/plain-letters-tiny-1\n" in capsys.readouterr().out
    assert not Path("runs").exists()

    folder = train(f"{first} {SMALL}")
    for step in (1, 2):
        rows = rollouts(folder, step)
        assert [row["advantage"] for row in rows] == pytest.approx([2 * row["reward"] for row in rows])
    before = untimed(folder)
    assert [row["step"] for row in before] == [1, 2]
    assert all(row["grad_norm"] > 0 for row in before)

    assert run(["train", *shlex.split(resumed)]) == 0
    whole = train(f"{first.replace('--name plain', '--name whole')} {SMALL} steps=4".replace("steps=2 ", ""))
    assert untimed(folder)[:2] == before
    assert [row["plain/advantage"] for row in metrics(folder)] == [
        pytest.approx(row["plain/advantage"]) for row in metrics(whole)
    ]


def test_a_verb_of_ones_own_answers_help_typos_and_lists_of_values(capsys: pytest.CaptureFixture[str]) -> None:
    commands_of_the_page("plain")
    plugins = "plugin=[./letters.py,./plain.py]"

    def said(line: str, exit_code: int = 0) -> str:
        assert run(shlex.split(line)) == exit_code
        captured = capsys.readouterr()
        return captured.out if exit_code == 0 else captured.err

    assert "plugin=FILE.py" in said("train plain steps=2", 2)
    assert "REINFORCE" in said(f"train plain {plugins} --help")
    assert "train plain?" in said(f"train plian {plugins}", 2)
    assert "scale?" in said(f"train plain {plugins} scael=2", 2)
    assert "advantage.estimator" in said(f"train plain {plugins} advantage.estimator=rloo", 2)
    assert "runs/both\n" in said(f"train plain {plugins} env=letters {SMALL} -m scale=1,2 --dry-run --name both")
    shown = json.loads(said(f"config show train plain {plugins} scale=3 --json"))
    assert (shown["verb"], shown["settings"]["scale"]) == ("train plain", 3.0)


def test_a_run_of_another_verb_is_not_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    _, first, _ = commands_of_the_page("plain")
    folder = train(f"{first} {SMALL} steps=1".replace("steps=2 ", ""))
    assert read_run(folder).verb == "train plain"
    capsys.readouterr()
    assert run(["train", "grpo", "--resume", str(folder), "plugin=[./letters.py]"]) == 2
    assert "rlpost train plain" in capsys.readouterr().err


def test_an_environment_of_ones_own_asks_and_scores() -> None:
    folder = train(f"grpo env=letters env.bonus=3 plugin=./letters.py {SMALL} --name env")
    for row in rollouts(folder, 1):
        assert re.search(" thing with [a-h][.]", row["prompt"])
        assert row["reward"] == pytest.approx(3 + sum(map(str.islower, row["completion"])) / 8)


def test_a_reward_of_ones_own_is_what_completions_earn() -> None:
    Path("short.py").write_text(REWARD)
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(20)))
    words = "env=dataset env.path=rows.jsonl env.reward=short plugin=./short.py"
    folder = train(f"grpo {words} {SMALL} --name reward")
    rows = rollouts(folder, 1)
    assert [row["reward"] for row in rows] == [-len(row["completion"]) for row in rows]
    assert len({row["reward"] for row in rows}) > 1


def test_a_tool_of_ones_own_answers_the_model() -> None:
    Path("atlas.py").write_text(TOOL)
    words = "env=letters plugin=[./letters.py,./atlas.py] tools.use=look_up env.max_turns=2 env.max_prompt_tokens=600"
    folder = train(f"grpo {words} {SMALL} --name described")
    assert all('"look_up"' in row["prompt"] for row in rollouts(folder, 1))
    replies = f"env.max_completion_tokens=100 policy=scripted 'policy.replies=[{json.dumps(CALL)},Lima]'"
    folder = train(f"grpo {words} {SMALL} {replies} --name called".replace("policy=transformers ", ""))
    assert [row["tools/calls_mean"] for row in metrics(folder)] == [0.5, 0.5]  # every other reply is a call
    assert sum("ureP" in str(row["turns"]) for row in rollouts(folder, 1)) == 4


def test_a_training_on_an_environment_of_ones_own_loads_nothing_of_torchrl() -> None:
    for _, name, text in BLOCK.findall((DOCS / "own-environment.md").read_text()):
        if name:
            Path(name).write_text(text)
    subprocess.run([sys.executable, "make_rows.py"], check=True)
    words = f"train grpo env=patient plugin=./patient.py {SMALL}"
    command = [sys.executable, "-c", TORCHRL_LOADED, *words.split()]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    assert printed.splitlines()[-1] == "0 []"
