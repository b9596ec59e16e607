"""One optimizer step: microbatches that fit, a gradient that is finite, or a stop that says why."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from rlpost.distributed import most_over_ranks, sum_gradients, sum_over_ranks
from rlpost.errors import ResourceError
from rlpost.estimate.needs import FEWEST_ON_CPU, MOST_ON_CPU, ON_GPU
from rlpost.model.logprobs import token_log_probs, verdict_of
from rlpost.model.optim import learning_rate, set_learning_rate
from rlpost.model.packing import Microbatch, Reference, Row, filler, largest_group, pack
from rlpost.model.precision import autocast
from rlpost.model.weights import divided_again, whole
from rlpost.settings import Autocast, OptimSettings


class MicrobatchOutput(Protocol):
    """An objective's result for a microbatch."""

    loss: torch.Tensor  # its share of the minibatch loss
    log_probs: torch.Tensor  # (M,) log π_θ of the tokens trained on, detached


Out = TypeVar("Out", bound=MicrobatchOutput)
Out_co = TypeVar("Out_co", bound=MicrobatchOutput, covariant=True)


class Objective(Protocol[Out_co]):
    """A loss over a minibatch that may be split into microbatches.

    One that compares neighbouring rows says how many stay in one microbatch: `rows_together`, otherwise 1.
    """

    def normaliser(self, rows: Sequence[Row]) -> int:
        """The divisor of the sums over `rows`, the whole minibatch, so that the split does not matter."""
        ...

    def needs(self, row: Row) -> bool:
        """Whether `row` can change the gradient."""
        ...

    def __call__(self, model: nn.Module, microbatch: Microbatch, normaliser: int) -> Out_co:
        """The microbatch's share of the loss."""
        ...


@dataclass(eq=False)
class Learner(Generic[Out]):
    """The model, the objective that it minimises, and the optimizer's settings."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    objective: Objective[Out]
    optim: OptimSettings
    reference: Reference | None  # the frozen model that the objective compares with


@dataclass
class Update(Generic[Out]):
    """The result of one optimizer step; `outputs` are of this rank's completions, empty if it needed none."""

    outputs: list[Out]
    grad_norm: float
    stepped: bool = True  # False if no completion of any rank could change a weight
    log_probs: list[torch.Tensor | None] = field(default_factory=list)  # of each row; None: not read


def gradient_of(learner: Learner[Out], microbatches: Microbatches, minibatch: Sequence[Row]) -> Update[Out]:
    """The gradient of `minibatch`, or of all ranks' minibatches together, in the model's parameters; takes no step.

    `stepped` is False, and there is no gradient, where no completion can change a weight.
    """
    normaliser = int(sum_over_ranks(learner.objective.normaliser(minibatch), what="the sizes of their minibatches"))
    needed = [row for row in minibatch if learner.objective.needs(row)]
    if not sum_over_ranks(len(needed), what="the completions they need"):
        return Update([], 0.0, stepped=False)
    outputs, read = accumulate_gradient(learner, microbatches, needed, normaliser)
    sum_gradients(learner.model.parameters())
    norm = whole(nn.utils.get_total_norm([p.grad for p in learner.model.parameters() if p.grad is not None]))
    return Update(outputs, norm.item(), log_probs=[read.get(id(row)) for row in minibatch])


def update(
    learner: Learner[Out], microbatches: Microbatches, minibatch: Sequence[Row], number: int, total_updates: int = 1
) -> Update[Out]:
    """Optimizer step `number` (from 0) of `total_updates`, over `minibatch`, or over all ranks' minibatches together.

    Raises FloatingPointError, before any weight changed, if the loss or the gradient is not finite.
    """
    set_learning_rate(learner.optimizer, learning_rate(number, total_updates, learner.optim))
    computed = gradient_of(learner, microbatches, minibatch)
    if not computed.stepped:
        return computed
    loss = sum_over_ranks(sum(output.loss.item() for output in computed.outputs), what="their losses")
    norm = computed.grad_norm
    if not (math.isfinite(loss) and math.isfinite(norm)):  # clipping by a NaN would spread it to every gradient
        raise FloatingPointError(f"loss {loss:g}, gradient norm {norm:g}")
    nn.utils.clip_grads_with_norm_(learner.model.parameters(), learner.optim.max_grad_norm, torch.tensor(norm))
    learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    return computed


