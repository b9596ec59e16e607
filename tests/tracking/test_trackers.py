"""Each tracker for real: what its own reader finds is what metrics.jsonl says, after a crash and a resume too."""

from __future__ import annotations

import csv
import html
import io
import json
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from rlpost.data.conversation import Conversation
from rlpost.runs.rollout_table import write_rollouts
from rlpost.runs.rollouts import spread_of
from rlpost.settings.training import (
    MLflowSettings,
    TensorBoardSettings,
    TrackerSettings,
    TrackioSettings,
    WandbSettings,
)
from rlpost.tracking.trackers import Status, Tracking, chosen_tracker
from tests.says import Says

pytestmark = pytest.mark.thorough

CONFIG = {"steps": 4, "optim": {"lr": 1.5e-5}, "env": {"operations": ["add"], "system_prompt": None}}
BEFORE = [{"step": s, "reward/mean": s / 3, "time/step": 1.5, "ess": None} for s in range(5)]
AFTER = [{"step": s, "reward/mean": s / 7, "time/step": 2.5, "ess": 1.0} for s in range(3, 6)]

TEXT = "=91 | <b>\nSo 4 * 5_"
PROMPT = "<user>What is 34 + 57?"
BEST = [3, PROMPT, TEXT, 1.0, "a 1", 1.5, "stop"]
FAILED = [3, PROMPT, "No.", None, "", 0.0, "stop"]

Points = dict[str, list[tuple[int, float]]]  # name -> (step, number) in the order of the reader


@pytest.fixture(autouse=True)
def nothing_beside_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The home and the current folder stay as empty as they are."""
    for name in ("home", "current"):
        (tmp_path / name).mkdir()
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_CACHE_DIR", "TRACKIO_DIR", "MLFLOW_TRACKING_URI", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "current")
    yield
    assert list((tmp_path / "home").rglob("*")) == []
    assert list((tmp_path / "current").rglob("*")) == []


def expected(lines: list[dict[str, Any]]) -> Points:
    """The finite numbers of lines of metrics.jsonl."""
    points: Points = {}
    for line in lines:
        for name, number in line.items():
            if name != "step" and number is not None:
                points.setdefault(name, []).append((line["step"], number))
    return points


def attempt(settings: TrackerSettings, folder: Path, lines: list[dict[str, Any]], kept: int, status: Status) -> None:
    """One attempt that leaves `lines` after those up to step `kept`."""
    folder.mkdir(exist_ok=True)
    whole = [line for line in BEFORE if line["step"] <= kept] + lines
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in whole))
    assert outcome(settings, folder, kept, status) is None


def outcome(settings: TrackerSettings, folder: Path, kept: int, status: Status) -> str | None:
    """Why the tracker was given up, if it was; in a process of its own, since trackio keeps its first folder."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(followed, settings, folder, kept, status).result()


def followed(settings: TrackerSettings, folder: Path, kept: int, status: Status) -> str | None:
    from huggingface_hub import constants  # noqa: F401  loaded before a tracker, as in a training

    tracker = chosen_tracker(settings)
    assert tracker is not None
    following = Tracking(
        tracker, folder, CONFIG, settings.timeout_seconds, lambda step: spread_of(folder, step, settings.completions)
    )
    following.start(kept)
    return following.close(status, lambda text: None)


@pytest.fixture
def played(tmp_path: Path, conversation: Callable[..., Conversation]) -> Path:
    """A run folder with the completions of step 3, the rewards of which are 0.5, 1, 0.25 and a failed one."""
    # not at the top: each attempt's process imports this file
    from rlpost.data.batch import batch_from_conversations
    from tests.run_folders import rows_worth

    texts = [(0.5, "No."), (1.0, TEXT), (0.25, "No."), (None, "No.")]
    batch = batch_from_conversations(
        [
            conversation(
                4, n, text=text, reward=reward, valid=reward is not None, reward_parts={"a": reward} if reward else {}
            )
            for n, (reward, text) in enumerate(texts)
        ]
    )
    rows = rows_worth(batch, 0.0, 1.5, -1.5, 0.0)
    write_rollouts(tmp_path / "run" / "rollouts" / "step-000003.parquet", 3, batch, rows)
    return tmp_path / "run"


def crash_and_resume(settings: TrackerSettings, folder: Path) -> None:
    """Steps 0 to 4, of which the checkpoint has 0 to 2; then 3 to 5 with other numbers."""
    attempt(settings, folder, BEFORE, -1, "failed")
    attempt(settings, folder, AFTER, 2, "finished")


# TensorBoard


def tensorboard(folder: Path) -> tuple[Points, str, list[tuple[int, str]]]:
    """What TensorBoard shows: scalars, the text of the configuration, and the completions of each step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags: Any = events.Tags()
    points = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in tags["scalars"]}
    text_of: Callable[[Any], str] = lambda event: event.tensor_proto.string_val[0].decode()  # noqa: E731
    completions = [(event.step, text_of(event)) for event in events.Tensors("completions/text_summary")]
    return points, text_of(events.Tensors("config/text_summary")[0]), completions


def rounded(points: Points) -> Points:
    """As float32 keeps the numbers."""
    return {
        name: [(step, struct.unpack("f", struct.pack("f", number))[0]) for step, number in values]
        for name, values in points.items()
    }


def test_tensorboard_shows_each_step_once_and_completions(played: Path) -> None:
    crash_and_resume(TensorBoardSettings(completions=2), played)
    points, config, completions = tensorboard(played)
    assert points == rounded(expected(BEFORE[:3] + AFTER))
    assert {"| optim.lr | 1.5e-05 |", f"| run_folder | {played} |"} <= set(html.unescape(config).splitlines())
    (step, table), _ = completions  # readers drop undone numbers, and keep texts
    titles, rule, best, failed = table.splitlines()
    assert (step, titles.split(" | ")[1:3], rule.count("---")) == (3, ["prompt", "completion"], 7)
    cells = best.removeprefix("| ").removesuffix(" |").split(" | ")
    shown = [html.unescape(cell.replace("<br>", "\n")) for cell in cells]
    assert shown == ["3", PROMPT, TEXT, "1.0", "a 1", "1.5", "stop"]
    assert failed.endswith("| No. |  |  | 0.0 | stop |")


# Weights & Biases


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline file: 7 bytes of head, then a log in blocks of 32 KiB (crc, length, kind)."""
    from wandb.proto import wandb_internal_pb2

    content, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # too little of the block is left for a head
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
            record.ParseFromString(parts)
            yield record
            parts = b""


