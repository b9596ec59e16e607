"""The manifest of a checkpoint: size and SHA-256 of every file, which what is read is checked against."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rlpost.config.paths import MANIFEST
from rlpost.errors import CheckpointError
from rlpost.files import json_in

PARTS = ("model", "adapter")  # folders of a checkpoint that can be given as a model


def sha256(file: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_manifest(checkpoint: Path, advice: str) -> dict[Path, tuple[int, str]]:
    """File -> size and SHA-256. Raises CheckpointError, ending in `advice`, where it cannot be read."""
    try:
        manifest = json_in(checkpoint / MANIFEST)
        return {checkpoint / name: (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
    except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint} is no complete checkpoint: its {MANIFEST} cannot be read ({error}); {advice}"
        ) from error


def check_file(file: Path, expected: tuple[int, str] | None, advice: str) -> None:
    """Raise CheckpointError, ending in `advice`, unless `file` is there byte for byte."""
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: the checkpoint is damaged, {advice}")
    if (file.stat().st_size, sha256(file)) != expected:
        raise CheckpointError(f"{file} is not what was written: the checkpoint is damaged, {advice}")


def verify_model(folder: Path) -> None:
    """Raise CheckpointError where `folder` is a checkpoint's model or adapter, and not as it was written.

    Files beside it, such as the optimizer's state, are not looked at: a model is read without them.
    """
    whole = folder.resolve()
    checkpoint = whole.parent
    advice = "give another one as the model"
    if whole.name not in PARTS or not (checkpoint / MANIFEST).is_file():
        if whole.name in PARTS and checkpoint.name.startswith("step-") and checkpoint.parent.name == "checkpoints":
            raise CheckpointError(f"{checkpoint} is no complete checkpoint: it has no {MANIFEST}; {advice}")
        return
    expected = read_manifest(checkpoint, advice)
    written = [file for file in expected if whole in file.parents]
    for file in dict.fromkeys([*written, *whole.glob("*.safetensors"), *whole.glob("*.json")]):
        check_file(file, expected.get(file), advice)
