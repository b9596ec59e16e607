"""Which folder an evaluation is written to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlpost.cli.run_folder import asked_folder, first_free
from rlpost.config.paths import EVALS, RESULT, SAMPLES, SWEEP_FILE, is_run_folder
from rlpost.errors import CheckpointError, ConfigError


def choose_evaluation_folder(out: Path | None, name: str | None, stem: str) -> Path:
    """The folder that `--out` and `--name` ask for; `evals/STEM-N` where they leave it open.

    Nothing is created. Raises ConfigError for a name that is taken or cannot be one.
    """
    asked = asked_folder(out, name, root=EVALS, kind="an evaluation")
    if asked is None:
        return first_free(stem, EVALS)
    for file, held in ((RESULT, "an evaluation"), (SAMPLES, "an evaluation"), (SWEEP_FILE, "a sweep")):
        if (asked / file).exists():
            raise ConfigError(f"{asked} already holds {held}: give another --name")
    if is_run_folder(asked):
        raise ConfigError(f"{asked} holds a run: give another --name for the evaluation")
    return asked


@contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """The folder is there meanwhile, before anything long is begun; where that fails and it is empty it goes again.

    Raises CheckpointError where it cannot be made.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error}; give another --out") from error
    try:
        yield
    finally:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
