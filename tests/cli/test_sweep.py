"""`-m`: all jobs are checked first, each runs in a process of its own, one record of them all."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpost.cli import sweep
from rlpost.cli.sweep import Job, Sweep
from rlpost.record import FINISHED
from tests.command_line import CommandLine
from tests.says import Says

pytestmark = pytest.mark.thorough

Child = Callable[[str], list[list[str]]]

SEEDS = "train grpo model=tiny steps=3 -m seed=0,1,2"

# what a job of seed N does in place of training: see `child`
RESULT = """
import json, pathlib, sys
words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
reward = int(words["seed"]) / 4
shares = {"eval/accuracy_lenient": reward, "eval/accuracy_lenient_low": 0.0, "eval/accuracy_lenient_high": 1.0}
result = {"steps": 3, "metrics": {"reward/mean": reward}, "evaluation_before": None, "evaluation_after": shares}
metrics = pathlib.Path(sys.argv[sys.argv.index("--out") + 1], "metrics.jsonl")
metrics.write_text(json.dumps({"step": 3, "reward/mean": reward}))
print(json.dumps(result, indent=2))
"""


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    """Makes every job run a Python program in place of rlpost; returns the commands as they come."""

    def stand_in(program: str) -> list[list[str]]:
        commands: list[list[str]] = []
        real = sweep.job_command

        def command(planned: Sweep, job: Job) -> list[str]:
            commands.append(real(planned, job))
            return [sys.executable, "-c", program, *commands[-1][4:]]

        monkeypatch.setattr(sweep, "job_command", command)
        return commands

    return stand_in


def record(folder: str) -> dict[str, Any]:
    return json.loads((Path("runs") / folder / "sweep.json").read_text())


def test_jobs_run_one_after_the_other_and_end_in_a_table(child: Child, rlpost: CommandLine) -> None:
    commands = child(RESULT)
    lines = rlpost.lines(f"{SEEDS} --name seeds")
    words = ["-m", "rlpost", "train", "grpo", "model=tiny", "steps=3", "seed=1", "--json", "--out", "runs/seeds/seed-1"]
    assert commands[1][2:] == words
    begin = next(i for i, line in enumerate(lines) if line.startswith("seeds "))
    assert lines[begin + 1].split() == ["3", "0.250", "25.0%", "[0.0%,", "87.1%]"]  # 4.3027 * 0.25 / sqrt(3) = 0.621
    assert record("seeds")["found"]["candidates"][0]["runs"] == ["seed-0", "seed-1", "seed-2"]
    assert lines[-1].split() == ["results", "runs/seeds/sweep.json"]
    jobs = record("seeds")["jobs"]
    assert [(job["name"], job["exit_code"]) for job in jobs] == [("seed-0", 0), ("seed-1", 0), ("seed-2", 0)]
    assert jobs[2]["differs"] == {"seed": "2"}
    assert jobs[2]["overrides"] == ["model=tiny", "steps=3", "seed=2"]
    assert jobs[2]["result"]["metrics"] == {"reward/mean": 0.5}


def test_json_is_the_record_and_all_there_is_on_stdout(child: Child, rlpost: CommandLine) -> None:
    child(RESULT)
    assert rlpost.json(SEEDS) == record("sweep-grpo-1")
    assert "3 jobs " in rlpost.err


BAD = """
    train grpo -m optim.lr=1e-5,-3
    train grpo -m model=tiny,smolm2
    train grpo -m seed=0,1 group_size=3 minibatch_size=4
    train grpo -m policy=transformers,scripted cluster.sharding=full cluster.trainer_ranks=2
    train grpo -m steps=3
    train grpo -m seed=0,1 --resume runs/x
    train grpo -m seed=0,1 --name a/b
    train grpo optim.lr=1e-5,2e-5
    train grpo model=tiny,smollm2
    train grpo env.operations=[add],[subtract]
    eval -m seed=0,1 optim.lr=1
    eval --resume auto
