"""Five files as people have them, each from nothing to a trained model by following only what rlpost says.

    Alpaca as one JSON list · ShareGPT, some of whose rows are broken · a spreadsheet as CSV with semicolons, to train
    on with a reward · a Parquet of many rows · an export of chats with tools

The first command is `rlpost train sft FILE model=tiny steps=2`, or `train grpo` for the spreadsheet. Where it ends with
an error, the next one has what the error says to write in it, and values that the owner of the file knows for settings
that the error names. A line for each file says what it came to: the exit code, the seconds from the start of the last
command to its first step, the most memory (RSS) that its processes held, and the command. The Parquet is tried with ten
rows too: many may take 60 s to their first step, and 1.5 GB more than ten. Exits with 1 where a file does not
train, or the many rows take more.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
ROWS = 200  # of each file but the Parquet
MOST_COMMANDS = 8  # for one file
DEADLINE = 900.0  # seconds for one command
LOOK_EVERY = 0.1  # seconds between two looks at the memory
MOST_SECONDS, MOST_BYTES = 60.0, 1.5e9  # that many rows may take to start, and more than ten rows
SETTING = r"[a-z_]+(?:\.[a-z_]+)*=\S*[^\s,.;:?]"


@dataclass(frozen=True)
class File:
    """A file, how it comes to be, what is trained on it, and what its owner knows of it: settings and values."""

    name: str
    write: Callable[[Path], None]
    command: str = "train sft"
    known: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a command came to; `first_step` is in seconds from its start, None where there was none."""

    exit_code: int
    said: str
    first_step: float | None
    peak: int  # bytes

    @property
    def has_trained(self) -> bool:
        """Whether it ended well and did a step."""
        return self.exit_code == 0 and self.first_step is not None


def alpaca(path: Path) -> None:
    """One list; every second row has an input."""
    rows = [
        {"instruction": f"Add one to {n}.", "input": "Be brief." if n % 2 else "", "output": str(n + 1)}
        for n in range(ROWS)
    ]
    path.write_text(json.dumps(rows, indent=1))


