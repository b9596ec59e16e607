"""Transforms of a training: where an environment's prompts come from, and the version of the weights in the data."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from tensordict import NonTensorStack, TensorDictBase

from rlpost.data.conversation import PolicyVersionLabel, Ticket, next_version
from rlpost.envs.base import Transform
from rlpost.errors import DataError

StackMethod = Callable[[Sequence[Mapping[str, Any]]], TensorDictBase]


class DataLoadingPrimer(Transform):
    """Serves the elements of a dataloader, each `repeats` times in a row, without end.

    Exactly one of `dataloader`, an iterable of mappings, and `dataloader_factory`, which makes one
    when it is first needed. An exhausted dataloader is started again. A dataloader that says a
    `batch_size` of 1 or more, as torch's does, gives batches, whose rows are the elements; so are
    those of a TensorDict of one dimension. `batch_size` (an int or `[n]`) is how many elements one
    TensorDict is primed with, `n * repeats` with `group_repeats`; None leaves it to the environment.

    `stack_method` puts the elements of one TensorDict together: "as_nested_tensor",
    "as_padded_tensor" or a function of a list of mappings; where it is None tensors of equal shape
    are stacked. The result is moved to `device`.

    Draws are numbered from `first_group` on. `position` counts the elements served, repeats included. A
    dataloader with an `iter_from(index)` method is moved there at once; of any other the elements
    before it are read again, so it has to give the same order each time it is started.
    """

    def __init__(
        self,
        dataloader: Iterable[Any] | None = None,
        *,
        dataloader_factory: Callable[[], Iterable[Any]] | None = None,
        repeats: int | None = None,
        batch_size: int | Sequence[int] | None = None,
        group_repeats: bool = False,
        stack_method: str | StackMethod | None = None,
        device: torch.device | str | None = None,
        first_group: int = 0,
    ) -> None:
        self.repeats = repeats or 1
        self.batch_size = _one_dimension(batch_size, self.repeats if group_repeats else 1)
        self.stack_method = stack_method
        self.device = device
        self.first_group = first_group
        self.position = 0
        self._dataloader = dataloader
        self._factory = dataloader_factory
        self._iterator: Iterator[Any] | None = None
        self._element: Mapping[str, Any] | None = None

    def serves(self, dataloader: Any) -> bool:
        """Whether the elements are those of `dataloader`."""
        return self._dataloader is dataloader

    def take(self, count: int) -> list[Ticket]:
        """The next `count` elements served, as one ticket for those of each element.

        Raises DataError for a dataloader without elements.
        """
        tickets: list[Ticket] = []
        for _ in range(count):
            number, sample = divmod(self.position, self.repeats)
            if self._element is None or sample == 0:
                self._element = self._read(number)
            if not tickets or sample == 0:
                tickets.append(Ticket(self.first_group + number, [], self._element))
            tickets[-1].samples.append(sample)
            self.position += 1
        return tickets

    @property
    def next_group(self) -> int:
        """The number of the first draw that has not begun: those of another order begin there."""
        return self.first_group - (-self.position // self.repeats)

    def _read(self, group: int) -> Mapping[str, Any]:
        if self._iterator is None:
            self._iterator = self._iterate_from(group)
        return next(self._iterator)

    def _iterate_from(self, group: int) -> Iterator[Any]:
        if self._dataloader is None:
            assert self._factory is not None
            self._dataloader = self._factory()
        iter_from = getattr(self._dataloader, "iter_from", None)
        given = _endless(self._dataloader) if iter_from is None else iter_from(group)
        size = getattr(self._dataloader, "batch_size", None)
        elements = _elements(given, batched=isinstance(size, int) and size > 0)
        for _ in range(0 if iter_from else group):
            next(elements)
        return elements

    def reset_dataloader(self) -> None:
        """Begin again with the first element, and its number."""
        self.load_state_dict({"position": 0, "first_group": self.first_group})

    def state_dict(self) -> dict[str, int]:
        """The position, and the first number where it is not 0, ready for JSON."""
        return {"position": self.position} | ({"first_group": self.first_group} if self.first_group else {})

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a saved position."""
        self.position = state["position"]
        self.first_group = state.get("first_group", 0)
        self._iterator = self._element = None

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the next element of each row: numbers and tensors together, everything else one value a row.

        Raises DataError for tensors that do not stack.
        """
        shape = tensordict.batch_size
        elements = [ticket.task for ticket in self.take(shape[0]) for _ in ticket.samples]
        from rlpost.data import ragged

        method = self.stack_method or "stack_equal"
        stacked = (getattr(ragged, method) if isinstance(method, str) else method)(elements)
        return tensordict.update(stacked if self.device is None else stacked.to(self.device))


class PolicyVersion(Transform):
    """Writes the version of a policy's weights as `policy_version` into every TensorDict that passes.

    With `version_type` int (or "int") versions count from 0; with str (or "uuid") each is a fresh
    uuid4. Once it follows a policy, as a collector makes it, its version is the policy's, which the
    weight updater alone raises; before that `increment_version` does.
    """

    def __init__(self, version_type: type | str = int) -> None:
        self._counts = version_type in (int, "int")
        self._followed: Versioned | None = None
        self._version: PolicyVersionLabel = 0 if self._counts else str(uuid.uuid4())
        self._history: deque[tuple[float, PolicyVersionLabel, PolicyVersionLabel]] = deque(maxlen=1000)

    @property
    def version(self) -> PolicyVersionLabel:
        """The version of the weights that are sampled with."""
        return self._version if self._followed is None else self._followed.version

    @property
    def version_history(self) -> list[tuple[float, PolicyVersionLabel, PolicyVersionLabel]]:
        """The newest changes of the version: unix time, old, new."""
        return list(self._history if self._followed is None else self._followed.version_history)

    def follow(self, policy: Versioned) -> None:
        """Read the version of `policy` from now on."""
        self._followed = policy

    def increment_version(self) -> PolicyVersionLabel:
        """Go on to the next version and return it."""
        old, self._version = self._version, next_version(self._version)
        self._history.append((time.time(), old, self._version))
        return self._version

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write `policy_version`: int64 of the batch shape, or the uuid once a row."""
        shape = tensordict.batch_size
        if isinstance(self.version, int):
            stamp: Any = torch.full(shape, self.version, dtype=torch.int64, device=tensordict.device)
        else:
            stamp = NonTensorStack(*[self.version] * shape[0]) if len(shape) == 1 else self.version
        return tensordict.set("policy_version", stamp)

    def state_dict(self) -> dict[str, Any]:
        """The version, ready for JSON."""
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved version."""
        self._version = state["version"]


class Versioned(Protocol):
    """Has a version that a weight updater raises: a policy."""

    version: PolicyVersionLabel
    version_history: deque[tuple[float, PolicyVersionLabel, PolicyVersionLabel]]


def _one_dimension(batch_size: int | Sequence[int] | None, multiplier: int) -> torch.Size | None:
    if batch_size is None:
        return None
    shape = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
    return torch.Size([(shape[0] if shape else 1) * multiplier])


def _endless(dataloader: Iterable[Any]) -> Iterator[Any]:
    """The elements of `dataloader`, over and over. Raises DataError instead of looking for ever in an empty one."""
    while True:
        empty = True
        for element in dataloader:
            empty = False
            yield element
        if empty:
            raise DataError(
                "the dataloader has no element, or is an iterator that cannot be started again: give a list, a "
                "DataLoader or another iterable"
            )


def _elements(given: Iterator[Any], *, batched: bool) -> Iterator[Mapping[str, Any]]:
    """The elements of one item of a dataloader: the item itself, or its rows if it is a batch."""
    for element in given:
        if isinstance(element, TensorDictBase):
            yield from (row.to_dict() for row in (element.unbind(0) if element.ndim else [element]))
        elif batched:
            yield from _rows(element)
        else:
            yield element


def _rows(batch: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rows of a batch of columns."""
    yield from (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