"""


def test_one_bad_value_stops_all_before_the_first(child: Child, rlpost: CommandLine, says: Says) -> None:
    commands = child(RESULT)
    says("train", rlpost.refusals(BAD))
    assert commands == []
    assert not Path("runs").exists()


def test_a_missing_data_file_of_one_job_is_an_error_of_data(rlpost: CommandLine) -> None:
    Path("a.jsonl").write_text("".join(f'{{"question": "{n}", "answer": "#### 1"}}\n' for n in range(40)))
    refused = rlpost.refused("train grpo -m env=gsm8k env.path=./a.jsonl,./b.jsonl", 3)
    assert refused.startswith("error: job 2 of 2 (env.path=./b.jsonl): ")


def test_a_failed_job_leaves_the_others_running_and_the_highest_exit_code_counts(
    child: Child, rlpost: CommandLine
) -> None:
    child(
        "import sys; seed = sys.argv[-4]; sys.stderr.write(f'error: no \\x1b {seed}\\n'); sys.exit(int(seed[-1]) + 3)"
    )
    out = rlpost(f"{SEEDS} --name bad", 5)
    jobs = record("bad")["jobs"]
    assert [job["exit_code"] for job in jobs] == [3, 4, 5]
    assert jobs[1]["error"] == "no \x1b seed=1"
    assert "failed (4)" in out
    assert "no \\x1b seed=1\n" in out
    assert "runs/bad/seed-1/log.txt" in out
    assert ": 3 of 3 jobs; " in out
    assert Path("runs/bad/seed-1/log.txt").read_text() == "error: no \x1b seed=1\n"


def test_a_crash_is_told_by_its_last_line_and_its_signal(child: Child, rlpost: CommandLine) -> None:
    child("import os, sys; seed = sys.argv[-4]; os.kill(os.getpid(), 9) if seed == 'seed=2' else 1 / 0")
    rlpost(f"{SEEDS} --name crash", 137)
    jobs = record("crash")["jobs"]
    assert [job["exit_code"] for job in jobs] == [1, 1, 137]
    assert jobs[0]["error"].startswith("ZeroDivisionError: ")
    assert jobs[2]["error"]  # though it has said nothing


def test_an_error_of_the_configuration_stops_the_sweep(child: Child, rlpost: CommandLine) -> None:
    commands = child("import sys; print('error: taken', file=sys.stderr); sys.exit(2)")
    rlpost(f"{SEEDS} --name taken", 2)
    assert len(commands) == 1
    assert [job["exit_code"] for job in record("taken")["jobs"]] == [2, None, None]


STOPPABLE = """
import signal, sys, time
def leave(number, frame):
    print("saved", file=sys.stderr)
    sys.exit(128 + number)
signal.signal(signal.SIGINT, leave)
signal.signal(signal.SIGTERM, leave)
open("begun", "w").close()
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("number", "of_the_job", "of_the_sweep"),
    [(signal.SIGINT, 130, 130), (signal.SIGTERM, 143, 143), (signal.SIGHUP, 143, 129)],
)
def test_a_signal_reaches_the_job_under_way_which_saves_and_is_the_last(
    number: int, of_the_job: int, of_the_sweep: int, child: Child, rlpost: CommandLine
) -> None:
    def send_when_begun() -> None:
        while not Path("begun").exists():
            threading.Event().wait(0.02)
        os.kill(os.getpid(), number)

    commands = child(STOPPABLE)
    sender = threading.Thread(target=send_when_begun)
    before = signal.getsignal(number)
    sender.start()
    rlpost(f"{SEEDS} --name stopped", of_the_sweep)
    sender.join()
    assert signal.getsignal(number) is before
    assert len(commands) == 1
    assert record("stopped")["exit_code"] == of_the_sweep
    assert [job["exit_code"] for job in record("stopped")["jobs"]] == [of_the_job, None, None]
    assert Path("runs/stopped/seed-0/log.txt").read_text() == "saved\n"