def share_gpt(path: Path) -> None:
    """Every fifth row is broken: a line cut off, a chat without messages, or a speaker nobody knows."""
    lines = []
    for n in range(ROWS):
        said = [("system", "Be kind."), ("human", f"Hello, I am number {n}."), ("gpt", f"Hello, number {n}!")]
        row = {"id": n, "conversations": [{"from": who, "value": text} for who, text in said]}
        if n % 15 == 9:
            row["conversations"] = []
        elif n % 15 == 14:
            row["conversations"][1]["from"] = "narrator"
        line = json.dumps(row)
        lines.append(line[: len(line) // 2] if n % 15 == 4 else line)
    path.write_text("\n".join(lines) + "\n")


def spreadsheet(path: Path) -> None:
    """With a byte order mark, carriage returns, and commas and line breaks inside of quoted cells."""
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        sheet = csv.writer(file, delimiter=";")
        sheet.writerow(["No.", "Question", "Answer"])
        sheet.writerows([n, f"Ann, who has {n} pears; buys 1.\nHow many are they?", n + 1] for n in range(ROWS))


def parquet(count: int) -> Callable[[Path], None]:
    """Prompts and completions of some 50 to 300 characters, each row another one."""

    def write(path: Path) -> None:
        schema = pa.schema([("prompt", pa.string()), ("completion", pa.string())])
        with pq.ParquetWriter(path, schema) as file:
            for start in range(0, count, 50_000):
                numbers = range(start, min(count, start + 50_000))
                prompts = [f"What comes after {n}? Say it in {n % 9 + 1} sentences." for n in numbers]
                completions = [" ".join([f"After {n} comes {n + 1}."] * (n % 9 + 1)) for n in numbers]
                file.write_table(pa.table({"prompt": prompts, "completion": completions}, schema=schema))

    return write


def chats_with_tools(path: Path) -> None:
    """As OpenAI's API has them: a call with its arguments as text, the tool's result, and an answer."""
    numbers = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
    add = {"name": "add", "description": "Adds two numbers.", "parameters": numbers}
    rows = []
    for n in range(ROWS):
        called = {"name": "add", "arguments": json.dumps({"a": n, "b": 1})}
        call = {"id": f"call_{n}", "type": "function", "function": called}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"What is {n} + 1?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": str(n + 1)},
            {"role": "assistant", "content": f"It is {n + 1}."},
        ]
        rows.append({"messages": messages, "tools": [{"type": "function", "function": add}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def files(count: int) -> list[File]:
    """The five, the Parquet twice: with ten rows and with `count`."""
    reward = {"env.reward": "number", "env.prompt_column": "Question", "env.answer_column": "Answer"}
    return [
        File("alpaca.json", alpaca),
        File("sharegpt.jsonl", share_gpt, known={"max_bad_share": "0.25"}),
        File("sheet.csv", spreadsheet, "train grpo", reward),
        File("ten.parquet", parquet(10)),
        File("many.parquet", parquet(count)),
        File("tools.jsonl", chats_with_tools),
    ]


def advised(said: str, words: Sequence[str], known: Mapping[str, str]) -> list[str] | None:
    """`words` with what an error says to write, and what is known of settings that it names; None where that is all."""
    meant = re.search(rf"error: (\S+) is not a setting.* did you mean ({SETTING}(?: {SETTING})*)\?", said)
    if meant and meant[1] in words:
        place = words.index(meant[1])
        return [*words[:place], *meant[2].split(), *words[place + 1 :]]
    given = {word.partition("=")[0] for word in words}
    more = [f"{key}={value}" for key, value in known.items() if key in said and key not in given]
    if not more:
        more = [word for word in re.findall(rf"\badd ({SETTING})", said)[:1] if word.partition("=")[0] not in given]
    return [*words, *more] if more else None


def resident(pid: int) -> int:
    """Bytes of RSS of a process and all below it; 0 where one of them has just ended."""
    try:
        top = psutil.Process(pid)
        return sum(process.memory_info().rss for process in [top, *top.children(recursive=True)])
    except psutil.NoSuchProcess:
        return 0


def tried(words: Sequence[str], folder: Path) -> Outcome:
    """What `rlpost` comes to with these words in a folder; it is killed after `DEADLINE` seconds."""
    cache = {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "rlpost", *words],
        cwd=folder,
        env=os.environ | cache,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_EVERY):
            peak[0] = max(peak[0], resident(process.pid))

    watcher, deadline = threading.Thread(target=watch), threading.Timer(DEADLINE, process.kill)
    watcher.start()
    deadline.start()
    said, first_step = [], None
    for line in process.stdout:
        said.append(line)
        if first_step is None and line.startswith("step 1/"):
            first_step = time.monotonic() - began
    code = process.wait()
    deadline.cancel()
    ended.set()
    watcher.join()
    return Outcome(code, "".join(said), first_step, peak[0])


def trained(file: File, folder: Path) -> Outcome:
    """Train on a file, one command after the other, and print what it came to."""
    file.write(folder / file.name)
    more = ["policy=transformers"] if file.command == "train grpo" else []  # the tiny model needs no vLLM
    words = [*file.command.split(), file.name, "model=tiny", *more, "steps=2"]
    outcome, count = tried(words, folder), 1
    while outcome.exit_code and count < MOST_COMMANDS and (following := advised(outcome.said, words, file.known)):
        words, count = following, count + 1
        outcome = tried(words, folder)
    step = "no step" if outcome.first_step is None else f"step 1 after {outcome.first_step:4.1f} s"
    held = f"{outcome.peak / 1e9:.2f} GB"
    print(
        f"{file.name:<14}  exit {outcome.exit_code}  {step}  {held}  command {count}: rlpost {' '.join(words)}",
        flush=True,
    )
    if not outcome.has_trained:
        print("".join(f"    {line}\n" for line in outcome.said.splitlines()[-20:]), flush=True)
    return outcome


def main(arguments: Sequence[str]) -> int:
    """Returns 0 where every file is trained on, and many rows take no more than they may."""
    parser = argparse.ArgumentParser(
        prog="scripts/dev/five_files", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000, metavar="N", help="of the Parquet (1000000)")
    options = parser.parse_args(arguments)
    outcomes = {}
    for file in files(options.rows):
        with tempfile.TemporaryDirectory(prefix="five_files-") as folder:
            outcomes[file.name] = trained(file, Path(folder))
    all_train = all(outcome.has_trained for outcome in outcomes.values())
    ten, many = outcomes["ten.parquet"], outcomes["many.parquet"]
    if ten.first_step is None or many.first_step is None:
        return 1
    more = many.peak - ten.peak
    is_within = many.first_step <= MOST_SECONDS and more <= MOST_BYTES
    print(
        f"{options.rows:,} rows start in {many.first_step:.1f} s, {many.first_step - ten.first_step:+.1f} s and "
        f"{more / 1e9:+.2f} GB beside ten: {'within' if is_within else 'MORE THAN'} {MOST_SECONDS:.0f} s and "
        f"{MOST_BYTES / 1e9:.1f} GB more"
    )
    return 0 if all_train and is_within else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