def wandb_run(file: Path) -> tuple[Points, dict[str, Any], Any]:
    """(points, configuration, the run's own record) of one offline file."""
    points: Points = {}
    config: dict[str, Any] = {}
    own = None
    for record in wandb_records(file):
        if record.HasField("run"):
            own = record.run
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, number in row.items():
                if not name.startswith("_"):
                    points.setdefault(name, []).append((row["_step"], number))
    return points, config, own


def test_wandb_keeps_both_attempts_offline_under_one_id(played: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "sums")  # before the default
    crash_and_resume(WandbSettings(completions=2), played)
    files = sorted((played / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    (first, config, one), (second, _, two) = map(wandb_run, files)
    [(step, table)] = set(first["completions/path"])
    content = json.loads((files[0].parent / "files" / str(table)).read_text())
    assert (step, content["columns"][:3]) == (3, ["step", "prompt", "completion"])
    assert content["data"] == [BEST, FAILED]
    for points, lines in ((first, BEFORE), (second, AFTER)):
        assert {k: v for k, v in points.items() if not k.startswith("completions/")} == expected(lines)
    assert (config["optim"], config["run_folder"]) == ({"lr": 1.5e-5}, str(played))
    assert (one.project, one.display_name) == ("sums", "run")
    assert one.run_id == two.run_id


# trackio


def trackio_points(folder: Path) -> tuple[Points, dict[str, Any], list[str]]:
    """(points, configuration, runs) as trackio's own storage reads them."""
    from trackio import sqlite_storage

    points: Points = {}
    with pytest.MonkeyPatch.context() as patch:  # it takes its folder from the environment as it is imported
        patch.setattr(sqlite_storage, "TRACKIO_DIR", folder)
        storage: Any = sqlite_storage.SQLiteStorage
        for row in storage.get_logs("rlpost", "run"):
            for name, number in row.items():
                if name not in ("step", "timestamp"):
                    points.setdefault(name, []).append((row["step"], number))
        return points, storage.get_run_config("rlpost", "run"), storage.get_runs("rlpost")


def test_trackio_holds_each_step_once(played: Path) -> None:
    crash_and_resume(TrackioSettings(completions=2), played)
    points, config, runs = trackio_points(played / "trackio")
    [(step, table)] = points.pop("completions")
    rows: Any = table
    assert (step, [list(row.values()) for row in rows["_value"]]) == (3, [BEST, FAILED])
    assert points == expected(BEFORE[:3] + AFTER)
    assert (config["optim"], config["run_folder"], len(runs)) == ({"lr": 1.5e-5}, str(played), 1)


def test_trackio_does_not_go_on_with_another_run_of_that_name(tmp_path: Path, says: Says) -> None:
    settings = TrackioSettings(folder=str(tmp_path / "shared"))
    (tmp_path / "elsewhere").mkdir()
    for folder in (tmp_path / "run", tmp_path / "elsewhere" / "run"):
        attempt(settings, folder, BEFORE, -1, "finished")
    says("train", outcome(settings, tmp_path / "run", 2, "finished"))


# MLflow


def mlflow_history(folder: Path) -> tuple[Points, Any]:
    """(points, the run) as MLflow's own client reads them."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("rlpost")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    names = run.data.metrics
    history: Callable[[str], Any] = lambda name: client.get_metric_history(run.info.run_id, name)  # noqa: E731
    return {name: sorted((point.step, point.value) for point in history(name)) for name in names}, run


def test_mlflow_keeps_its_id_and_has_undone_steps_twice(played: Path) -> None:
    settings = MLflowSettings(completions=2)
    attempt(settings, played, BEFORE, -1, "stopped")
    points, run = mlflow_history(played)
    assert points == expected(BEFORE)
    assert (run.info.run_name, run.info.status) == ("run", "KILLED")
    attempt(settings, played, AFTER, 2, "finished")
    points, run = mlflow_history(played)
    assert points == {name: sorted(values) for name, values in expected(BEFORE + AFTER).items()}
    assert (run.data.metrics["reward/mean"], run.info.status) == (5 / 7, "FINISHED")
    [table] = Path(run.info.artifact_uri, "completions").iterdir()
    titles, best, failed = csv.reader(io.StringIO(table.read_text()))
    assert (table.name, titles[1:3]) == ("step-000003.csv", ["prompt", "completion"])
    assert best == ["3", PROMPT, f"'{TEXT}", "1.0", "a 1", "1.5", "stop"]  # no formula for a spreadsheet
    assert failed[2:5] == ["No.", "", ""]
    assert (run.data.params["optim.lr"], run.data.tags["rlpost.folder"]) == ("1.5e-05", str(played))
