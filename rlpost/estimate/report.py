"""Whether a training fits the machine: said in lines, refused where it cannot, with the settings that help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from rlpost.config.hub_sizes import HUB_MODELS
from rlpost.errors import ConfigError, ResourceError
from rlpost.estimate.machine import Room, disk, host_memory
from rlpost.estimate.needs import (
    MARGIN,
    Part,
    TrainingSettings,
    Work,
    checkpoint_bytes,
    disk_of,
    floor,
    lighter,
    longest_that_fits,
    parts_of,
    peak,
    work_of,
)
from rlpost.estimate.shape import Shape, shape_of_config
from rlpost.text import readable

COUNTED = 1e200  # bytes; sums of more come near the end of what a float holds


@dataclass(frozen=True)
class Machine:
    """What there is; None where it could not be asked, `gpu` None too where nothing is trained on one."""

    host: Room | None
    gpu: Room | None
    disk: Room | None


@dataclass(frozen=True)
class Needs:
    """What a training takes of a machine, by estimate."""

    work: Work
    parts: list[Part]
    machine: Machine

    @classmethod
    def of(cls, settings: TrainingSettings, shape: Shape, machine: Machine) -> Needs:
        """The needs of `settings` with a model of this `shape`."""
        device = settings.model.device
        on_gpu = device.startswith("cuda") or (device == "auto" and machine.gpu is not None)
        gpu_bytes = (machine.gpu.total if machine.gpu else 0) if on_gpu else None
        work = work_of(settings, shape, gpu_bytes=gpu_bytes)
        return cls(work, parts_of(work), machine)

    def lines(self) -> list[str]:
        """The estimate, as a plan and the first lines of a training say it."""
        told = [f"memory  {self._told(on_gpu=True)}"] if self.work.on_gpu else []
        told += [f"memory  {self._told(on_gpu=False)}"]
        free = f", of {readable(self.machine.disk.free)} free" if self.machine.disk else ""
        told += [f"disk    about {readable(disk_of(self.work))} for checkpoints at most, by estimate{free}"]
        if self.may_not_fit and not self.impossible():
            told.append(f"fits    perhaps not; what helps: {self.advice()}")
        return told

    def impossible(self) -> str | None:
        """Why it cannot work at all; None where it may."""
        for on_gpu, room, where in ((True, self.machine.gpu, "the GPU"), (False, self.machine.host, "this machine")):
            least = floor(self.parts, on_gpu=on_gpu)
            if room is not None and least > room.total:
                held = ", ".join(part.name for part in self.parts if floor([part], on_gpu=on_gpu))
                return (
                    f"{held} take {readable(least)}, and {where} has {readable(room.total)} in all; what helps: "
                    f"{self.advice(floor)}"
                )
            if room is not None and (told := self._too_long(room, where, on_gpu=on_gpu)):
                return told
        whole, _ = checkpoint_bytes(self.work)
        if self.machine.disk is not None and whole > self.machine.disk.free:
            return (
                f"one checkpoint takes {readable(whole)}, and {readable(self.machine.disk.free)} are free for it: free "
                "some space, or give another --out"
            )
        return None

    def _too_long(self, room: Room, where: str, *, on_gpu: bool) -> str | None:
        """What to say where one sequence as long as the settings allow is clearly more than `where` holds."""
        work = replace(self.work, microbatch=self.work.longest)
        size = peak(parts_of(work), on_gpu=on_gpu)
        fits = longest_that_fits(work, room.total, on_gpu=on_gpu)
        if size <= MARGIN * room.total or work.on_gpu != on_gpu or not fits:  # without one token, length is no matter
            return None
        key = "max_tokens" if work.sampler is None else "env.max_completion_tokens"
        return (
            f"a sequence of {work.longest} tokens, which is not split, takes {readable(size)} with all else, and "
            f"{where} has {readable(room.total)} in all: {fits} tokens fit, so lower {key}; what helps too: "
            f"{self.advice()}"
        )

    def check(self, model: str) -> None:
        """Raise ResourceError where it cannot work at all."""
        if (reason := self.impossible()) is not None:
            raise ResourceError(f"training {model} cannot work here: {reason}")

    @property
    def may_not_fit(self) -> bool:
        """Whether the estimate and its margin are more than what is free."""
        rooms = ((True, self.machine.gpu), (False, self.machine.host))
        disk = self.machine.disk
        return any(
            room is not None and MARGIN * peak(self.parts, on_gpu=on_gpu) > room.free for on_gpu, room in rooms
        ) or (disk is not None and disk_of(self.work) > disk.free)

    def advice(self, measure: Callable[..., int] = peak) -> str:
        """The settings that help, in the order in which to try them, with what each saves alone."""
        on_gpu = self.work.on_gpu
        now = measure(self.parts, on_gpu=on_gpu)
        saved = [(word, now - measure(parts_of(other), on_gpu=on_gpu)) for word, other in lighter(self.work)]
        told = [f"{word} (saves {readable(size)})" for word, size in saved if size > 0.02 * now]
        smaller = self._smaller()
        told.append("a smaller model" + (f", as model={smaller}" if smaller else ""))
        return ", ".join(told + ([] if on_gpu else ["a GPU"]))

    def as_dict(self) -> dict[str, Any]:
        """The estimate in bytes, for `--dry-run --json`."""
        rooms = {"host": (False, self.machine.host), "gpu": (True, self.machine.gpu if self.work.on_gpu else None)}
        memory = {
            where: {
                "estimated": peak(self.parts, on_gpu=on_gpu),
                "free": room.free if room else None,
                "total": room.total if room else None,
                "parts": {part.name: part.bytes for part in self.parts if part.on_gpu == on_gpu},
            }
            for where, (on_gpu, room) in rooms.items()
            if not on_gpu or self.work.on_gpu
        }
        disk = {"estimated": disk_of(self.work), "free": self.machine.disk.free if self.machine.disk else None}
        impossible = self.impossible()
        fits = "no" if impossible else "perhaps not" if self.may_not_fit else "yes"
        return {"memory": memory, "disk": disk, "fits": fits, "reason": impossible}

    def _told(self, *, on_gpu: bool) -> str:
        room = self.machine.gpu if on_gpu else self.machine.host
        here = [part for part in self.parts if part.on_gpu == on_gpu]
        size = peak(self.parts, on_gpu=on_gpu)
        free = f" of {readable(room.free)} free" if room else ""
        where = " on the GPU" if on_gpu else " beside the GPU" if self.work.on_gpu else ""
        largest = max((part.bytes for part in here if not part.lasting), default=0)
        told = [part for part in here if (part.lasting or part.bytes == largest) and part.bytes > 0.01 * size]
        parts = ", ".join(f"{part.name} {_figure(part.bytes)}" for part in told)
        return f"about {readable(size)} to {readable(MARGIN * size)}{free}{where}, by estimate (in GB): {parts}"

    def _smaller(self) -> str | None:
        """The largest model that rlpost has an option for and that fits as it is."""
        room = self.machine.gpu if self.work.on_gpu else self.machine.host
        if room is None:
            return None
        shapes = [(known.option, shape_of_config(known.config)) for known in HUB_MODELS.values()]
        fitting = [
            (shape.parameters, option)
            for option, shape in shapes
            if shape is not None
            and shape.parameters < self.work.shape.parameters
            and MARGIN * peak(parts_of(replace(self.work, shape=shape)), on_gpu=self.work.on_gpu) < room.free
        ]
        return max(fitting)[1] if fitting else None


def needs_of(settings: TrainingSettings, shape: Shape | None, folder: Path, gpu: Room | None) -> Needs | None:
    """The needs of `settings` on this machine with its GPU; None where the model's size is not known.

    Raises ConfigError for a setting so large that they cannot be counted.
    """
    if shape is None:
        return None
    try:
        needs = Needs.of(settings, shape, Machine(host_memory(), gpu, disk(folder)))
        most = max(disk_of(needs.work), *(peak(needs.parts, on_gpu=on_gpu) for on_gpu in (True, False)))
    except ArithmeticError:
        needs, most = None, inf
    if most > COUNTED:
        _, key = max(_numbers(settings))
        raise ConfigError(f"{key} is too large: what the training takes cannot be counted with it; lower it")
    return needs


def _numbers(settings: Any, group: str = "") -> Iterator[tuple[float, str]]:
    """The numbers in settings, each with its key."""
    for name, value in vars(settings).items():
        if is_dataclass(value):
            yield from _numbers(value, f"{group}{name}.")
        elif isinstance(value, int | float):
            yield value, f"{group}{name}"


def _figure(size: float) -> str:
    """GB in two or three digits."""
    return f"{size / 1e9:.3g}" if size >= 1e8 else f"{size / 1e9:.2f}"
