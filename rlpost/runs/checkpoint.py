"""Checkpoints: written whole or not at all, and never read without being checked.

step-000050/
    model/          a plain HF folder; its README.md says how it was made
    adapter/        of a LoRA run: what is trained, as peft writes it; model/ has it merged
    reference/      of a run whose reference moves: that model
    state/          tensors.safetensors, state.json: what resuming needs beside the weights; in the newest alone
        optimizer/  of a sharded run: the moments, a file a rank, readable on any number of ranks
    manifest.json   size and SHA-256 of every file but README.md, written last
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from rlpost.config import paths
from rlpost.errors import CheckpointError
from rlpost.files import MANIFEST, check_listed, give_mode_of, json_in, read_manifest, sha256, sync, sync_tree
from rlpost.model.optim import restore_optimizer
from rlpost.model.weights import SavedWeights, is_sharded
from rlpost.record import PRECISION
from rlpost.runs.reader import checkpoints, step_of, unfinished_saves
from rlpost.runs.removal import ADVICE, check_resumable, keep_the_model_alone, keeps_the_model_alone
from rlpost.text import inline

TENSORS = "state/tensors.safetensors"
MOMENTS = "state/optimizer"
STATE = "state/state.json"
FORMAT = 4  # of the files in state/; no other is read
README = "README.md"  # in the model's folder; not in the manifest, since people edit it


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    write_model: Callable[[Path], None],
    write_adapter: Callable[[Path], None] | None = None,
    write_moments: Callable[[Path], None] | None = None,
    write_reference: Callable[[Path], None] | None = None,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    keep_last: int,
    every: int = 1,
    best: int | None = None,
    in_use: int | None = None,
) -> Path:
    """Write `folder`/step-NNNNNN, point `latest` at it, then remove all but the newest `keep_last`.

    The checkpoint of the step before is removed too, unless that step is a multiple of `every`: it guarded against a
    crash, and this one replaces it. The others lose `state`. `best` is the step of the best
    checkpoint so far, perhaps this one: the link `best` points at it, and it is never removed; nor is that of the step
    `in_use`, from which a sampler has started, and may start again. The folder appears under its name only when
    complete, and older ones are removed after that. Raises CheckpointError when the disk does not take it; then
    everything is as it was.
    """
    final = folder / f"step-{step:06d}"
    making, aside = folder / f".{final.name}.incomplete", folder / f".{final.name}.before.incomplete"
    try:
        for left_by_a_crash in unfinished_saves(folder):
            shutil.rmtree(left_by_a_crash)
        (making / "state").mkdir(parents=True)
        parts = {"adapter": write_adapter, MOMENTS: write_moments, paths.REFERENCE: write_reference}
        for name, write in {"model": write_model, **parts}.items():
            if write is not None:
                write(making / name)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, making / TENSORS)
        (making / STATE).write_text(json.dumps({"format": FORMAT, **state}))
        (making / MANIFEST).write_text(json.dumps(_manifest(making), indent=1))
        give_mode_of(making / MANIFEST, making)
        sync_tree(making)  # a name must not outlive what it stands for, where the machine stops
        if final.exists():
            os.replace(final, aside)
        os.replace(making, final)
        sync(folder)
        shutil.rmtree(aside, ignore_errors=True)
        _point(folder, paths.LATEST, final.name)
        point_best(folder, best)
        _remove_old(folder, keep_last, every, step, {best, in_use})
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        raise CheckpointError(
            f"cannot write checkpoint {final}: {error}; free some space or give another --out, then --resume auto"
        ) from error
    finally:
        if aside.exists() and not final.exists():
            os.replace(aside, final)
        shutil.rmtree(making, ignore_errors=True)
    return final


def write_readme(model: Path, run: Path, step: int, base: str) -> None:
    """Write the README.md of a checkpoint's folder `model`: the run, the step, the model it began with, the command."""
    commands = (run / "command.txt").read_text(encoding="utf-8").splitlines()
    again = f"rlpost export {shlex.quote(str(run))} --checkpoint step-{step}"
    text = f"""\
# {inline(run.resolve().name)}, step {step}

A checkpoint of rlpost: the model after step {step} of the run {inline(str(run))}.

- base model: {inline(base)}
- command: {inline(commands[-1] if commands else "unknown")}

{inline(again)} writes a folder to hand on, with a model card.
"""
    (model / README).write_text(text, encoding="utf-8")


def load_checkpoint(path: Path) -> tuple[Mapping[str, torch.Tensor], dict[str, Any]]:
    """The tensors, each read when it is asked for, and the state of a checkpoint, after every file was checked.

    Raises CheckpointError as `verify` does, and for a checkpoint that keeps the model alone.
    """
    check_resumable(path)
    verify(path)
    state = json_in(path / STATE)
    return SavedWeights((path / TENSORS).parent), {key: value for key, value in state.items() if key != "format"}


