"""The model of a training as its loop sees it: on one rank, this process, or on several (train/several_ranks.py)."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch

from rlpost.model.packing import Row, as_reference_reads
from rlpost.model.weights import is_sharded
from rlpost.train.update import Learner, Microbatches, Objective, Update, bad_gradients, read_log_probs, update

Progress = Callable[[int, int], None]


class Ranks:
    """The ranks that train, which are this process alone: most trainings have one."""

    def __init__(self) -> None:
        self.own: Rank
        self.total_updates = 1  # optimizer steps of the whole run: the length of the learning rate's schedule

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """End the other ranks, if any."""

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return 1

    def begin(self, own: Rank, tokens_per_microbatch: int | None) -> None:
        """Begin the training with `own`, this rank's model; waits until the others have loaded theirs."""
        self.own = own

    def over(self, total_updates: int) -> Self:
        """Set the schedule's length in optimizer steps; returns self."""
        self.total_updates = total_updates
        return self

    def update(self, minibatch: Sequence[Row], number: int) -> Update[Any]:
        """Take optimizer step `number` (from 0); has all ranks' outputs. Raises as `rlpost.train.update.update`."""
        return self.own.update(minibatch, number, self.total_updates)

    def read_log_probs(
        self, rows: Sequence[Row], *, temperature: float = 1.0, progress: Progress = lambda done, total: None
    ) -> list[torch.Tensor]:
        """log π of the trained model for each row, of its response's length, 0 on ids that are not trained.

        `progress` is called with the rows that this rank has read so far and with their total.
        """
        return self._read("read_log_probs", rows, temperature, progress)

    def read_reference(self, rows: Sequence[Row], temperature: float) -> list[torch.Tensor]:
        """log π of the reference for each row, in the same way."""
        return self._read("read_reference", rows, temperature)

    def _read(self, method: str, rows: Sequence[Row], temperature: float, *more: Any) -> list[torch.Tensor]:
        return getattr(self.own, method)(rows, temperature, *more)

    def fill_reference(self, rows: Sequence[Row], temperature: float = 1.0) -> None:
        """Set the reference's log-probs on `rows`, if the loss has a reference; it reads the prompts meant for it."""
        if self.own.reference is not None and rows:
            for row, log_probs in zip(rows, self.read_reference(rows, temperature), strict=True):
                row.ref_log_probs = log_probs

    def on_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call `method` of each rank's `Rank`; returns their results, this rank's first."""
        return [getattr(self.own, method)(*arguments)]

    def share_objective(self) -> None:
        """Send the objective, which has changed, to the other ranks."""
        self.on_all("take_objective", self.own.objective)

    def move_reference(self, share: float) -> None:
        """See `Rank.move_reference`, on every rank."""
        self.on_all("move_reference", share)

    def save_moments(self) -> Callable[[Path], Any] | None:
        """The function that writes the optimizer's state if the ranks share it; None if rank 0 has all of it."""
        return partial(self.on_all, "save_moments") if is_sharded(self.own.model) else None

    def bad_gradients(self) -> list[str]:
        """Names of the parameters whose gradient is not finite in some rank's part."""
        return list(dict.fromkeys(chain.from_iterable(self.on_all("bad_gradients"))))

    def free_unused(self) -> None:
        """See `Rank.free_unused`, on every rank."""
        self.on_all("free_unused")

    def memory(self) -> dict[str, float]:
        """Each rank's peak memory in GB; empty with one rank."""
        if self.count == 1:
            return {}
        return {f"memory/rank_{number}_gb": peak for number, peak in enumerate(self.on_all("peak_gb"))}


@dataclass(eq=False)
class Rank(Learner[Any]):
    """One rank's model, or its part of it, and the work that all ranks do at once."""

    microbatches: Microbatches

    def update(self, rows: Sequence[Row], number: int, total_updates: int) -> Update[Any]:
        """Take optimizer step `number` of `total_updates`; this rank reads `rows` of the minibatch."""
        return update(self, self.microbatches, rows, number, total_updates)

    def read_log_probs(
        self, rows: Sequence[Row], temperature: float, progress: Progress = lambda done, total: None
    ) -> list[torch.Tensor]:
        """log π of the trained model for each of `rows`."""
        return read_log_probs(self.model, self.microbatches, rows, temperature=temperature, progress=progress)

    def read_reference(self, rows: Sequence[Row], temperature: float) -> list[torch.Tensor]:
        """log π of the reference for each of `rows`."""
        assert self.reference is not None
        with self.reference() as model:
            return read_log_probs(model, self.microbatches, as_reference_reads(rows), temperature=temperature)

    @torch.no_grad()
    def move_reference(self, share: float) -> None:
        """Move the reference towards the model: it becomes share * model + (1 - share) * reference."""
        assert self.reference is not None
        with self.reference() as reference:
            for frozen, trained in zip(reference.parameters(), self.model.parameters(), strict=True):
                frozen.lerp_(trained, share)

    def take_objective(self, objective: Objective[Any]) -> None:
        """Minimise this from now on."""
        self.objective = objective

    def save_moments(self, folder: Path) -> None:
        """Write this rank's part of the optimizer's state."""
        from rlpost.model.sharding import save_moments

        save_moments(self.model, self.optimizer, folder)

    def bad_gradients(self) -> list[str]:
        """The parameters whose gradient is not finite."""
        return bad_gradients(self.model)

    def free_unused(self) -> None:
        """Free the device memory that torch has cached, for an engine that wakes on the same GPU."""
        if self.microbatches.device.type == "cuda":
            torch.cuda.empty_cache()

    def peak_gb(self) -> float:
        """Peak memory of this rank in GB: of its GPU, or else of its process."""
        if self.microbatches.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
