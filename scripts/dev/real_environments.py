"""Other people's environments, each with its real package: `rlpost env test`, then three steps of the tiny model.

    scripts/dev/foreign FOLDER [openenv|textarena|verifiers|factory|reasoning_core ...] [--verifiers CHECKOUT]

The packages are installed in environments of their own under FOLDER, once. TextArena and reasoning-core run in
rlpost's process, so their environment sees rlpost's packages too; OpenEnv's server and verifiers have processes and
packages of their own. OpenEnv plays a guessing game and an echo of MCP tools, verifiers a taskset of sums written
here and, from a CHECKOUT of its repository, reverse-text on a few words. Prints a line for each environment and exits
with 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import site
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "beside": ["textarena==0.7.4", "reasoning-core==0.5.0"],
    "openenv": ["openenv==0.10.0"],
    "verifiers": ["verifiers==0.4.0", "datasets"],
}
SEES_RLPOST = ("beside",)
SECONDS = 900.0
SMALL = [
    "model=tiny",
    "policy=transformers",
    "steps=3",
    "prompts_per_step=2",
    "group_size=2",
    "env.max_completion_tokens=8",
    "env.eval_limit=2",
    "report.enabled=false",
]

OPENENV_SERVER = '''
import random
import sys
from uuid import uuid4

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Told(Observation):
    text: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.number, self._state = 0, State()

    def reset(self, seed=None, episode_id=None, **more):
        self.number = random.Random(seed).randint(1, 20)
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Told(text="Guess my number between 1 and 20.")

    def step(self, action, timeout_s=None, **more):
        self._state.step_count += 1
        if action.guess == self.number:
            return Told(text="Right.", reward=1.0, done=True)
        return Told(text="higher" if action.guess < self.number else "lower", reward=0.0, done=False)

    @property
    def state(self):
        return self._state


class Echo(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("echo")

        @tools.tool
        def echo_message(message: str) -> str:
            """Say the message again."""
            return message

        super().__init__(tools)
        self._state = State()

    def reset(self, seed=None, episode_id=None, **more):
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Observation(done=False, reward=0.0, metadata={"message": "ready"})

    def _step_impl(self, action, timeout_s=None, **more):
        return Observation(done=False, reward=0.0)

    @property
    def state(self):
        return self._state


kinds = {"game": (Game, Guess, Told), "echo": (Echo, CallToolAction, CallToolObservation)}
app = create_fastapi_app(*kinds[sys.argv[1]], max_concurrent_envs=32)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
'''
SUMS = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class Sum(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.reward(weight=0.1)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") < 20)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(40):
            yield SumTask(Sum(idx=number, prompt=f"{number} + 1 = ?", answer=str(number + 1)), self.config.task)
"""
COUNTER = '''
class Counter:
    """Counts to the number that a row asks for."""

    def reset(self, number: int, **row):
        self.number, self.count = number, 0
        return f"The count is 0. Reach {number}."

    def add(self, step: int) -> str:
        """Add to the count.

        Args:
            step: how much to add
        """
        self.count += step
        return f"The count is {self.count}."

    def get_reward(self) -> float:
        return 0.5 + 0.5 * (self.count == self.number)
'''