def restore_moments(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Put the optimizer's moments and torch's random state back as the checkpoint `path` has them.

    They may have been written on another number of ranks, divided or whole. Raises CheckpointError for another model's.
    """
    divided, state = (path / MOMENTS).is_dir(), (path / TENSORS).parent
    if divided or is_sharded(model):
        from rlpost.model.sharding import load_moments

        load_moments(model, optimizer, path / MOMENTS if divided else state)
        torch.set_rng_state(SavedWeights(state)["rng"])
    else:
        restore_optimizer(model, optimizer, SavedWeights(state))


def kept_precision(path: Path) -> dict[str, str] | None:
    """The precisions that the checkpoint's run computes in, as `Precision.record` gave them; None if it has none."""
    return json_in(path / STATE).get(PRECISION)


def verify(path: Path) -> None:
    """Raise CheckpointError unless every file of the manifest is there, byte for byte, and its state of this format.

    A checkpoint that keeps the model alone has no state.
    """
    expected = read_manifest(path, ADVICE)
    state = [] if keeps_the_model_alone(path) else [path / TENSORS, path / STATE]
    for file in dict.fromkeys([*state, *expected]):
        check_listed(file, expected.get(file), ADVICE)
    written = json_in(path / STATE).get("format") if state else FORMAT
    if written != FORMAT:
        raise CheckpointError(
            f"{path} is of another version of rlpost (its state has format {written}, this one reads {FORMAT}): resume "
            f"with that version, or begin anew from its weights with model.path={path}"
        )


def drop_checkpoints_after(folder: Path, step: int) -> list[Path]:
    """Remove the checkpoints of later steps, point `latest` at the last one left, and return the removed ones."""
    kept = [path for path in checkpoints(folder) if step_of(path) <= step]
    dropped = [path for path in checkpoints(folder) if step_of(path) > step]
    if dropped:
        if kept:
            _point(folder, paths.LATEST, kept[-1].name)
        else:
            _take_away(folder / paths.LATEST)
    for path in dropped:
        shutil.rmtree(path)
    return dropped


def point_best(folder: Path, step: int | None) -> bool:
    """Point the link `best` at the checkpoint of `step`; without that checkpoint remove the link and return False."""
    found = next((path for path in checkpoints(folder) if step_of(path) == step), None)
    if found is None:
        _take_away(folder / paths.BEST)
        return False
    _point(folder, paths.BEST, found.name)
    return True


def mark_best(folder: Path, step: int, keep_last: int, every: int, in_use: int | None = None) -> None:
    """Let `best` point at the checkpoint of `step`, which was written before it was measured; remove what that frees.

    For `in_use` see `save_checkpoint`. Raises CheckpointError when the disk does not take it.
    """
    try:
        point_best(folder, step)
        _remove_old(folder, keep_last, every, step, {in_use})
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error}; free some space, then --resume auto") from error


def _remove_old(folder: Path, keep_last: int, every: int, step: int, spared: Collection[int | None]) -> None:
    """Remove all but the newest `keep_last` checkpoints, the one of `step`, which was written last, and those `spared`.

    The checkpoint of the step before goes too, unless that step is a multiple of `every`. Those left, except
    the one of `step`, keep the model alone.
    """
    saved = checkpoints(folder)
    superseded = [old for old in saved if step_of(old) == step - 1 and not (every and step_of(old) % every == 0)]
    for old in {*saved[:-keep_last], *superseded}:
        if step_of(old) not in {step, *spared}:
            shutil.rmtree(old)
    for older in checkpoints(folder):
        if step_of(older) != step:
            with contextlib.suppress(CheckpointError):  # reading a damaged checkpoint reports it
                keep_the_model_alone(older)


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != README)
    return {str(f.relative_to(folder)): {"bytes": f.stat().st_size, "sha256": sha256(f)} for f in files}


def _point(folder: Path, link: str, name: str) -> None:
    """Let the link `folder`/`link` point at the checkpoint `name`, in one step."""
    making = folder / f".{link}.new"
    making.unlink(missing_ok=True)
    making.symlink_to(name)
    if (folder / link).is_dir() and not (folder / link).is_symlink():
        _take_away(folder / link)
    os.replace(making, folder / link)
    sync(folder)


def _take_away(link: Path) -> None:
    """Remove a link, or what a copy that follows links (scp, rsync -L) has made of it: a checkpoint once more."""
    if link.is_symlink() or not link.is_dir():
        link.unlink(missing_ok=True)
    else:
        shutil.rmtree(link)


MOMENT = 1.0  # seconds to wait for a save before the screen says so


class Saving:
    """Runs at most one save at a time, in a thread. Nothing that it reads may change before `wait` has returned.

    Nothing is copied: weights and moments do not change before the next update. `say` is called if `wait` takes long.
    """

    def __init__(self, say: Callable[[], None] = lambda: None) -> None:
        self._say = say
        self._thread = ThreadPoolExecutor(1, "rlpost-save")
        self._save: Future[None] | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Call `write` in a thread, after the previous save has ended."""
        self.wait()
        self._save = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until the save is on disk. Raises what `write` raised."""
        save, self._save = self._save, None
        if save is not None:
            if not futures.wait([save], MOMENT).done:
                self._say()
            save.result()
