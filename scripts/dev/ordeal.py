"""Ordeals of whole trainings, as their own processes: kills with -9, and things that break beside them.

    scripts/dev/ordeal kills     each kind of training, killed at random moments and resumed, against one unbroken
    scripts/dev/ordeal chaos     small trainings with one thing killed, stopped or filled at a random moment
    scripts/dev/ordeal resume    each kind, begun by the checkout --before, killed, and resumed by both codes

What is done is written to OUT/results.json and not done again: the command can be stopped and goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
from safetensors.torch import load_file

SUMS = [
    "model=tiny",
    "env.digits=1",
    "env.max_completion_tokens=8",
    "eval.every=10",
    "eval.limit=8",
    "checkpoint.every=3",
]
REWARDED = [  # a random model earns something, so that weights move
    *["model=tiny", "env=dataset", "env.path=OUT/rows.jsonl", "env.reward=OUT/mine.py:score"],
    *["env.max_completion_tokens=8", "eval.every=10", "eval.limit=8", "checkpoint.every=3"],
]
SAMPLED = [*REWARDED, "policy=transformers", "prompts_per_step=2", "group_size=4", "steps=30", "optim.lr=1e-3"]
TUNED = [*SUMS[:1], "eval.every=10", "eval.limit=8", "checkpoint.every=3"]
KINDS: dict[str, list[str]] = {
    "grpo": ["grpo", *SAMPLED, "deterministic=true"],
    "tools": [
        *["grpo", *SAMPLED, "deterministic=true", "dynamic.enabled=true", "dynamic.draw_limit=500"],
        *["plugin=OUT/echo.py", "tools.use=[echo]", "env.max_turns=2"],
        *["env.max_prompt_tokens=400", "env.max_completion_tokens=80"],
    ],
    "patience": ["grpo", *SAMPLED, "deterministic=true", "plugin=OUT/patience.py", "steps=200"],
    "lora": ["grpo", *SAMPLED, "deterministic=true", "lora.enabled=true"],
    "sft": ["sft", *SUMS, "steps=30", "minibatch_size=4", "deterministic=true"],
    "dpo": ["dpo", *TUNED, "env.path=OUT/pairs.jsonl", "steps=30", "minibatch_size=4", "deterministic=true"],
    "distill": [
        "distill",
        *SAMPLED,
        "deterministic=true",
        "hint={question} equals {answer}.",
        "env.max_prompt_tokens=400",
    ],
    "async": ["grpo", *SAMPLED, "collector=async", "eval.enabled=false"],
    "vllm": ["grpo", *SAMPLED, "policy=vllm", "eval.enabled=false", "steps=400"],  # longer than its start takes
    "expert": ["expert-iteration", *SAMPLED, "deterministic=true", "min_reward=null"],
}
ECHO = """
from rlpost import register_tool
from rlpost.envs.base import ToolCall, ToolResult, ToolTransform


class Echo(ToolTransform):
    def schemas(self):
        parameters = {"type": "object", "properties": {}}
        return [{"type": "function", "function": {"name": "echo", "description": "Echo.", "parameters": parameters}}]

    def calls_in(self, reply):  # every reply: a model of random weights calls no tool
        return [ToolCall("echo", {}, 0)]

    def call(self, conversation, call):
        return ToolResult(f"{len(conversation.response_text)} characters")


register_tool("echo", Echo)
"""
PATIENCE = """
import rlpost


class Patience:
    def __init__(self, run):
        self.run, self.best, self.waited = run, -1.0, 0

    def on_step(self, step):
        reward = step.metrics["reward/mean"]
        self.waited = 0 if reward > self.best else self.waited + 1
        self.best = max(self.best, reward)
        step.metrics["patience/waited"] = float(self.waited)
        if self.waited == 20:
            self.run.stop("no better reward in 20 steps")

    def state(self):
        return [self.best, self.waited]

    def restore(self, state):
        self.best, self.waited = state


rlpost.register_watcher("patience", Patience)
"""
TIMED = ("time/", "memory/")
KNOWN_EXITS = {0, 2, 3, 4, 5, 129, 130, 143}
DEADLINE = 240.0  # seconds for a small training to end by itself, whatever was broken


class Results:
    """What was found, kept in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.all: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}

    def add(self, name: str, found: Any) -> None:
        self.all[name] = found
        self.file.write_text(json.dumps(self.all, indent=1) + "\n")
        print(f"{name}: {json.dumps(found)}", flush=True)


