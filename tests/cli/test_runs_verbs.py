"""`rlpost runs`: what is listed, shown and followed."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlpost.cli import views
from rlpost.files import MANIFEST
from rlpost.record import BEGAN, FAILED, STOPPED
from tests.command_line import CommandLine
from tests.run_folders import add_checkpoint, evaluation, make_run, step_row, verdict
from tests.says import Says

ROWS = [{"step": 0, **evaluation(0.1, 0.0, 0.2)}, step_row(1, 0.25), step_row(2, 0.75, **evaluation(0.58, 0.5, 0.7))]


def test_a_list_has_a_line_for_each_run(rlpost: CommandLine) -> None:
    make_run(Path("runs/first"), ROWS)
    failed = verdict(BEGAN) + verdict(f"{FAILED} DivergedError: no")
    make_run(Path("runs/second"), ROWS[:2], log=failed, overrides=["model.path=Qwen/Qwen3-0.6B", "env=gsm8k"])
    for file in Path("runs/first").iterdir():
        os.utime(file, (time.time() - 7300, time.time() - 7300))
    lines = [line.split() for line in rlpost.lines("runs list")]
    assert lines[0] == ["run", "state", "steps", "reward", "held-out", "age", "model", "env"]
    assert lines[1][:5] == ["second", "failed", "1/2", "0.25", "10→-%"]
    assert lines[2] == ["first", "finished", "2/2", "0.75", "10→58%", "±12", "n=50", "2h", "tiny", "arithmetic"]


def test_a_list_shows_the_reward_of_a_run_whose_accuracy_stays_0(rlpost: CommandLine) -> None:
    measured = [{**evaluation(0.0, 0.0, 0.1), "eval/reward": reward} for reward in (0.0, 0.41)]
    make_run(Path("runs/own"), [{"step": 0, **measured[0]}, step_row(2, 0.41, **measured[1])])
    assert rlpost.lines("runs list")[1].split()[4:6] == ["0.00→0.41", "n=50"]


def test_a_default_name_and_all_columns_fit_80(rlpost: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "output_width", lambda piped: 80)
    make_run(Path("runs/grpo-arithmetic-smollm2-12"), ROWS, overrides=["model=smollm2"])
    heading, line = rlpost.lines("runs list")
    assert max(len(heading), len(line)) <= 80
    assert line.split()[0] == "grpo-arithmetic-smollm2-12"
    assert line.split()[-1].startswith("arit")


def test_a_list_as_json(rlpost: CommandLine, says: Says) -> None:
    make_run(Path("runs/a"), ROWS)
    [entry] = rlpost.json("runs list")
    assert (entry["steps_done"], entry["reward"]) == (2, 0.75)
    assert entry["accuracy_after"] == {"value": 0.58, "low": 0.5, "high": 0.7, "prompts": 50}
    del entry["updated"]
    says("runs", json.dumps(entry, indent=1))


def test_no_runs_is_said_and_no_error(rlpost: CommandLine, says: Says) -> None:
    assert rlpost("runs list") == ""
    says("runs", rlpost.err)
    assert rlpost.json("runs list") == []
    says("runs", rlpost.refused("runs list nowhere"))


def test_show_says_what_was_asked_and_what_came_of_it(rlpost: CommandLine, says: Says) -> None:
    add_checkpoint(make_run(Path("runs/a"), ROWS), 2)
    about, _, shown = rlpost("runs show").partition("\n")
    assert about.startswith("a  finished, step 2/2, ")  # and its age
    assert re.search(r"(?m)^reward +0\.25 -> 0\.75 ", shown)
    assert re.search(r"(?m)^held-out .* 10\.0% \[0\.0%, 20\.0%\] +-> +58\.0% \[50\.0%, 70\.0%\]$", shown)
    says("runs", shown)


def test_show_splits_the_time_and_gives_first_and_last_of_each_figure(rlpost: CommandLine, says: Says) -> None:
    first = {"completion/truncated": 0.5, "entropy": 1.5, "sampler/logprob_gap": 0.02, "groups/zero_std": 1.0}
    last = {"completion/truncated": 0.1, "entropy": 0.5, "sampler/logprob_gap": 0.01, "groups/zero_std": 0.25}
    make_run(Path("runs/a"), [step_row(1, 0.25, **first), step_row(2, 0.75, **last)])
    _, _, shown = rlpost("runs show a").partition("\n")
    for name, change in {
        "truncated": "50% -> 10%",
        "entropy": "1.50 -> 0.50",
        "gap": "0.020 -> 0.010",
        "no spread": "100% -> 25%",
        "time": "rollout 50%, train 25%, rest 25% ",
    }.items():
        assert re.search(rf"(?m)^ *{name} +{change}", shown)
    says("runs", shown)


def test_show_says_what_is_missing_and_hides_nothing_of_a_failure(rlpost: CommandLine, says: Says) -> None:
    run = make_run(Path("a"), log=verdict(f"{FAILED} DataError: row 3 \x1b[2J"))
    for name in ("environment.json", "config.yaml", "command.txt"):
        (run / name).unlink()
    (run / "metrics.jsonl").write_text('{"step": 1, "rew')
    about, _, shown = rlpost("runs show ./a").partition("\n")
    assert about.startswith("a  failed, step 0/?, ")
    assert "DataError: row 3 \\x1b[2J" in shown
    assert "\x1b" not in shown
    says("runs", shown)


def test_show_gives_the_command_that_goes_on(rlpost: CommandLine) -> None:
    def goes_on(name: str) -> str:
        [line] = [line for line in rlpost.lines(["runs", "show", name]) if line.startswith("go on ")]
        return line.removeprefix("go on ").strip()

    run = make_run(Path("runs/a"), log=verdict(f"{FAILED} DataError: row 3"))
    (run / "command.txt").write_text("rlpost train grpo model=tiny --name a\n")
    assert goes_on("a").endswith("--resume auto")  # the name stands in the command
    run = make_run(Path("a b"), log=verdict(STOPPED))
    manifest = add_checkpoint(run, 2) / MANIFEST
    manifest.rename("kept")
    assert "--resume auto" in goes_on("./a b")  # a checkpoint that is not whole is no place to go on from
    Path("kept").rename(manifest)
    assert goes_on("./a b").endswith(" --resume 'a b'")


def test_show_as_json_holds_the_metrics(rlpost: CommandLine) -> None:
    make_run(Path("runs/a"), ROWS)
    details = rlpost.json("runs show a")
    assert details["metrics"] == ROWS
    assert (details["overrides"], details["config"]["seed"]) == (["model=tiny"], 7)


def test_show_lines_prints_steps_as_training_does(rlpost: CommandLine, says: Says) -> None:
    make_run(Path("runs/a"), ROWS, steps=3)
    says("runs", rlpost("runs show a --lines 9"))
    [last] = rlpost.lines("runs show a --lines 1 --json")
    assert json.loads(last) == ROWS[-1]


def test_a_reward_of_ones_own_is_shown_with_its_interval(rlpost: CommandLine) -> None:
    before = {"eval/prompts": 4.0, "eval/reward": 0.221, "eval/reward_low": 0.1, "eval/reward_high": 0.342}
    after = {"eval/prompts": 4.0, "eval/reward": 0.406, "eval/reward_low": 0.2, "eval/reward_high": 0.612}
    make_run(Path("runs/a"), [{"step": 0, **before}, step_row(1, 0.3), step_row(2, 0.4, **after)])
    shown = rlpost("runs show a")
    assert "0.221 [0.100, 0.342]  ->  0.406 [0.200, 0.612]\n" in shown
    assert ", on 4 prompts, 95% " in shown
    assert " 0.22→0.41 ±0.21 n=4 " in rlpost("runs list")


def test_show_lines_of_a_value_that_was_not_finite_and_of_no_steps(rlpost: CommandLine) -> None:
    make_run(Path("runs/a"), [step_row(1, None)])
    make_run(Path("runs/b"))
    assert rlpost("runs show a --lines 9").startswith("step 1/2  ")
    assert rlpost("runs show b --lines 9") == ""
    assert rlpost.err.startswith("runs/b: ")


def test_following_prints_new_steps_until_the_lock_is_let_go(
    rlpost: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(Path("runs/a"), ROWS[:2], log=verdict(BEGAN))
    lock = (run / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def train(seconds: float) -> None:  # while the steps that were there have been read
        with (run / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps(ROWS[2]) + "\n")
        lock.close()

    monkeypatch.setattr("rlpost.cli.runs.time", SimpleNamespace(sleep=train))
    *_, step, _ = rlpost.lines("runs show a -f --lines 0")
    assert step.startswith("step 2/2  reward 0.75")
    assert rlpost.err == "runs/a: killed\n"


def test_ctrl_c_leaves_a_followed_run_quietly() -> None:
    run = make_run(Path("runs/a"), ROWS)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "rlpost", "runs", "show", "a", "-f"]
        following = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's "&" ignores it
        )
        assert following.stdout is not None
        following.stdout.readline()  # it has begun
        following.send_signal(signal.SIGINT)
        _, errors = following.communicate(timeout=120)
    assert (following.returncode, errors) == (130, "")


def test_reading_runs_imports_nothing_heavy() -> None:
    make_run(Path("runs/a"), ROWS)
    program = (
        "import sys\n"
        "from rlpost.cli.main import run\n"
        "codes = [run(words.split()) for words in ('runs list', 'runs show a', 'runs show a --lines 9')]\n"
        "print(codes, [m for m in ('torch', 'transformers', 'pyarrow', 'hydra') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0] []"


def test_the_help_of_show_explains_the_words_of_its_lines(rlpost: CommandLine) -> None:
    shown = rlpost("runs show --help")
    assert re.search(r"(?m)^    lag +\w", shown)
