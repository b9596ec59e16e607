"""The run folder: what it holds, who may write to it, and what resuming keeps of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from tensordict import TensorDict

import rlpost
from rlpost.catalog import TRAIN_EXPERT_ITERATION, TRAIN_GRPO, TRAIN_SFT, Command
from rlpost.config.compose import compose
from rlpost.errors import CheckpointError, ConfigError, DataError
from rlpost.runs.checkpoint import save_checkpoint
from rlpost.runs.folder import RunFolder
from rlpost.runs.reader import RunState, read_run
from rlpost.settings.commands import RunRequest

Batch = Callable[..., TensorDict]
FIGURES = {
    "reward/mean": 0.5,
    "completion/tokens_mean": 2.0,
    "tokens/generated": 4.0,
    "time/rollout": 1.0,
    "time/train": 1.0,
    "time/sync": 0.1,
}


class Noting(RunFolder):
    """A run folder that keeps its notes."""

    notes: list[str]


def make(folder: Path, *, resume: str | None = None, total_steps: int = 4, config: str = "steps: 4\n") -> Noting:
    request = RunRequest(folder, resume, ["steps=4", "env=arithmetic"], ["rlpost", "train", "a b"], config)
    notes: list[str] = []
    made = Noting(request, seed=11, note=notes.append)
    made.notes, made.total_steps = notes, total_steps
    return made


def save(run_folder: Path, step: int) -> Path:
    def write_model(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    return save_checkpoint(
        run_folder / "checkpoints", step, write_model=write_model, tensors={"a": torch.ones(2)}, state={}, keep_last=9
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# What it holds


def test_a_resume_that_is_refused_leaves_the_record_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with make(folder) as run:
        save(folder, 4)
        run.record(4, FIGURES)
    names = ("config.yaml", "overrides.txt", "command.txt", "environment.json", "metrics.jsonl")
    before = {name: (folder / name).read_bytes() for name in names}

    def refuse() -> None:
        with make(folder, resume="auto", total_steps=9, config="steps: 9\n") as run:
            assert run.resume_from is not None
            raise ConfigError("--resume: the run began with another seed; keep it")

    with pytest.raises(ConfigError, match="keep it"):
        refuse()
    assert {name: (folder / name).read_bytes() for name in names} == before
    assert "not resumed" in (folder / "log.txt").read_text()
    assert read_run(folder).state is RunState.finished


def test_a_resume_is_written_down_once_it_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with make(folder):
        save(folder, 4)
    with make(folder, resume="auto", total_steps=9, config="steps: 9\n") as run:
        run.forget_after(4)
        assert read_run(folder).config == {"steps": 9}
        assert read_run(folder).state is RunState.running
    assert (folder / "command.txt").read_text() == "rlpost train 'a b'\n" * 2


def test_the_run_folder_has_command_settings_and_environment(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with make(folder):
        assert (folder / "config.yaml").read_text() == "steps: 4\n"
        assert (folder / "overrides.txt").read_text() == "steps=4\nenv=arithmetic\n"
        assert (folder / "command.txt").read_text() == "rlpost train 'a b'\n"
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["rlpost"] == rlpost.__version__
    assert environment["seed"] == 11
    assert environment["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert set(environment["packages"]) >= {"torch", "transformers", "vllm", "hydra-core"}
    assert environment["threads"] == torch.get_num_threads()


def test_a_step_is_recorded_in_metrics_and_rollouts(tmp_path: Path, batch: Batch) -> None:
    with make(tmp_path) as run:
        run.record(1, FIGURES, batch())
        run.record(2, FIGURES, batch(first=1))
    assert metrics(tmp_path) == [{"step": 1, **FIGURES}, {"step": 2, **FIGURES}]
    assert pq.read_table(tmp_path / "rollouts" / "step-000002.parquet")["group"].to_pylist() == [1, 1]


def test_values_that_are_not_finite_are_written_as_null(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        run.record(0, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 1.5, "e": 3})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"step": 0, "a": null, "b": null, "c": null, "d": 1.5, "e": 3}\n'


def test_an_error_that_ends_the_run_is_in_its_log(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), make(tmp_path):
        raise ValueError("broken")
    assert "ERROR the run ended with ValueError: broken" in (tmp_path / "log.txt").read_text()


def ended_by(error: Exception, folder: Path, step: int = 0) -> Noting:
    """A run that `error` ended after it recorded `step`."""
    run = make(folder)

    def end() -> None:
        with run:
            run.record(step, FIGURES)
            raise error

    with pytest.raises(type(error)):
        end()
    return run


def test_a_run_refused_before_its_first_step_leaves_no_folder(tmp_path: Path) -> None:
    run = ended_by(DataError("the prompt of row 3 is too long"), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    assert run.notes == [f"nothing was trained, so {tmp_path / 'new'} is removed"]


def test_a_folder_that_was_there_before_a_refused_run_stays(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    ended_by(DataError("the prompt of row 3 is too long"), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


# Who may write


def test_a_second_process_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from rlpost.runs.folder import RunFolder\n"
        "from rlpost.settings.commands import RunRequest; from rlpost.errors import ConfigError\n"
        "try:\n"
        "    with RunFolder(RunRequest(Path(sys.argv[1]), None, [], [], ''), seed=0, note=print):\n"
        "        print('mine')\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )

    def second() -> str:
        command = [sys.executable, "-c", program, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with make(tmp_path, config="first"):
        assert second() == f"{tmp_path} is in use by another rlpost process: give another --name"
        assert (tmp_path / "config.yaml").read_text() == "first"
    assert second() == "mine"


def test_the_lock_holds_within_one_process_too(tmp_path: Path) -> None:
    with make(tmp_path), pytest.raises(ConfigError, match="in use"), make(tmp_path):
        pass


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match=r"cannot write to .*file/run: .*give another --out"),
        make(tmp_path / "file" / "run"),
    ):
        pass


def test_a_step_that_cannot_be_recorded_says_how_to_go_on(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        (tmp_path / "metrics.jsonl").mkdir()
        with pytest.raises(CheckpointError, match=r"cannot write to .*--resume auto"):
            run.record(1, FIGURES)


# Going on


def test_nothing_is_resumed_unless_asked(tmp_path: Path) -> None:
    save(tmp_path, 2)
    assert make(tmp_path).resume_from is None


def test_auto_and_latest_take_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 2)
    newest = save(tmp_path, 4)
    (tmp_path / "checkpoints" / "step-000009").mkdir()  # never finished
    assert make(tmp_path, resume="auto").resume_from == newest
    assert make(tmp_path, resume="latest").resume_from == newest


def test_without_a_checkpoint_auto_begins_and_latest_is_refused(tmp_path: Path) -> None:
    assert make(tmp_path, resume="auto").resume_from is None
    with pytest.raises(CheckpointError, match="has no complete checkpoint; --resume auto"):
        _ = make(tmp_path, resume="latest").resume_from


def test_a_path_is_a_checkpoint_or_a_run(tmp_path: Path) -> None:
    older = save(tmp_path / "run", 2)
    assert make(tmp_path / "new", resume=str(older)).resume_from == older
    newer = save(tmp_path / "run", 4)
    assert make(tmp_path / "new", resume=str(newer)).resume_from == newer
    assert make(tmp_path / "new", resume=str(tmp_path / "run")).resume_from == newer
    assert make(tmp_path / "new", resume=str(older.parent / "latest")).resume_from == older.parent / "latest"
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        _ = make(tmp_path / "new", resume=str(tmp_path)).resume_from


def test_a_checkpoint_that_keeps_the_model_alone_is_refused_by_its_name(tmp_path: Path) -> None:
    older, newest = save(tmp_path, 2), save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="step-000002 keeps the model alone: resume from latest"):
        _ = make(tmp_path, resume=str(older)).resume_from
    assert make(tmp_path, resume=str(newest)).resume_from == newest


def test_a_damaged_checkpoint_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    (path / "model" / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"model/config\.json is not what was written"):
        _ = make(tmp_path, resume="auto").resume_from


def test_forget_after_drops_what_later_steps_wrote(tmp_path: Path, batch: Batch) -> None:
    with make(tmp_path) as run:
        for step in (1, 2, 3):
            run.record(step, FIGURES, batch())
        for step in (1, 3, 2):  # the last one written can be gone on from
            save(tmp_path, step)
        with (tmp_path / "metrics.jsonl").open("a") as stream:
            stream.write('{"step": 4, "reward/me')  # a crash in the middle of a line
        (tmp_path / "rollouts" / "step-mine.parquet").write_text("somebody's own")
        run.forget_after(2)
        assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
        run.record(3, FIGURES)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    left = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert left == ["step-000001.parquet", "step-000002.parquet", "step-mine.parquet"]
    assert make(tmp_path, resume="auto").resume_from == tmp_path / "checkpoints" / "step-000002"
    assert "removed later checkpoints: step-000003" in run.notes


def test_a_metrics_line_that_is_not_utf8_is_dropped_on_resume(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        run.record(1, FIGURES)
        with (tmp_path / "metrics.jsonl").open("ab") as stream:
            stream.write(b'{"step": 2, "reward/mean": \xff}\n')
        run.forget_after(2)
    assert [line["step"] for line in metrics(tmp_path)] == [1]


# What an evaluation adds


def test_a_late_evaluation_is_added_to_its_step(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        run.record(1, FIGURES)
        run.record(2, FIGURES | {"eval/loss": 0.5})
        run.record(3, FIGURES)
        assert [run.lacks_evaluation(step) for step in (2, 3, 4)] == [False, True, False]
        run.add_evaluation(3, {"eval/loss": 0.25})
        assert not run.lacks_evaluation(3)
    assert metrics(tmp_path)[1:] == [
        {"step": 2, **FIGURES, "eval/loss": 0.5},
        {"step": 3, **FIGURES, "eval/loss": 0.25},
    ]


def test_a_line_that_an_older_run_held_back_is_kept(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        run.record(1, FIGURES)
        (tmp_path / ".held-row.json").write_text(json.dumps({"step": 2, **FIGURES}))
        save(tmp_path, 2)
    with make(tmp_path, resume="auto") as run:
        run.forget_after(2)
        assert run.lacks_evaluation(2)
    assert metrics(tmp_path)[1] == {"step": 2, **FIGURES}
    assert not (tmp_path / ".held-row.json").exists()


@pytest.mark.parametrize("command", [TRAIN_GRPO, TRAIN_SFT, TRAIN_EXPERT_ITERATION], ids=lambda each: each.name)
def test_by_default_a_crash_loses_at_most_five_minutes(command: Command[Any]) -> None:
    assert compose(command, []).settings.checkpoint.every_minutes == 5.0


# What somebody else wrote


def test_an_error_with_any_text_is_logged_printable_and_keeps_the_status(tmp_path: Path) -> None:
    program = r"""
