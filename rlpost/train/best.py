"""Which of a training's evaluations was best: by the task's accuracy, never by the reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlpost.checkpoint import point_best
from rlpost.config.paths import BEST
from rlpost.run import Run

ACCURACY = "eval/accuracy_lenient"


@dataclass
class BestSoFar:
    """The evaluation after a step with the highest lenient accuracy on held-out prompts; the earlier of equal ones."""

    best_step: int | None = None  # None: no evaluation has measured accuracy
    best_accuracy: float | None = None

    def is_new_best(self, step: int, evaluated: Mapping[str, float]) -> bool:
        """Take in the metrics of the evaluation after `step`; whether it is the best from now on."""
        accuracy = evaluated.get(ACCURACY)
        if accuracy is None or (self.best_accuracy is not None and accuracy <= self.best_accuracy):
            return False
        self.best_step, self.best_accuracy = step, accuracy
        return True


def restore_best(run: Run, best: BestSoFar) -> None:
    """Let `checkpoints/best` be what it was at the step that the run goes on from."""
    if not point_best(run.folder / "checkpoints", best.best_step) and best.best_step is not None:
        run.screen.note(
            f"the checkpoint of step {best.best_step}, the best so far, is no longer there: "
            f"checkpoints/{BEST} comes back with a better one"
        )


def best_line(run: Run, best: BestSoFar, before: Mapping[str, float] | None) -> str:
    """Which step was best, its accuracy, and where its checkpoint is; empty where accuracy was not measured."""
    if best.best_step is None or best.best_accuracy is None:
        return ""
    at_first = (before or {}).get(ACCURACY)
    line = f"best: after step {best.best_step}, {best.best_accuracy:.1%}, in {run.folder}/checkpoints/{BEST}"
    return line if at_first is None or at_first <= best.best_accuracy else f"{line}; the starting model had more"
