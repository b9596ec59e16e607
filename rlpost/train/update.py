"""One optimizer step: microbatches that fit, a gradient that is finite, or a stop that says why."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from rlpost.assemble import GRPOParts
from rlpost.batching import Row, pack
from rlpost.errors import DivergedError
from rlpost.logprobs import token_log_probs
from rlpost.objectives.grpo import GRPOLossOutput
from rlpost.optim import learning_rate, set_learning_rate
from rlpost.precision import autocast
from rlpost.settings import GRPOSettings


@dataclass
class Update:
    """What one optimizer step did; `outputs` is empty where nothing could change a weight."""

    outputs: list[GRPOLossOutput]
    grad_norm: float


class Microbatches:
    """How many tokens one forward and backward may hold; halves when memory runs out.

    None asked for: 2048 on a CPU, 16384 on a GPU.
    """

    def __init__(
        self,
        tokens: int | None,
        device: torch.device,
        note: Callable[[str], None],
        progress: Callable[[int, int], None],
    ) -> None:
        self.tokens = tokens or (2048 if device.type == "cpu" else 16384)
        self.device = device
        self._note = note
        self.progress = progress  # told the completions that one update has gone through, and how many it has

    def until_they_fit(self, start_over: Callable[[], None]) -> Iterator[contextlib.AbstractContextManager[None]]:
        """Attempts at the same work: `for attempt in ...: with attempt: <work>`, ended by the first that fits.

        The gradient does not depend on the split, so `start_over` and a smaller budget are exact.
        """
        fitted = False

        @contextlib.contextmanager
        def attempt() -> Iterator[None]:
            nonlocal fitted
            try:
                yield
                fitted = True
            except RuntimeError as error:
                if not is_out_of_memory(error) or self.tokens <= 1:
                    raise

        while True:
            yield attempt()
            if fitted:
                return
            self.tokens //= 2
            start_over()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._note(f"out of memory: going on with tokens_per_microbatch={self.tokens}")


def update(
    settings: GRPOSettings, parts: GRPOParts, microbatches: Microbatches, minibatch: Sequence[Row], number: int
) -> Update:
    """Optimizer step `number` (from 0) of the run, over `minibatch`.

    Raises FloatingPointError, before any weight changed, if the loss or the gradient is not finite.
    """
    normaliser = parts.objective.normaliser(minibatch)
    needed = [row for row in minibatch if parts.objective.needs(row)]
    set_learning_rate(
        parts.optimizer, learning_rate(number, settings.steps * updates_per_step(settings), settings.optim)
    )
    if not needed:
        return Update([], 0.0)
    outputs = accumulate_gradient(settings, parts, microbatches, needed, normaliser)
    norm = nn.utils.clip_grad_norm_(parts.model.parameters(), settings.optim.max_grad_norm).item()
    loss = sum(output.loss.item() for output in outputs)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise FloatingPointError(f"loss {loss:g}, gradient norm {norm:g}")
    parts.optimizer.step()
    parts.optimizer.zero_grad(set_to_none=True)
    return Update(outputs, norm)


def accumulate_gradient(
    settings: GRPOSettings, parts: GRPOParts, microbatches: Microbatches, rows: Sequence[Row], normaliser: int
) -> list[GRPOLossOutput]:
    """Backward over every microbatch of `rows`; their outputs, without their graphs."""
    outputs: list[GRPOLossOutput] = []

    def start_over() -> None:
        outputs.clear()
        parts.optimizer.zero_grad(set_to_none=True)

    for attempt in microbatches.until_they_fit(start_over):
        with attempt:
            done = 0
            for microbatch in pack(rows, microbatches.tokens, parts.device):
                with autocast(settings.model.autocast, parts.device):
                    output = parts.objective(parts.model, microbatch, normaliser)
                output.loss.backward()
                output.loss = output.loss.detach()
                outputs.append(output)
                done += len(microbatch.rows)
                microbatches.progress(done, len(rows))
    return outputs


@torch.no_grad()
def fill_log_probs(
    settings: GRPOSettings, parts: GRPOParts, microbatches: Microbatches, model: nn.Module, rows: Sequence[Row]
) -> list[torch.Tensor]:
    """log π of `model` for each row: (length of its response,), 0 on ids that were not sampled."""
    filled: list[torch.Tensor] = []
    for attempt in microbatches.until_they_fit(filled.clear):
        with attempt:
            for microbatch in pack(rows, microbatches.tokens, parts.device):
                with autocast(settings.model.autocast, parts.device):
                    log_probs, _ = token_log_probs(model, microbatch, settings.sampling.temperature)
                pieces = log_probs.cpu().split([row.num_trained for row in microbatch.rows])
                for row, values in zip(microbatch.rows, pieces, strict=True):
                    filled.append(torch.zeros(row.response.numel()).masked_scatter_(row.sampled, values))
    return filled


def minibatches(settings: GRPOSettings, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """The rows of each optimizer step: whole groups, in the order they were drawn, `passes` times."""
    size = settings.minibatch_size or len(rows)
    for _ in range(settings.passes):
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


def updates_per_step(settings: GRPOSettings) -> int:
    """Optimizer steps that one step's completions are used for."""
    completions = settings.prompts_per_step * settings.group_size
    return settings.passes * (completions // (settings.minibatch_size or completions))


def diverged(parts: GRPOParts, folder: Path, what: str) -> DivergedError:
    """Write the weights and a report of their gradients to `folder`; the error that stops the run."""
    folder.mkdir(parents=True, exist_ok=True)
    named = parts.model.named_parameters()
    bad = [name for name, p in named if p.grad is not None and not p.grad.isfinite().all()]
    report = {"what": what, "parameters_with_bad_gradient": bad}
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    parts.model.save_pretrained(folder / "model")
    parts.tokenizer.save_pretrained(folder / "model")
    return DivergedError(
        f"stopped before an update that would have destroyed the weights: {what}. The batch, the weights and a report "
        f"are in {folder}; resume with a lower optim.lr"
    )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch could not get memory, on a GPU or from the CPU's allocator."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