import logging, sys
from pathlib import Path
from rlpost.errors import PolicyError
from rlpost.runs.folder import RunFolder
from rlpost.settings.commands import RunRequest
with RunFolder(RunRequest(Path(sys.argv[1]), None, [], [], ""), seed=0, note=print):
    logging.getLogger("rlpost").warning("a reward said: %s", "\x1b[2J\ud800\x07")
    raise PolicyError("bad: \x1b]0;t\x07 \udfff")
"""
    folder = tmp_path / "run"
    ended = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, check=False)
    assert b"Logging error" not in ended.stderr
    logged = (folder / "log.txt").read_text(encoding="utf-8")
    assert r"a reward said: \x1b[2J\ud800\x07" in logged
    assert r"bad: \x1b]0;t\x07 \udfff" in logged
    assert all(character.isprintable() or character == "\n" for character in logged)
    assert read_run(folder).state is RunState.failed


def test_a_run_says_which_checkpoints_it_passes_over(tmp_path: Path) -> None:
    with make(tmp_path / "run"):
        save(tmp_path / "run", 2)
    (tmp_path / "run" / "checkpoints" / "step-000003").mkdir()
    (tmp_path / "run" / "checkpoints" / ".step-000004.incomplete").mkdir()
    run = make(tmp_path / "run", resume="latest")
    with run:
        assert run.resume_from == tmp_path / "run" / "checkpoints" / "step-000002"
    for name in ("step-000003", ".step-000004.incomplete"):
        assert any(f"{name} is not whole" in note for note in run.notes)
        assert f"{name} is not whole" in (tmp_path / "run" / "log.txt").read_text()
