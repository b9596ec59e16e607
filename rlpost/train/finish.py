"""How a step ends: recorded, saved where that is due, then measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from rlpost.checkpoint import mark_best
from rlpost.run import Run
from rlpost.runs import has_evaluation, read_metrics
from rlpost.settings import CheckpointSettings
from rlpost.train.best import BestSoFar


def finish(
    run: Run,
    step: int,
    metrics: Mapping[str, float],
    batch: TensorDictBase | None,
    best: BestSoFar,
    settings: CheckpointSettings,
    *,
    save: Callable[[], None],
    evaluate: Callable[[], Mapping[str, float]],
    evaluation_due: bool,
) -> None:
    """Record `step`, save it if that is due, and evaluate if that is.

    What is measured is saved before, so that a signal can end the evaluation: its figures are not
    recorded then. A step that none was better than so far is saved after its evaluation at the latest.
    """
    measured = evaluation_due and not run.stopping
    run.screen.phase("recording", f"step {step}")
    run.record(step, metrics, batch, evaluation_follows=measured)
    saved = run.due(step, settings.every, settings.every_minutes)
    if saved:
        save()
    evaluated: Mapping[str, float] = {}
    if measured:
        with run.abandoning(f"the evaluation after step {step}", saved=saved):
            evaluated = evaluate() if not run.stopping else {}
        run.add_evaluation(evaluated)
    is_best = best.is_new_best(step, evaluated)
    if not saved and (is_best or run.due(step)):
        save()
    elif is_best:
        mark_best(run.folder / "checkpoints", step, settings.keep_last)


def make_up(
    run: Run,
    step: int,
    best: BestSoFar,
    settings: CheckpointSettings,
    *,
    evaluate: Callable[[], Mapping[str, float]],
    evaluation_due: bool,
) -> None:
    """Evaluate after `step`, the last of a run that goes on, if that was due and a signal has ended it."""
    if step == 0 or not evaluation_due or not run.owes_evaluation(step):
        return
    evaluated = evaluate()
    run.add_evaluation(evaluated)
    if best.is_new_best(step, evaluated):
        mark_best(run.folder / "checkpoints", step, settings.keep_last)


def evaluations_until(checkpoint: Path, step: int) -> list[dict[str, Any]]:
    """The lines of the evaluations up to `step` of the run that `checkpoint` is of: it was saved before its own."""
    rows, _ = read_metrics(checkpoint.resolve().parents[1] / "metrics.jsonl")
    return [row for row in rows if 0 < row["step"] <= step and has_evaluation(row)]
