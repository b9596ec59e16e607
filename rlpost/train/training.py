"""A training: its parts, its loop over steps, and the watchers of each step.

    run(settings, request, assemble, learn)

`assemble(settings, checkpoint)` makes the parts, `learn(run, parts)` is the loop. What happens in a step is a line of
the loop; what is not the algorithm (record, evaluations, checkpoints, screen, trackers) is a watcher in the list below.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlpost.catalog import WATCHERS
from rlpost.settings.commands import RunRequest
from rlpost.train.run import P, Run, S, Watcher
from rlpost.train.step import NotFiniteError
from rlpost.train.watchers import (
    Checkpoints,
    Evaluations,
    OnScreen,
    OnTracker,
    PluginWatcher,
    Recording,
    Symptoms,
    Timing,
)


def run(
    settings: S,
    request: RunRequest,
    assemble: Callable[[S, Path | None], P],
    learn: Callable[[Run[S, P], P], None],
) -> int:
    """Begin or resume the training that `settings` and `request` describe; returns the process's exit code.

    `assemble` gets the folder of the checkpoint from which the run resumes, or None.
    """
    with Run[S, P](settings, request) as training:
        training.signals.catch()
        parts = training.load(assemble, watchers_of)
        try:
            learn(training, parts)
        except NotFiniteError as error:
            raise training.diverged(error) from error
        training.check_ended()
    return training.signals.exit_code


def watchers_of(run: Run[Any, Any]) -> list[Watcher]:
    """The watchers of a run, in the order in which they see a step; they end in the opposite order."""
    return [
        Timing(run),  # first, so that the time of a step is that of its loop
        OnScreen(run),  # before an evaluation, which may take long
        *(PluginWatcher(run, *row) for row in WATCHERS.items()),  # before the step is measured, recorded and saved
        Evaluations(run),
        Recording(run),  # with the figures of the evaluation
        OnTracker(run),  # follows the record
        Symptoms(run),
        Checkpoints(run),  # after all that has a state: it knows the step's evaluation, its alarms and its stop
    ]
