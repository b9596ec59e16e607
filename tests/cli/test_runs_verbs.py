"""`rlpost runs`: what is listed, shown and followed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlpost.cli import runs
from rlpost.cli.main import run as rlpost
from rlpost.record import BEGAN, FAILED, STOPPED
from tests.run_folders import evaluation, make_run, step_row, verdict

ROWS = [{"step": 0, **evaluation(0.1, 0.0, 0.2)}, step_row(1, 0.25), step_row(2, 0.75, **evaluation(0.58, 0.5, 0.7))]


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_list_has_a_line_for_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/first"), ROWS)
    failed = verdict(BEGAN) + verdict(f"{FAILED} DivergedError: no")
    make_run(Path("runs/second"), ROWS[:2], log=failed, overrides=["model.path=Qwen/Qwen3-0.6B", "env=gsm8k"])
    for file in Path("runs/first").iterdir():
        os.utime(file, (time.time() - 7300, time.time() - 7300))
    assert rlpost(["runs", "list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["run", "state", "steps", "reward", "held-out", "age", "model", "env"]
    assert lines[1][:5] == ["second", "failed", "1/2", "0.25", "10→-%"]
    assert lines[2] == ["first", "finished", "2/2", "0.75", "10→58%", "±12", "n=50", "2h", "tiny", "arithmetic"]


def test_a_list_shows_the_reward_of_a_run_whose_accuracy_stays_0(capsys: pytest.CaptureFixture[str]) -> None:
    measured = [{**evaluation(0.0, 0.0, 0.1), "eval/reward": reward} for reward in (0.0, 0.41)]
    make_run(Path("runs/own"), [{"step": 0, **measured[0]}, step_row(2, 0.41, **measured[1])])
    assert rlpost(["runs", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[4:6] == ["0.00→0.41", "n=50"]


def test_a_default_name_and_all_columns_fit_80(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "output_width", lambda piped: 80)
    make_run(Path("runs/grpo-arithmetic-smollm2-12"), ROWS, overrides=["model=smollm2"])
    assert rlpost(["runs", "list"]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert max(len(heading), len(line)) <= 80
    assert line.split()[0] == "grpo-arithmetic-smollm2-12"
    assert line.split()[-1].startswith("arit")


def test_a_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/a"), ROWS)
    assert rlpost(["runs", "list", "--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)
    del entry["updated"]
    assert entry == {
        "name": "a",
        "folder": "runs/a",
        "state": "finished",
        "error": None,
        "steps_done": 2,
        "steps": 2,
        "reward": 0.75,
        "loss": None,
        "accuracy_before": {"value": 0.1, "low": 0.0, "high": 0.2, "prompts": 50},
        "accuracy_after": {"value": 0.58, "low": 0.5, "high": 0.7, "prompts": 50},
        "held_out_reward_before": None,
        "held_out_reward_after": None,
        "model": "tiny",
        "env": "arithmetic",
    }


def test_no_runs_is_said_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert rlpost(["runs", "list"]) == 0
    assert capsys.readouterr() == ("", "no runs in runs/ yet: rlpost train grpo begins one\n")
    assert rlpost(["runs", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert rlpost(["runs", "list", "nowhere"]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err


def test_show_says_what_was_asked_and_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(Path("runs/a"), ROWS)
    (run / "checkpoints" / "step-000002" / "model").mkdir(parents=True)
    (run / "checkpoints" / "step-000002" / "model" / "config.json").write_text("x" * 5000)
    (run / "checkpoints" / "step-000002" / "manifest.json").write_text("{}")
    assert rlpost(["runs", "show"]) == 0
    out = capsys.readouterr().out
    for expected in (
        "a  finished, step 2/2, ",
        "command     rlpost train grpo model=tiny\n",
        "model       tiny (builtin:tiny)\n",
        "seed        7\n",
        "versions    rlpost 0.1.0, python 3.11.7, torch 2.13.0\n",
        "progress    2/2 steps, 8 s in them, 4.0 s each\n            200 tokens generated\n",
        "reward      0.25 -> 0.75     ▁█\n",
        "held-out    accuracy 10.0% [0.0%, 20.0%]    ->  58.0% [50.0%, 70.0%]\n            greedy, on 50 prompts, 95%",
        "checkpoints step-000002\n",
    ):
        assert expected in out
    assert "checkpoints 5 kB" in out


def test_show_splits_the_time_and_gives_first_and_last_of_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    first = {"completion/truncated": 0.5, "entropy": 1.5, "sampler/logprob_gap": 0.02, "groups/zero_std": 1.0}
    last = {"completion/truncated": 0.1, "entropy": 0.5, "sampler/logprob_gap": 0.01, "groups/zero_std": 0.25}
    make_run(Path("runs/a"), [step_row(1, 0.25, **first), step_row(2, 0.75, **last)])
    assert rlpost(["runs", "show", "a"]) == 0
    out = capsys.readouterr().out
    for expected in (
        "time        rollout 50%, train 25%, rest 25% of the time in steps\n",
        "truncated   50% -> 10%",
        "entropy     1.50 -> 0.50",
        "gap         0.020 -> 0.010",
        "no spread   100% -> 25%",
        "sampling completions; rest: all else",
    ):
        assert expected in out


def test_show_says_what_is_missing_and_hides_nothing_of_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(Path("a"), log=verdict(f"{FAILED} DataError: row 3 \x1b[2J"))
    for name in ("environment.json", "config.yaml", "command.txt"):
        (run / name).unlink()
    (run / "metrics.jsonl").write_text('{"step": 1, "rew')
    assert rlpost(["runs", "show", "./a"]) == 0
    out = capsys.readouterr().out
    for expected in (
        "a  failed, step 0/?, ",
        "command.txt is missing",
        "config.yaml is missing",
        "no step is recorded yet",
        "1 line of metrics.jsonl is not whole",
        "DataError: row 3 \\x1b[2J",
        "the same command with --resume auto --out a",
    ):
        assert expected in out
    assert "\x1b" not in out


def test_show_says_once_where_a_run_without_a_checkpoint_is(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(Path("runs/a"), log=verdict(f"{FAILED} DataError: row 3"))
    (run / "command.txt").write_text("rlpost train grpo model=tiny --name a\n")
    assert rlpost(["runs", "show", "a"]) == 0
    assert "go on       the same command with --resume auto\n" in capsys.readouterr().out


def test_show_gives_the_command_that_goes_on_from_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(Path("a b"), log=verdict(STOPPED))
    model = run / "checkpoints" / "step-000002" / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    assert rlpost(["runs", "show", "./a b"]) == 0
    assert "--resume auto" in capsys.readouterr().out  # a checkpoint that is not whole is no place to go on from
    (model.parent / "manifest.json").write_text("{}")
    assert rlpost(["runs", "show", "./a b"]) == 0
    assert "go on       rlpost train grpo --resume 'a b'\n" in capsys.readouterr().out


def test_show_as_json_holds_the_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/a"), ROWS)
    assert rlpost(["runs", "show", "a", "--json"]) == 0
    details = json.loads(capsys.readouterr().out)
    assert details["metrics"] == ROWS
    assert (details["overrides"], details["config"]["seed"]) == (["model=tiny"], 7)


def test_tail_prints_steps_as_training_does(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/a"), ROWS, steps=3)
    assert rlpost(["runs", "tail", "a"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "held-out before training, 50 prompts:  accuracy 10.0% [0.0%, 20.0%]",
        "step 1/3  reward 0.25  accuracy  50%  tokens 12  grad 1.50  50 tok/s  rollout 2.0s train 1.0s  left 0:08",
        "step 2/3  reward 0.75  accuracy  50%  tokens 12  grad 1.50  50 tok/s  rollout 2.0s train 1.0s  left 0:04",
        "held-out after step 2, 50 prompts:  accuracy 58.0% [50.0%, 70.0%]",
    ]
    assert rlpost(["runs", "tail", "a", "--lines", "1", "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == ROWS[-1:]


def test_a_reward_of_ones_own_is_shown_with_its_interval_and_the_number_of_prompts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {"eval/prompts": 4.0, "eval/reward": 0.221, "eval/reward_low": 0.1, "eval/reward_high": 0.342}
    after = {"eval/prompts": 4.0, "eval/reward": 0.406, "eval/reward_low": 0.2, "eval/reward_high": 0.612}
    make_run(Path("runs/a"), [{"step": 0, **before}, step_row(1, 0.3), step_row(2, 0.4, **after)])
    assert rlpost(["runs", "show", "a"]) == 0
    out = capsys.readouterr().out
    assert "held-out    reward   0.221 [0.100, 0.342]   ->  0.406 [0.200, 0.612]\n" in out
    assert "            greedy, on 4 prompts, 95% intervals\n" in out
    assert rlpost(["runs", "list"]) == 0
    assert " 0.22→0.41 ±0.21 n=4 " in capsys.readouterr().out


def test_tail_of_a_value_that_was_not_finite_and_of_no_steps(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/a"), [step_row(1, None)])
    make_run(Path("runs/b"))
    assert rlpost(["runs", "tail", "a"]) == 0
    assert capsys.readouterr().out.startswith("step 1/2  ")
    assert rlpost(["runs", "tail", "b"]) == 0
    assert capsys.readouterr() == ("", "runs/b: no step is recorded yet\n")


def test_following_prints_new_steps_until_the_lock_is_let_go(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(Path("runs/a"), ROWS[:2], log=verdict(BEGAN))
    lock = (run / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def train(seconds: float) -> None:  # while the steps that were there have been read
        with (run / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps(ROWS[2]) + "\n")
        lock.close()

    monkeypatch.setattr("rlpost.cli.runs.time", SimpleNamespace(sleep=train))
    assert rlpost(["runs", "tail", "a", "-f", "--lines", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-2].startswith("step 2/2  reward 0.75")
    assert captured.err == "runs/a: killed\n"


def test_ctrl_c_leaves_a_followed_run_quietly() -> None:
    run = make_run(Path("runs/a"), ROWS)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "rlpost", "runs", "tail", "a", "-f"]
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
        "codes = [run(words.split()) for words in ('runs list', 'runs show a', 'runs tail a')]\n"
        "print(codes, [m for m in ('torch', 'transformers', 'pyarrow', 'hydra') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0] []"


def test_the_help_of_tail_explains_the_words_of_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert rlpost(["runs", "tail", "--help"]) == 0
    assert "    lag       weight updates between sampling and training\n" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["list", "show", "tail"])
def test_help_is_short(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rlpost(["runs", verb, "--help"]) == 0
    assert 10 < len(capsys.readouterr().out.splitlines()) < 40