def main() -> int:
    """Play the chosen parts; the number of those that fail, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all unless some are named")
    parser.add_argument("--verifiers", type=Path, help="a checkout of verifiers' repository, for reverse-text")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    player = Player(asked.folder.resolve(), asked.verifiers)
    for part in asked.parts or PARTS:
        PARTS[part](player)
    return min(player.failed, 1)


class Player:
    """Installs packages under `folder`, and plays environments there."""

    def __init__(self, folder: Path, verifiers: Path | None) -> None:
        self.folder, self.verifiers, self.failed = folder, verifiers, 0
        self.work = folder / "work"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()

    def python(self, name: str) -> Path:
        """The interpreter of the environment `name`, with its packages installed."""
        home = self.folder / name
        python, stamp = home / "bin" / "python", home / "installed"
        wanted = " ".join(PACKAGES[name])
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(home, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", home], check=True)
            if name in SEES_RLPOST:
                [own] = (home / "lib").glob("python*/site-packages")
                (own / "rlpost.pth").write_text("\n".join(site.getsitepackages()) + "\n")
            subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[name]], check=True)
            stamp.write_text(wanted)
        return python

    def play(
        self,
        name: str,
        *words: str,
        python: str | Path = sys.executable,
        path: Path | None = None,
        rewards: tuple[float, ...] | None = None,
    ) -> None:
        """Test and train one environment; prints a line about it. `rewards` are those of each step, if known."""
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *([path] if path else [])]))}
        option = next(word.partition("=")[2] for word in words if word.startswith("env="))
        tested = [
            python,
            "-m",
            "rlpost",
            "env",
            "test",
            option,
            *(w for w in words if not w.startswith("env=")),
            "env.limit=8",
        ]
        trained = [python, "-m", "rlpost", "train", "grpo", *words, *SMALL, "--name", name]
        for what, command in (("env test", tested), ("train", trained)):
            done = subprocess.run(command, cwd=self.work, env=env, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode:
                print(f"FAILED {name}: {what} ended with {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
                self.failed += 1
                return
        lines = (self.work / "runs" / name / "metrics.jsonl").read_text().splitlines()
        steps = [line for line in map(json.loads, lines) if "reward/mean" in line]
        failed = sum(line.get("reward/failed", 0) for line in steps)
        means = tuple(round(line["reward/mean"], 3) for line in steps)
        if len(steps) != 3 or failed or (rewards is not None and means != rewards):
            print(f"FAILED {name}: rewards {means}, not {rewards}; {failed} failed")
            self.failed += 1
        else:
            print(f"ok {name}: reward {list(means)}", flush=True)


# The parts


def openenv(player: Player) -> None:
    """A guessing game, and tools that echo."""
    python = player.python("openenv")
    (player.work / "server.py").write_text(OPENENV_SERVER)
    for kind in ("game", "echo"):
        with served([str(python), "server.py", kind], player.work) as port:
            player.play(f"openenv-{kind}", "env=openenv", f"env.url=ws://127.0.0.1:{port}", "env.max_turns=3")


def textarena(player: Player) -> None:
    """Three games for one player."""
    python = player.python("beside")
    for game in ("GuessTheNumber-v0", "2048-v0", "Mastermind-v0"):
        words = [f"env.id={game}", "env.max_turns=3", "env.max_prompt_tokens=2048"]
        player.play(f"textarena-{game}", "env=textarena", *words, python=python)


def verifiers(player: Player) -> None:
    """A taskset of sums and, from a checkout, reverse-text on a few words."""
    python = player.python("verifiers")
    (player.work / "sums.py").write_text(SUMS)
    own = [f"env.python={python}", "env.max_prompt_tokens=1024"]
    player.play("verifiers-sums", "env=verifiers", "env.id=sums", *own, path=player.work)
    if player.verifiers is None:
        print("skipped verifiers-reverse-text: give --verifiers CHECKOUT of its repository")
        return
    words = player.work / "words"
    words.mkdir()
    rows = [{"prompt": " ".join(["one two three", "red green", "left right up"][n % 3 :]) + f" {n}"} for n in range(40)]
    (words / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    player.play(
        "verifiers-reverse-text",
        "env=verifiers",
        "env.id=reverse-text",
        f"env.args={{dataset_name: {words}}}",
        *own,
        path=player.verifiers / "environments" / "reverse_text",
    )


def factory(player: Player) -> None:
    """A class as TRL takes it."""
    (player.work / "counter.py").write_text(COUNTER)
    rows = [{"prompt": f"Counter {n}.", "number": n % 5 + 1} for n in range(40)]
    (player.work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["env.factory=counter.py:Counter", "env.path=rows.jsonl", "env.max_turns=3"]
    player.play("factory", "env=factory", *words, rewards=(0.5, 0.5, 0.5))  # the tiny model calls nothing


def reasoning_core(player: Player) -> None:
    """Problems of one generator."""
    player.play("reasoning-core", "env=reasoning_core", "env.task=arithmetics", python=player.python("beside"))


PARTS: dict[str, Callable[[Player], None]] = {
    "openenv": openenv,
    "textarena": textarena,
    "verifiers": verifiers,
    "factory": factory,
    "reasoning_core": reasoning_core,
}


@contextmanager
def served(command: list[str], folder: Path) -> Iterator[int]:
    """A block in which the server of `command` listens; yields its port, which `command` gets as last argument."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen([*command, str(port)], cwd=folder) as server:
        try:
            for _ in range(600):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                if server.poll() is not None:
                    raise SystemExit(f"the server {' '.join(command)} ended with {server.returncode}")
                time.sleep(0.1)
            yield port
        finally:
            server.terminate()


if __name__ == "__main__":
    sys.exit(main())
