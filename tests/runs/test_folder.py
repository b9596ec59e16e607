"""The run folder: what it holds, who may write to it, and what resuming keeps of it."""

from __future__ import annotations

import json
import logging
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
from rlpost.errors import CheckpointError, ConfigError, DataError, PolicyError
from rlpost.runs.folder import RunFolder
from rlpost.runs.reader import RunState, read_run
from rlpost.settings.commands import RunRequest
from tests.run_folders import save_checkpoint_of
from tests.trainings import metrics

Batch = Callable[..., TensorDict]
FIGURES = {"reward/mean": 0.5, "tokens/generated": 4.0, "time/train": 1.0}


class Noting(RunFolder):
    """A run folder that keeps its notes."""

    notes: list[str]


def make(folder: Path, *, resume: str | None = None, total_steps: int = 4, config: str = "steps: 4\n") -> Noting:
    request = RunRequest(folder, resume, ["steps=4", "env=arithmetic"], ["rlpost", "train", "a b"], config)
    notes: list[str] = []
    made = Noting(request, seed=11, note=notes.append)
    made.notes, made.total_steps = notes, total_steps
    return made


# What it holds


def test_a_resume_that_is_refused_leaves_the_record_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with make(folder) as run:
        save_checkpoint_of(folder, 4)
        run.record(4, FIGURES)
    names = ("config.yaml", "overrides.txt", "command.txt", "environment.json", "metrics.jsonl")
    before = {name: (folder / name).read_bytes() for name in names}

    def refuse() -> None:
        with make(folder, resume="auto", total_steps=9, config="steps: 9\n") as run:
            assert run.resume_from is not None
            raise ConfigError("another seed")

    with pytest.raises(ConfigError, match="another seed"):
        refuse()
    assert {name: (folder / name).read_bytes() for name in names} == before
    assert "not resumed" in (folder / "log.txt").read_text()
    assert read_run(folder).state is RunState.finished


def test_a_resume_is_written_down_once_it_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with make(folder):
        save_checkpoint_of(folder, 4)
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


@pytest.mark.parametrize("step", [0, 1])
def test_a_run_refused_before_its_first_step_leaves_no_folder(tmp_path: Path, step: int) -> None:
    run = make(tmp_path / "new")

    def refuse() -> None:
        with run:
            run.record(step, FIGURES)
            raise DataError("the prompt of row 3 is too long")

    with pytest.raises(DataError):
        refuse()
    assert run.path.exists() == (step > 0)
    assert [str(run.path) in note for note in run.notes] == [True] * (step == 0)


def test_a_folder_that_was_there_before_a_refused_run_stays(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="row 3"), make(tmp_path):
        raise DataError("row 3")
    assert (tmp_path / "notes.txt").read_text() == "mine"


# Who may write


def test_a_second_process_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    with make(tmp_path, config="first"):
        with pytest.raises(ConfigError, match="--name"), make(tmp_path):
            pass
        assert (tmp_path / "config.yaml").read_text() == "first"
    with make(tmp_path):
        pass


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/run: .* --out"), make(tmp_path / "file" / "run"):
        pass


def test_a_step_that_cannot_be_recorded_says_how_to_go_on(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        (tmp_path / "metrics.jsonl").mkdir()
        with pytest.raises(CheckpointError, match="--resume auto"):
            run.record(1, FIGURES)


# Going on


def test_auto_and_latest_take_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    assert make(tmp_path, resume="auto").resume_from is None
    with pytest.raises(CheckpointError, match="--resume auto"):
        _ = make(tmp_path, resume="latest").resume_from
    save_checkpoint_of(tmp_path, 2)
    newest = save_checkpoint_of(tmp_path, 4)
    (tmp_path / "checkpoints" / "step-000009").mkdir()  # never finished
    assert make(tmp_path, resume="auto").resume_from == newest
    assert make(tmp_path, resume="latest").resume_from == newest
    assert make(tmp_path).resume_from is None


def test_a_path_is_a_checkpoint_or_a_run(tmp_path: Path) -> None:
    older = save_checkpoint_of(tmp_path / "run", 2)
    assert make(tmp_path / "new", resume=str(older)).resume_from == older
    newer = save_checkpoint_of(tmp_path / "run", 4)
    assert make(tmp_path / "new", resume=str(newer)).resume_from == newer
    assert make(tmp_path / "new", resume=str(tmp_path / "run")).resume_from == newer
    assert make(tmp_path / "new", resume=str(older.parent / "latest")).resume_from == older.parent / "latest"
    for no_checkpoint in (tmp_path, older):  # the older one keeps the model alone
        with pytest.raises(CheckpointError, match=str(no_checkpoint)):
            _ = make(tmp_path / "new", resume=str(no_checkpoint)).resume_from


def test_a_damaged_checkpoint_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    path = save_checkpoint_of(tmp_path, 2)
    (path / "model" / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"model/config\.json"):
        _ = make(tmp_path, resume="auto").resume_from


def test_forget_after_drops_what_later_steps_wrote(tmp_path: Path, batch: Batch) -> None:
    with make(tmp_path) as run:
        for step in (1, 2, 3):
            run.record(step, FIGURES, batch())
        for step in (1, 3, 2):  # the last one written can be gone on from
            save_checkpoint_of(tmp_path, step)
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
    assert any("step-000003" in note for note in run.notes)


def test_a_metrics_line_that_is_not_utf8_is_dropped_on_resume(tmp_path: Path) -> None:
    with make(tmp_path) as run:
        run.record(1, FIGURES)
        with (tmp_path / "metrics.jsonl").open("ab") as stream:
            stream.write(b'{"step": 2, "reward/mean": \xff}\n')
        run.forget_after(2)
    assert [line["step"] for line in metrics(tmp_path)] == [1]


def test_a_run_says_which_checkpoints_it_passes_over(tmp_path: Path) -> None:
    with make(tmp_path):
        whole = save_checkpoint_of(tmp_path, 2)
    names = ("step-000003", ".step-000004.incomplete")
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir()
    with make(tmp_path, resume="latest") as run:
        assert run.resume_from == whole
    for name in names:
        assert any(name in note for note in run.notes)
        assert name in (tmp_path / "log.txt").read_text()


def test_by_default_a_crash_loses_at_most_five_minutes() -> None:
    commands: list[Command[Any]] = [TRAIN_GRPO, TRAIN_SFT, TRAIN_EXPERT_ITERATION]
    for command in commands:
        assert compose(command, []).settings.checkpoint.every_minutes == 5.0


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


# What somebody else wrote


def test_an_error_with_any_text_is_logged_printable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("rlpost")
    monkeypatch.setattr(log, "propagate", False)  # pytest would keep the text, which pytest-xdist cannot send

    def fail() -> None:
        with make(tmp_path):
            log.warning("said: %s", "\x1b[2J\ud800\x07")
            raise PolicyError("bad: \x1b]0;t\x07 \udfff")

    with pytest.raises(PolicyError):
        fail()
    assert "Logging error" not in capsys.readouterr().err
    logged = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert r"said: \x1b[2J\ud800\x07" in logged
    assert all(character.isprintable() or character == "\n" for character in logged)
    record = read_run(tmp_path)
    assert (record.state, record.error) == (RunState.failed, r"PolicyError: bad: \x1b]0;t\x07 \udfff")
