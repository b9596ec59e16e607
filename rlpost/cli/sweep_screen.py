"""What a sweep shows: a line a job, the one under way live, and a table at the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from rlpost.catalog import TRAIN_SFT
from rlpost.cli.columns import fitted_table
from rlpost.errors import STOPPED_BY, ConfigError
from rlpost.folding import one_line, width_of
from rlpost.record import LOSS, Interval, MetricsFile, interval, main_figure
from rlpost.text import printable

if TYPE_CHECKING:
    from rlpost.cli.sweep_jobs import Sweep, SweepJob

LONGEST_CELL = 32


class SweepScreen:
    """Lines on `stream`; on a terminal the last of them is written over while a job runs."""

    def __init__(self, sweep: Sweep, stream: TextIO) -> None:
        self.sweep = sweep
        self.stream = stream
        self._said_stopping = False
        self._rows: MetricsFile  # of the job under way
        self._last_row: Mapping[str, Any] | None
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"

    def begin(self) -> None:
        """What is about to run."""
        count = len(self.sweep.jobs)
        self._line(f"{count} jobs of rlpost {self.sweep.command.verb}, one after the other; each has its log.txt in")
        self._line(f"{self.sweep.folder}/")

    def begun(self, number: int, job: SweepJob) -> None:
        """A job that begins, said where there is no live line to show it."""
        self._rows, self._last_row = MetricsFile(job.folder / "metrics.jsonl"), None
        if not self.live:
            self._line(self._row(number, job, "begun", "", 0.0))

    def show(self, number: int, job: SweepJob, seconds: float, *, stopping: bool) -> None:
        """The job under way, on a terminal, and once that it has been asked to stop."""
        if stopping and not self._said_stopping:
            self._said_stopping = True
            self._clear()
            self._line("stopping: the job under way saves first; Ctrl-C again leaves at once")
        if not self.live:
            return
        state, figure = self._under_way(job)
        line = self._row(number, job, "stopping" if stopping else state, figure, seconds)
        self.stream.write(f"\r\x1b[2K{line}")
        self.stream.flush()

    def _under_way(self, job: SweepJob) -> tuple[str, str]:
        """How far the job is: `step 12/60` and its figure."""
        if not job.trains:
            return "evaluating", ""
        self._last_row = [self._last_row, *self._rows.new_rows()][-1]
        if self._last_row is None:
            return "starting", ""
        of = "" if job.steps is None else f"/{job.steps}"
        return f"step {self._last_row['step']}{of}", _figure(self._last_row)

    def ended(self, number: int, job: SweepJob, *, known: bool = False) -> None:
        """A job that has ended, now or (`known`) in an earlier attempt."""
        outcome = job.outcome
        code = outcome.exit_code
        words: dict[int | None, str] = {0: "done", **dict.fromkeys(STOPPED_BY.values(), "stopped")}
        state = "done before" if known else words.get(code, f"failed ({code})")
        self._clear()
        self._line(self._row(number, job, state, _figure(_metrics(job)), outcome.seconds))
        if outcome.error is not None:
            self._line(f"      {outcome.error}")
            self._line(f"      see {job.folder}/log.txt")

    def end(self) -> None:
        """The table, and how to go on where something is left to do."""
        jobs = self.sweep.jobs
        self._line("")
        width = shutil.get_terminal_size().columns if self.stream.isatty() else None
        rows = summary(self.sweep)
        widest_first = sorted(range(len(jobs[0].job.differs)), key=lambda i: -max(width_of(row[i]) for row in rows))
        for line in fitted_table(rows, width, cuttable=widest_first):
            self._line(line)
        self._line("")
        left = sum(job.outcome.exit_code != 0 for job in jobs)
        if any(job.outcome.exit_code == ConfigError.exit_code for job in jobs):
            self._line("stopped: a configuration that cannot work would fail the other jobs too")
        if left:
            where = "" if self.sweep.named else f" --out {self.sweep.folder}"
            self._line(f"not done: {left} of {len(jobs)} jobs; to go on: the same command with --resume auto{where}")
        self._line(f"results  {self.sweep.folder}/sweep.json")

    def _row(self, number: int, job: SweepJob, state: str, figure: str, seconds: float) -> str:
        """A job's line, cut to the screen where there is one."""
        from rich.cells import set_cell_size

        from rlpost.screen.lines import clock

        total = len(self.sweep.jobs)
        index = f"{number:>{len(str(total))}}/{total}"
        row = printable(f"{index}  {state:<12}  {figure:<13}  {clock(seconds):>7}  {job.job.title}")
        if not self.stream.isatty():
            return row
        return set_cell_size(row, shutil.get_terminal_size().columns - 1).rstrip()

    def _clear(self) -> None:
        if self.live:
            self.stream.write("\r\x1b[2K")

    def _line(self, text: str) -> None:
        print(printable(text), file=self.stream, flush=True)


def summary(sweep: Sweep) -> list[list[str]]:
    """A header, and a row a job: what differs, what came of it, seconds and exit code."""
    swept = list(sweep.jobs[0].job.differs)
    trained = sweep.jobs[0].trains
    figures = ["reward", "held-out before", "held-out after"] if trained else ["reward", "accuracy"]
    if trained and sweep.command is TRAIN_SFT:
        figures = ["loss", "held-out before", "held-out after"]
    rows = [[*swept, *figures, "seconds", "exit"]]
    for job in sweep.jobs:
        outcome = job.outcome
        values = [one_line(text, LONGEST_CELL, counted=True) for text in job.job.differs.values()]
        code = "not run" if outcome.exit_code is None else str(outcome.exit_code)
        rows.append([*values, *_results(outcome.result, trained), f"{outcome.seconds:.1f}", code])
    return rows


def _results(result: Mapping[str, Any] | None, trained: bool) -> list[str]:
    """The cells of the last step's reward and the held-out figures, or of an evaluation's, with their intervals."""
    if result is None:
        return ["-"] * (3 if trained else 2)
    if not trained:
        found = result["result"]
        ends = (found.get("reward_low"), found.get("reward_high"))
        reward = Interval(found["reward_mean"], *ends, found.get("num_prompts"), is_share=False)
        accuracy = found["accuracy_lenient"] and Interval(**found["accuracy_lenient"])
        return [reward.told(), accuracy.told() if accuracy else "-"]
    metrics = result["metrics"] or {}
    if "loss/sft" in metrics and "reward/mean" not in metrics:
        losses = [interval(each, LOSS) for each in _evaluations(result)]
        return [f"{metrics['loss/sft']:.3f}", *(loss.told("row") if loss else "-" for loss in losses)]
    reward = metrics.get("reward/mean")
    found = [main_figure(each) for each in _evaluations(result)]
    return ["-" if reward is None else f"{reward:.2f}", *(each.told() if each else "-" for each in found)]


def _evaluations(result: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return result["evaluation_before"] or {}, result["evaluation_after"] or {}


def _metrics(job: SweepJob) -> Mapping[str, Any]:
    """The last figures of a job that has ended."""
    result = job.outcome.result
    if result is None:
        return {}
    return {"reward/mean": result["result"]["reward_mean"]} if not job.trains else result["metrics"] or {}


def _figure(row: Mapping[str, Any]) -> str:
    reward, loss = row.get("reward/mean"), row.get("loss/sft")
    if reward is None:
        return "" if loss is None else f"loss {loss:.3f}"
    return f"reward {reward:.2f}"