def start(
    words: Sequence[str],
    out: Path,
    *,
    resume: bool = False,
    before: Callable[[], None] | None = None,
    code: Path | None = None,
) -> subprocess.Popen[bytes]:
    """A training in a process of its own that does `before` first; what it says goes beside its folder.

    It runs the rlpost of the checkout `code`, or this one.
    """
    command = [sys.executable, "-P", "-m", "rlpost", "train", *words, "--out", str(out), "--plain"]
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f"{out.name}.log").open("ab") as log:
        command += ["--resume", "auto"] if resume else []
        environment = os.environ | ({} if code is None else {"PYTHONPATH": str(code)})
        return subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, preexec_fn=before, env=environment
        )


def kills(words: Sequence[str], folder: Path, count: int, chance: random.Random) -> dict[str, Any]:
    """One training unbroken, and one that is killed `count` times and resumed: are they the same?"""
    shutil.rmtree(folder, ignore_errors=True)
    whole, broken = folder / "whole", folder / "broken"
    began = time.monotonic()
    if (code := start(words, whole).wait()) != 0:
        return {"equal": False, "why": f"the unbroken run ended with {code}"}
    length = time.monotonic() - began
    at: list[float] = []
    while len(at) < count:
        running = start(words, broken, resume=bool(at))
        moment = chance.uniform(0.3, length)
        try:
            running.wait(moment)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
            at.append(round(moment, 1))
        else:  # it was done before that, and the next attempt would find nothing left to do: it is begun anew
            shutil.rmtree(broken)
    code = start(words, broken, resume=True).wait()
    same = compared(whole, broken) if "deterministic=true" in words else {"equal": drawn(whole) == drawn(broken)}
    return {"kills": at, "exit": code, **same}


def drawn(run: Path) -> list[list[Any]]:
    """Of each step, the prompts that were trained on and which sample of which draw each is."""
    columns = ["step", "group", "sample", "prompt"]
    return [pq.read_table(file, columns=columns).to_pylist() for file in sorted((run / "rollouts").glob("*.parquet"))]


def compared(whole: Path, broken: Path) -> dict[str, Any]:
    """Whether two runs have the same figures, rollouts and weights."""
    figures = rows_of(whole) == rows_of(broken)
    names = [sorted(f.name for f in (run / "rollouts").glob("*.parquet")) for run in (whole, broken)]
    tables = names[0] == names[1] and all(
        pq.read_table(whole / "rollouts" / n).equals(pq.read_table(broken / "rollouts" / n)) for n in names[0]
    )
    weights = [load_file(next((run / "checkpoints/latest/model").glob("*.safetensors"))) for run in (whole, broken)]
    same = weights[0].keys() == weights[1].keys() and all(weights[0][k].equal(weights[1][k]) for k in weights[0])
    return {"equal": figures and tables and same, "figures": figures, "rollouts": tables, "weights": same}


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times and memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines]


def resumed_by_both(words: Sequence[str], folder: Path, before: Path) -> dict[str, Any]:
    """A training that the code of `before` began and that was killed after step 6, resumed by that code and by this."""
    shutil.rmtree(folder, ignore_errors=True)
    begun, old, new = folder / "begun", folder / "old", folder / "new"
    running, deadline = start(words, begun, code=before), time.monotonic() + DEADLINE
    while not (begun / "checkpoints/step-000006").is_dir() and time.monotonic() < deadline:
        time.sleep(0.02)
    running.kill()
    running.wait()
    for copy in (old, new):
        shutil.copytree(begun, copy, symlinks=True)
    codes = [start(words, old, resume=True, code=before).wait(), start(words, new, resume=True).wait()]
    killed_after = max(row["step"] for row in rows_of(begun))
    if "deterministic=true" in words:
        return {"killed after": killed_after, "exits": codes, **compared(old, new)}
    versions = [row["policy/version"] for row in rows_of(new)]
    steps = [row["step"] for row in rows_of(new)]
    continued = all(0 <= b - a <= 1 for a, b in pairwise(versions))
    whole = steps == list(range(1, len(steps) + 1)) and accounted(new)
    return {"killed after": killed_after, "exits": codes, "equal": continued and whole, "versions": versions[-1]}


# Chaos


def below(pid: int, word: str) -> list[psutil.Process]:
    """The processes below `pid` whose command holds `word`."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if word in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def signalled(word: str, number: signal.Signals) -> Callable[[int, Path], None]:
    def act(pid: int, run: Path) -> None:
        for process in below(pid, word) if word else [psutil.Process(pid)]:
            process.send_signal(number)

    return act


def pause(pid: int, run: Path) -> None:
    """Stop everything for some seconds, as a laptop that is closed."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in processes:
        process.suspend()
    time.sleep(5)
    for process in processes:
        process.resume()


def lose_rollouts(pid: int, run: Path) -> None:
    shutil.rmtree(run / "rollouts", ignore_errors=True)


