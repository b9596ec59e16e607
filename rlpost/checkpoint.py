"""Checkpoints: written whole or not at all, and never read without being checked.

    step-000050/
        model/          a plain HF folder
        state/          tensors.safetensors, state.json: what resuming needs beside the weights
        manifest.json   size and SHA-256 of every file, written last
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlpost.errors import CheckpointError

MANIFEST = "manifest.json"


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    write_model: Callable[[Path], None],
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    keep_last: int,
) -> Path:
    """Write `folder`/step-NNNNNN, point `latest` at it, then remove all but the newest `keep_last`.

    The folder appears under its name only when complete. Raises CheckpointError, leaving what was
    there before, when the disk does not take it.
    """
    final = folder / f"step-{step:06d}"
    making = folder / f".{final.name}.incomplete"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(making, ignore_errors=True)
        (making / "state").mkdir(parents=True)
        write_model(making / "model")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, making / "state/tensors.safetensors")
        (making / "state/state.json").write_text(json.dumps(state))
        (making / MANIFEST).write_text(json.dumps(_manifest(making), indent=1))
        if final.exists():
            shutil.rmtree(final)
        os.replace(making, final)
        _point_latest(folder, final.name)
    except OSError as error:
        shutil.rmtree(making, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {final}: {error}; free some space or give another --out, then --resume"
        ) from error
    for old in checkpoints(folder)[:-keep_last]:
        if old != final:
            shutil.rmtree(old)
    return final


def load_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the state of a checkpoint, after every file of it was checked.

    Raises CheckpointError that names the file which is missing or not what was written.
    """
    verify(path)
    tensors = load_file(path / "state/tensors.safetensors")
    return tensors, json.loads((path / "state/state.json").read_text())


def verify(path: Path) -> None:
    """Raise CheckpointError unless every file of the manifest is there, byte for byte."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} is no complete checkpoint: its {MANIFEST} cannot be read ({error}); resume from another one"
        ) from error
    for name, entry in manifest.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: this checkpoint is damaged, resume from another one")
        if file.stat().st_size != entry["bytes"] or _sha256(file) != entry["sha256"]:
            raise CheckpointError(f"{file} is not what was written: this checkpoint is damaged, resume from another one")


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / MANIFEST).is_file())


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(f.relative_to(folder)): {"bytes": f.stat().st_size, "sha256": _sha256(f)} for f in files}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _point_latest(folder: Path, name: str) -> None:
    link = folder / ".latest.new"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    os.replace(link, folder / "latest")