def test_resuming_runs_what_is_not_done_or_was_asked_otherwise(child: Child, rlpost: CommandLine) -> None:
    commands = child(RESULT.replace("print", "words['seed'] == '1' and sys.exit(4); print"))
    sweep = f"{SEEDS} --name s"
    rlpost(sweep, 4)
    Path("runs/s/seed-1/metrics.jsonl").touch()  # as a run leaves it, so it is one to go on with
    commands.clear()
    assert "runs/s " in rlpost.refused(sweep)
    lines = rlpost.lines(f"{sweep} --resume auto --dry-run")
    assert [line.split()[1] for line in lines[1:]] == ["done", "seed-1", "done"]
    out = rlpost(f"{sweep} --resume auto", 4)
    assert [command[-4:] for command in commands] == [["--out", "runs/s/seed-1", "--resume", "auto"]]
    assert record("s")["jobs"][2]["result"]["steps"] == 3
    assert out.count("done before") == 2
    commands.clear()
    rlpost(f"{sweep} --resume auto steps=4", 4)
    assert len(commands) == 3


def test_resuming_without_a_name_goes_on_with_the_last_sweep(child: Child, rlpost: CommandLine) -> None:
    commands = child(RESULT)
    for _ in range(2):
        rlpost(SEEDS)
    rlpost(f"{SEEDS} seed=2,3 --resume auto")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["sweep-grpo-1", "sweep-grpo-2"]
    assert [command[-1] for command in commands[6:]] == ["runs/sweep-grpo-2/seed-3"]


def test_sweeps_and_single_runs_do_not_share_a_folder(child: Child, rlpost: CommandLine) -> None:
    child(RESULT)
    Path("runs/one/checkpoints").mkdir(parents=True)
    assert "runs/one " in rlpost.refused(f"{SEEDS} --name one")
    rlpost(f"{SEEDS} --name s")
    refused = rlpost.refused("train grpo --name s --resume auto")
    assert "runs/s " in refused


def test_an_unwritable_folder_is_an_error_of_the_machine(child: Child, rlpost: CommandLine) -> None:
    commands = child(RESULT)
    Path("file").touch()
    rlpost(f"{SEEDS} --out file/below", 3)
    assert "file/below" in rlpost.err
    assert commands == []


def test_a_dry_run_lists_the_jobs_and_writes_nothing(rlpost: CommandLine, says: Says) -> None:
    line = "eval -m model=tiny env=arithmetic,gsm8k seed=1,2 --dry-run"
    says("eval", rlpost(line))
    jobs = rlpost.json(line)["jobs"]
    assert [(job["name"], job["exit_code"]) for job in jobs][2] == ("env-gsm8k_seed-1", None)
    assert not Path("runs").exists()


def test_a_recipe_and_overrides_are_swept_together(child: Child, rlpost: CommandLine) -> None:
    commands = child(RESULT)
    rlpost("train grpo -m recipe=arithmetic-smollm2-cpu env.digits=1,2 seed=3")
    assert [command[6:9] for command in commands] == [
        ["recipe=arithmetic-smollm2-cpu", f"env.digits={digits}", "seed=3"] for digits in (1, 2)
    ]


def test_a_sweep_evaluates_for_real_and_its_jobs_can_be_compared(rlpost: CommandLine) -> None:
    rlpost("eval -m model=tiny policy=scripted env.limit=2 seed=0,1 --name sw")
    jobs = record("sw")["jobs"]
    assert [job["result"]["result"]["num_prompts"] for job in jobs] == [2, 2]
    assert [job["result"]["folder"] for job in jobs] == ["runs/sw/seed-0", "runs/sw/seed-1"]
    assert not Path("evals").exists()
    shown = rlpost("eval compare runs/sw/seed-0 runs/sw/seed-1")
    assert "2 prompts " in shown


def test_a_sweep_trains_for_real(rlpost: CommandLine) -> None:
    words = "model=tiny policy=scripted steps=1 eval.limit=2 prompts_per_step=1 group_size=2"
    rlpost(f"train grpo {words} -m optim.lr=choice(2e-5) --name real")
    [job] = record("real")["jobs"]
    assert job["result"]["metrics"]["lr"] == 2e-5
    assert job["result"]["evaluation_after"]["eval/prompts"] == 2.0
    assert Path("runs/real/lr-2e-05/checkpoints/latest/model/config.json").is_file()
    assert FINISHED in Path("runs/real/lr-2e-05/log.txt").read_text()
