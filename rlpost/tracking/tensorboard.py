"""TensorBoard: event files in the run's folder."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rlpost.tracking.base import Status, TrackedRun, described_flat


class TensorBoardTracker:
    """Scalars, rounded to float32 as TensorBoard keeps them, and the configuration as a text.

    A resumed run adds a file. It begins with TensorBoard's own mark that the steps from its first on
    were undone, so readers drop what earlier files say of them.
    """

    def start(self, run: TrackedRun) -> str:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.folder / "tensorboard"
        self._writer = EventFileWriter(str(folder))
        mark = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(session_log=mark, step=run.first_step, wall_time=time.time()))
        if run.known_as is None:
            # a markdown table: TensorBoard renders texts as such
            rows = [f"| {key} | {_cell(value)} |" for key, value in described_flat(run).items()]
            event = Event(wall_time=time.time(), step=0)
            value = event.summary.value.add(tag="config", metadata=create_summary_metadata("config", ""))
            value.tensor.dtype = 7  # DT_STRING
            value.tensor.string_val.append("\n".join(["| key | value |", "| --- | --- |", *rows]).encode())
            self._writer.add_event(event)
        return folder.name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        event = Event(wall_time=time.time(), step=step)
        for name, number in metrics.items():
            event.summary.value.add(tag=name, simple_value=number)
        self._writer.add_event(event)
        self._writer.flush()

    def finish(self, status: Status) -> None:
        self._writer.close()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
