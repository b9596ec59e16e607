"""Where a run writes, and which names are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpost.cli.run_folder import choose_folder, choose_sweep_folder
from rlpost.config.paths import SWEEP_FILE
from rlpost.errors import CheckpointError, ConfigError
from rlpost.runs.kept import recorded_settings
from tests.run_folders import add_checkpoint


def make_run(name: str, *, checkpoint: bool = False) -> Path:
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 30}\n')
    if checkpoint:
        add_checkpoint(folder, 30)
    return folder


def test_the_first_free_number_is_taken() -> None:
    assert choose_folder(None, None, None, "grpo-a-b") == Path("runs/grpo-a-b-1")
    make_run("grpo-a-b-1")
    make_run("grpo-a-b-3")
    assert choose_folder(None, None, None, "grpo-a-b") == Path("runs/grpo-a-b-2")


@pytest.mark.parametrize("name", ["", " ", "a/b", "..", ".hidden", "../x", "a\\b", "x "])
def test_a_name_that_is_a_path_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        choose_folder(None, name, None, "s")


def test_auto_resumes_what_is_there_and_begins_only_a_named_run() -> None:
    make_run("sums")
    assert choose_folder(None, "sums", "auto", "s") == Path("runs/sums")
    assert choose_folder(None, "new", "auto", "s") == Path("runs/new")
    with pytest.raises(ConfigError, match="runs/s-1"):
        choose_folder(None, None, "auto", "s")
    make_run("s-9")
    make_run("s-10")
    assert choose_folder(None, None, "auto", "s") == Path("runs/s-10")


def test_a_run_that_failed_before_it_did_anything_leaves_its_name_free() -> None:
    folder = make_run("sums")
    (folder / "metrics.jsonl").write_text("")
    (folder / "command.txt").write_text("rlpost train grpo env=dataset\n")
    assert choose_folder(None, "sums", None, "s") == folder
    (folder / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="runs/sums"):
        choose_folder(None, "sums", None, "s")


def test_latest_needs_a_run_with_a_checkpoint() -> None:
    make_run("sums", checkpoint=True)
    make_run("short")
    with pytest.raises(CheckpointError, match="runs/short"):
        choose_folder(None, "short", "latest", "s")
    assert choose_folder(None, "sums", "latest", "s") == Path("runs/sums")
    for name in ("new", None):
        with pytest.raises(ConfigError, match="--resume latest"):
            choose_folder(None, name, "latest", "s")


def test_a_checkpoint_or_run_folder_is_resumed_in_place_or_elsewhere() -> None:
    run = make_run("sums", checkpoint=True)
    checkpoint = run / "checkpoints" / "step-000030"
    assert choose_folder(None, None, str(checkpoint), "s") == run
    assert choose_folder(None, None, str(run), "s") == run
    assert choose_folder(None, "sums", str(checkpoint), "s") == run
    assert choose_folder(None, "fork", str(checkpoint), "s") == Path("runs/fork")
    make_run("other")
    with pytest.raises(ConfigError, match="runs/other"):
        choose_folder(None, "other", str(checkpoint), "s")


def make_sweep(name: str) -> Path:
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / SWEEP_FILE).write_text("{}")
    return folder


def test_a_sweep_has_a_folder_of_its_own() -> None:
    assert choose_sweep_folder(None, None, None, "s") == Path("runs/s-1")
    make_sweep("s-1")
    assert choose_sweep_folder(None, None, None, "s") == Path("runs/s-2")
    assert choose_sweep_folder(None, None, "auto", "s") == Path("runs/s-1")
    assert choose_sweep_folder(Path("x"), None, "auto", "s") == Path("x")


@pytest.mark.parametrize(
    ("recorded", "typed", "kept"),
    [
        ("k3", "", ["loss.kl_estimator=k3"]),
        ("k3_k2grad", "", []),
        ("k3", "loss.kl_estimator=k2\n", ["loss.kl_estimator=k2"]),
    ],
)
def test_a_run_keeps_a_default_that_has_changed_since(recorded: str, typed: str, kept: list[str]) -> None:
    run = make_run("r")
    (run / "config.yaml").write_text(f"loss: {{kl_estimator: {recorded}}}")
    (run / "overrides.txt").write_text(typed)
    assert [f"{each.key}={each.text}" for each in recorded_settings(run, [], "--resume")] == kept