def accumulate_gradient(
    learner: Learner[Out], microbatches: Microbatches, rows: Sequence[Row], normaliser: int
) -> tuple[list[Out], dict[int, torch.Tensor]]:
    """Run forward and backward over every microbatch of `rows`.

    Returns the outputs without their graphs, and log π_θ of each row by its `id`, 0 on ids not sampled.
    """
    outputs: list[Out] = []
    read: dict[int, torch.Tensor] = {}

    def start_over() -> None:
        outputs.clear()
        learner.optimizer.zero_grad(set_to_none=True)

    for attempt in microbatches.until_they_fit(start_over):
        with attempt:
            done = 0
            shared, together = verdict_of(learner.model).reads_packed, getattr(learner.objective, "rows_together", 1)
            for microbatch in microbatches.of(rows, share_prompts=shared, together=together):
                microbatch.reference = learner.reference
                with autocast(microbatches.kind, microbatches.device):
                    output = learner.objective(learner.model, microbatch, normaliser)
                if microbatch.is_filler:
                    (0 * output.loss).backward()
                    continue
                output.loss.backward()
                output.loss = output.loss.detach()
                outputs.append(output)
                read |= zip(map(id, microbatch.rows), of_each_row(output.log_probs, microbatch.rows), strict=True)
                done += len(microbatch.rows)
                microbatches.progress(done, len(rows))
    return outputs, read


def of_each_row(log_probs: torch.Tensor, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
    """The values (M,) of the tokens that `rows` train, row by row, each as long as its response; 0 elsewhere."""
    pieces = log_probs.cpu().split([row.num_trained for row in rows])
    for row, values in zip(rows, pieces, strict=True):
        yield values.new_zeros(row.response.numel()).masked_scatter_(row.sampled, values)


@torch.no_grad()
def read_log_probs(
    model: nn.Module,
    microbatches: Microbatches,
    rows: Sequence[Row],
    *,
    temperature: float = 1.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[torch.Tensor]:
    """log π of `model` for each row: (length of its response,), 0 on ids that are not trained.

    `progress` is called with the rows read so far and with their total.
    """
    read: list[torch.Tensor] = []
    for attempt in microbatches.until_they_fit(read.clear):
        with attempt:
            for microbatch in microbatches.of(rows, share_prompts=verdict_of(model).reads_packed):
                with autocast(microbatches.kind, microbatches.device):
                    log_probs, _ = token_log_probs(model, microbatch, temperature)
                if microbatch.is_filler:
                    continue
                read += of_each_row(log_probs, microbatch.rows)
                progress(len(read), len(rows))
    divided_again(model)
    return read


class Microbatches:
    """The most tokens of one forward and backward, and their precision; the tokens halve when memory runs out.

    `tokens=None` means 16384 on a GPU, and on a CPU the size of the largest group, within 384 and 2048: fewer tokens
    take less memory and no more time, unless a prompt has to be read again for the rest of its group.
    """

    def __init__(
        self,
        tokens: int | None,
        device: torch.device,
        kind: Autocast,
        note: Callable[[str], None] = lambda text: None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        *,
        in_step: bool = False,
    ) -> None:
        on_cpu = device.type == "cpu"
        self.tokens = tokens or (MOST_ON_CPU if on_cpu else ON_GPU)
        self._enough = FEWEST_ON_CPU if on_cpu and tokens is None else self.tokens  # unless a group takes more
        self._used = self.tokens  # of the largest microbatch of the current split
        self.device = device
        self.kind = kind  # the precision of the forwards
        self.in_step = in_step  # with the other ranks, who gather the weights for each microbatch together
        self._note = note
        self.progress = progress  # called with the completions that an update has read, and with their total

    def of(self, rows: Sequence[Row], *, share_prompts: bool = True, together: int = 1) -> Iterator[Microbatch]:
        """The microbatches of `rows`; see `pack` for `share_prompts` and `together`."""
        budget, self._used = self.tokens, 1
        if self._enough < self.tokens:
            budget = min(self.tokens, max(self._enough, largest_group(rows)))
        packed = pack(rows, budget, self.device, share_prompts=share_prompts, together=together)
        if not self.in_step:
            for microbatch in packed:
                self._used = max(self._used, microbatch.num_packed)
                yield microbatch
            return
        own = list(packed)
        self._used = max((microbatch.num_packed for microbatch in own), default=1)
        most = int(most_over_ranks(len(own), what="their numbers of microbatches"))
        yield from own
        for _ in range(most - len(own)):
            yield filler(self.device, together)

    def until_they_fit(self, start_over: Callable[[], None]) -> Iterator[contextlib.AbstractContextManager[None]]:
        """Attempts at the same work: `for attempt in ...: with attempt: <work>`; the first that fits is the last.

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
                if not _is_out_of_memory(error) or self.tokens <= 1:
                    raise
                if self.in_step:  # the others are in the midst of the same microbatch
                    raise ResourceError(
                        f"out of memory in a microbatch of {self._used} tokens: give a smaller tokens_per_microbatch"
                    ) from error

        while True:
            yield attempt()
            if fitted:
                return
            self.tokens = self._enough = max(1, min(self.tokens, self._used) // 2)
            start_over()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._note(f"out of memory: going on with tokens_per_microbatch={self.tokens}")


def bad_gradients(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradient is not finite in this rank's part."""
    gradients = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    parts: Iterator[tuple[str, Any]] = ((name, getattr(g, "to_local", lambda g=g: g)()) for name, g in gradients)
    return [name for name, part in parts if not part.isfinite().all()]


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch could not get memory, on a GPU or from the CPU's allocator."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