def small_files() -> None:
    """Let no file grow beyond 100 kB, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


BREAKS: dict[str, Callable[[int, Path], None]] = {
    "kill the reward's process": signalled("rewards.calls", signal.SIGKILL),
    "stop the reward's process": signalled("rewards.calls", signal.SIGSTOP),
    "ask the run to stop": signalled("", signal.SIGTERM),
    "close the terminal": signalled("", signal.SIGHUP),
    "stop everything for a while": pause,
    "remove the rollouts": lose_rollouts,
    "kill the player": signalled("the process that samples", signal.SIGKILL),
}


def write_rewarded(folder: Path) -> None:
    """Rows and a reward that random replies earn too."""
    (folder / "mine.py").write_text("def score(completions, **kept):\n    return [len(c) % 3.0 for c in completions]\n")
    rows = [{"question": f"Say {n}.", "answer": f"{n}"} for n in range(60)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def chaos(number: int, folder: Path, chance: random.Random) -> dict[str, Any]:
    """One small training with one thing broken: does it end by itself, by name?"""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_rewarded(folder)
    name, moment = [*BREAKS, "a full disk"][number % (len(BREAKS) + 1)], chance.uniform(5, 14)
    found: dict[str, Any] = {"broke": name, "at": round(moment, 1)}
    words = [*SAMPLED[:1], "policy=transformers", "env=dataset", f"env.path={folder}/rows.jsonl"]
    words += [
        f"env.reward={folder}/mine.py:score",
        "env.reward_timeout_seconds=3",
        "prompts_per_step=2",
        "group_size=4",
    ]
    words += ["env.max_completion_tokens=8", "steps=400", "checkpoint.every=5", "eval.enabled=false"]
    if name == "kill the player" or number // (len(BREAKS) + 1) % 2:
        words += ["collector=async"]
        found["collector"] = "async"
    running = start(["grpo", *words], folder / "run", before=small_files if name == "a full disk" else None)
    began = time.monotonic()
    try:
        running.wait(moment)
        found["early"] = True
    except subprocess.TimeoutExpired:
        if name in BREAKS:
            BREAKS[name](running.pid, folder / "run")
    try:
        code = running.wait(DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        return found | {"ended": False}
    said = (folder / "run.log").read_text(errors="replace").strip().splitlines()
    time.sleep(4)
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]
    named = code == 0 or any(line.startswith(("error:", "stopped", "stopping")) for line in said[-30:])
    found["accounted"] = accounted(folder / "run")
    good = code in KNOWN_EXITS and named and not left and found["accounted"] and "Traceback" not in "\n".join(said)
    return found | {"ended": True, "exit": code, "seconds": round(time.monotonic() - began), "left": left, "good": good}


def accounted(run: Path) -> bool:
    """Whether each step trained on what it should, and each group that was issued beside it is in one place."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    places = [f"groups/{name}" for name in ("trained", "turned_down", "cancelled", "failed", "waiting")]
    for step, row in enumerate(rows, 1):
        if row["step"] != step:
            return False
        if "groups/issued" in row and row["groups/issued"] != sum(row[place] for place in places):
            return False
    return True


def main() -> int:
    """Run what was asked for; 1 where something was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ordeal", choices=["kills", "chaos", "resume"])
    parser.add_argument("--out", type=Path, default=Path("runs/ordeal"), help="where the trainings and results go")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of trainings that are killed")
    parser.add_argument("--count", type=int, default=None, help="kills of each (12), or trainings of chaos (30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--before", type=Path, help="a checkout whose rlpost begins the trainings (resume)")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    results = Results(asked.out / "results.json")
    if asked.ordeal in ("kills", "resume"):
        (asked.out / "echo.py").write_text(ECHO)
        (asked.out / "patience.py").write_text(PATIENCE)
        pairs = [{"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": "No idea."} for n in range(60)]
        (asked.out / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        write_rewarded(asked.out)
        names = [f"{asked.ordeal} {kind}" for kind in asked.kinds.split(",")]
        for name in [name for name in names if name not in results.all]:
            kind = name.partition(" ")[2]
            chance = random.Random(f"{asked.seed} {kind}")
            words = [word.replace("OUT", str(asked.out)) for word in KINDS[kind]]
            if asked.ordeal == "resume":
                results.add(name, resumed_by_both(words, asked.out / kind, asked.before))
            else:
                results.add(name, kills(words, asked.out / kind, asked.count or 12, chance))
        return int(not all(results.all[name]["equal"] for name in names))
    names = [f"chaos {number}" for number in range(asked.count or 30)]
    for number, name in enumerate(names):
        if name not in results.all:
            chance = random.Random(f"{asked.seed} {number}")
            results.add(name, chaos(number, asked.out / f"chaos-{number}", chance))
    return int(not all(results.all[name].get("good") for name in names))


if __name__ == "__main__":
    sys.exit(main())
