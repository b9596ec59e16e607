"""Which checkpoints a run can go on from: the newest is whole, all others keep the model alone. No torch."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from rlpost.config.manifest import read_manifest
from rlpost.config.paths import MANIFEST, checkpoints
from rlpost.errors import CheckpointError
from rlpost.files import bytes_of, replaced

ADVICE = "resume from another one"  # where a checkpoint is damaged
STATE_FOLDER = "state"
_TAKEN_OUT = ".state.removed"


def keeps_the_model_alone(checkpoint: Path) -> bool:
    """Whether the manifest names no file of state/. Raises CheckpointError where it cannot be read."""
    files = read_manifest(checkpoint, ADVICE)
    return bool(files) and not any(_is_state(file, checkpoint) for file in files)


def check_resumable(checkpoint: Path) -> None:
    """Raise CheckpointError where `checkpoint` keeps the model alone, with what the run can go on from instead."""
    if not keeps_the_model_alone(checkpoint):
        return
    instead = (
        "resume from latest"
        if any(not keeps_the_model_alone(other) for other in checkpoints(checkpoint.parent)[-1:])
        else f"begin another run from it with model.path={checkpoint}"
    )
    raise CheckpointError(f"{checkpoint} keeps the model alone: {instead}")


def keep_the_model_alone(checkpoint: Path) -> int:
    """Remove what only resuming needs; returns the bytes that this frees.

    The manifest is replaced first: whenever the process dies, it names files that are there, byte for byte.
    """
    files = read_manifest(checkpoint, ADVICE)
    left = {
        str(file.relative_to(checkpoint)): {"bytes": size, "sha256": digest}
        for file, (size, digest) in files.items()
        if not _is_state(file, checkpoint)
    }
    state, taken_out = checkpoint / STATE_FOLDER, checkpoint / _TAKEN_OUT
    if len(left) < len(files):
        with replaced(checkpoint / MANIFEST) as making:
            making.write_text(json.dumps(left, indent=1))
    freed = bytes_of_state(checkpoint)
    shutil.rmtree(taken_out, ignore_errors=True)  # of a process that died here
    if state.is_dir():
        os.replace(state, taken_out)  # whole or not there, also for whoever reads it meanwhile
        shutil.rmtree(taken_out)
    return freed


def bytes_of_state(checkpoint: Path) -> int:
    """Bytes that `keep_the_model_alone` would free."""
    return bytes_of(checkpoint / STATE_FOLDER) + bytes_of(checkpoint / _TAKEN_OUT)


def _is_state(file: Path, checkpoint: Path) -> bool:
    return checkpoint / STATE_FOLDER in file.parents
