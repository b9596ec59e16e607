"""What each rank of a training does: rank 0 in its own process, the others as it tells them."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlpost.config.plugins import load_plugins
from rlpost.distributed import Place, device_of, form_group, leave_group
from rlpost.model import shards
from rlpost.model.lora import whole_adapter
from rlpost.model.packing import Row
from rlpost.model.shards import ADAPTER, is_sharded
from rlpost.model.trainable import Reference, Trainable, load_trainable, locate_start
from rlpost.runs.checkpoint import restore_moments
from rlpost.settings import OptimSettings
from rlpost.settings.commands import TrainingSettings
from rlpost.train.sending import as_arrays, as_tensors
from rlpost.train.update import (
    Learner,
    Microbatches,
    Objective,
    Update,
    bad_gradients,
    read_log_probs,
    update,
)
from rlpost.weight_sync.base import named_weights

Progress = Callable[[int, int], None]


class Rank:
    """One rank's model, its part of it, and the work on it that all ranks do at once."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        reference: Reference | None,
        objective: Objective[Any],
        optim: OptimSettings,
        microbatches: Microbatches,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.reference = reference
        self.objective = objective
        self.optim = optim
        self.microbatches = microbatches

    def update(self, rows: Sequence[Row], number: int, total_updates: int) -> Update[Any]:
        """Optimizer step `number` of `total_updates`, of which this rank reads `rows`."""
        learner = Learner(self.model, self.optimizer, self.objective, self.optim, total_updates)
        return update(learner, self.microbatches, rows, number)

    def read_log_probs(
        self, rows: Sequence[Row], temperature: float, progress: Progress = lambda done, total: None
    ) -> list[torch.Tensor]:
        """log π of the trained model for each of `rows`."""
        return read_log_probs(self.model, self.microbatches, rows, temperature=temperature, progress=progress)

    def read_reference(self, rows: Sequence[Row], temperature: float) -> list[torch.Tensor]:
        """log π of the reference for each of `rows`."""
        assert self.reference is not None
        with self.reference() as model:
            return read_log_probs(model, self.microbatches, rows, temperature=temperature)

    def gather(self, name: str) -> None:
        """Take part in gathering a weight, or the adapter, that rank 0 reads."""
        if name == ADAPTER:
            whole_adapter(self.model)
        else:
            named_weights(self.model)[name]  # which gathers it

    def save_moments(self, folder: Path) -> None:
        """Write this rank's part of the optimizer's state."""
        from rlpost.model.sharding import save_moments

        save_moments(self.model, self.optimizer, folder)

    def bad_gradients(self) -> list[str]:
        """The parameters whose gradient is not finite."""
        return bad_gradients(self.model)

    def free_unused(self) -> None:
        """Give the GPU's memory that torch holds and does not use back, for an engine that wakes beside this rank."""
        if self.microbatches.device.type == "cuda":
            torch.cuda.empty_cache()

    def peak_gb(self) -> float:
        """The most memory this rank has held: of its GPU, or else of its process."""
        if self.microbatches.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


class OtherRank:
    """A rank that is not rank 0, in a process of its own; its methods are called from rank 0's."""

    def __init__(self, plugins: list[str], place: Place, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as sink:  # rank 0 has the terminal
            for number in (1, 2):
                os.dup2(sink.fileno(), number)
        load_plugins(plugins)
        self.place = place
        self.conclusion: tuple[int, str] = 0, ""  # the exit code and the words that the training ended with
        self._settings: TrainingSettings
        self._trainable: Trainable
        self._rank: Rank | None = None

    def find_model(self, settings: TrainingSettings) -> None:
        """See `locate_start`."""
        locate_start(settings)

    def form_group(self, device: str, seconds: float) -> None:
        """Join the process group."""
        store = self.place.open_store(seconds)
        form_group(self.place, store, device_of(device, self.place), seconds)

    def load(self, settings: TrainingSettings, checkpoint: Path | None) -> None:
        """The model and its optimizer, as they start or as `checkpoint` has them."""
        torch.manual_seed(settings.seed)
        torch.use_deterministic_algorithms(settings.deterministic)
        self._trainable = load_trainable(settings, checkpoint, with_reference=settings.needs_reference)
        if checkpoint is not None:
            restore_moments(self._trainable.model, self._trainable.optimizer, checkpoint)
        self._settings = settings

    def begin(self, objective: Objective[Any], tokens_per_microbatch: int | None) -> None:
        """What is minimised, and what one forward and backward may hold."""
        settings, loaded = self._settings, self._trainable
        self._rank = Rank(
            loaded.model,
            loaded.optimizer,
            loaded.reference,
            objective,
            settings.optim,
            Microbatches(
                tokens_per_microbatch,
                shards.device_of(loaded.model),
                settings.model.autocast,
                note=lambda text: print(text, flush=True),
                in_step=is_sharded(loaded.model),
            ),
        )

    def work(self, method: str, *arguments: Any) -> Any:
        """Call a method of the rank. One that fails leaves the group, so that nobody waits for this rank in vain."""
        assert self._rank is not None
        try:
            return as_arrays(getattr(self._rank, method)(*as_tensors(arguments)))
        except FloatingPointError:  # which every rank finds, and rank 0 answers
            raise
        except BaseException:
            leave_group()
            raise

    def conclude(self, exit_code: int, reason: str) -> None:
        """The training has ended."""
        self.conclusion = exit_code, reason
        if reason:
            print(f"{self.place} ends: {reason}", flush=True)
        leave_group()
