"""All ranks of a training, as its loop on rank 0 sees them: most trainings have one.

Rank 0 runs the loop, with the folder, the screen, the draws and the evaluations. The others hold the model, or their
part of it, and do what rank 0 tells them: each reads whole groups of a minibatch, and their gradients are summed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import torch

from rlpost import distributed
from rlpost.distributed import leave_group
from rlpost.errors import PolicyError, RankError, RlpostError
from rlpost.model.logprobs import verdict_of
from rlpost.model.packing import Row, shares_of
from rlpost.model.shards import announce_with, is_sharded
from rlpost.train.rank import Progress, Rank
from rlpost.train.sending import as_arrays, as_tensors
from rlpost.train.update import Update

if TYPE_CHECKING:
    from rlpost.collectors.process import RemoteObject

log = logging.getLogger("rlpost")

NAMING_SECONDS = 5.0  # until it is known which rank was lost, once something has failed that all do together
LAST_RESORT_SECONDS = 15.0  # for this process to end in order once another rank is lost
LOAD_SECONDS = 900.0  # for another rank to have loaded its model, once this one has
END_SECONDS = 10.0  # for another rank to end in order


class Ranks:
    """Rank 0, in this process, and the others.

    Raises RankError, in whatever the main thread does, once another rank is lost.
    """

    def __init__(self, others: Sequence[RemoteObject] = ()) -> None:
        self.others = others
        self.own: Rank
        self.total_updates = 1  # optimizer steps of the whole run, over which the schedule of the learning rate goes
        self._alarm = Alarm() if others else None
        for other in others:
            other.on_death = self._lost_one

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Tell the others that the training has ended, and how."""
        if self._alarm is None:
            return
        self._alarm.close()
        failed = isinstance(error, Exception)
        code = getattr(error, "exit_code", 1) if failed else 0
        for other in self.others:
            other.on_death = lambda: None
            with contextlib.suppress(PolicyError):  # one that was never started, or has ended
                other.submit("conclude", code, str(error) if failed else "")
        for other in self.others:
            other.close(END_SECONDS)
        leave_group()

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return 1 + len(self.others)

    def begin(self, own: Rank, tokens_per_microbatch: int | None) -> None:
        """The training begins with `own`, this rank's model; the others have loaded theirs, or are about to have."""
        self.own = own
        with self._naming():
            asked = [other.submit("begin", own.objective, tokens_per_microbatch) for other in self.others]
            self._answers(asked, "loading the model", LOAD_SECONDS)
        if is_sharded(own.model):
            announce_with(own.model, self._gather)

    def over(self, total_updates: int) -> Self:
        """The same, with a learning rate whose schedule goes over so many optimizer steps."""
        self.total_updates = total_updates
        return self

    def update(self, minibatch: Sequence[Row], number: int) -> Update[Any]:
        """Optimizer step `number` (from 0), with the outputs of all ranks. Raises as `rlpost.train.update.update`."""
        if not self.others:
            return self.own.update(minibatch, number, self.total_updates)
        shares = self._shares(minibatch)
        with self._naming():
            asked = self._ask(
                "update", [(share, number, self.total_updates) for share in self._rows(minibatch, shares)]
            )
            mine = self.own.update([minibatch[place] for place in shares[0]], number, self.total_updates)
            theirs: list[Update[Any]] = [as_tensors(each) for each in self._answers(asked, "an update")]
        outputs = [as_tensors(as_arrays(output)) for output in mine.outputs]  # on the CPU, as those of the others
        return Update([*outputs, *(o for each in theirs for o in each.outputs)], mine.grad_norm, mine.stepped)

    def read_log_probs(
        self, rows: Sequence[Row], *, temperature: float = 1.0, progress: Progress = lambda done, total: None
    ) -> list[torch.Tensor]:
        """log π of the trained model for each row, of its response's length, 0 on ids that are not trained.

        `progress` is told how many rows this rank has read, of how many.
        """
        return self._read("read_log_probs", rows, temperature, progress)

    def fill_reference(self, rows: Sequence[Row], temperature: float = 1.0) -> None:
        """Give `rows` the log-probs of the reference, where the loss reads one."""
        if self.own.reference is not None and rows:
            for row, log_probs in zip(rows, self._read("read_reference", rows, temperature), strict=True):
                row.ref_log_probs = log_probs

    def save_moments(self) -> Callable[[Path], None] | None:
        """What writes the optimizer's state where each rank has a part of it; None where this one has all."""
        if not is_sharded(self.own.model):
            return None

        def save(folder: Path) -> None:
            with self._naming():
                asked = self._tell("save_moments", folder)
                self.own.save_moments(folder)
                self._answers(asked, "saving")

        return save

    def bad_gradients(self) -> list[str]:
        """The parameters whose gradient is not finite, in any rank's part of them."""
        found = self.own.bad_gradients()
        for theirs in self._answers(self._tell("bad_gradients"), "its gradients"):
            found += [name for name in theirs if name not in found]
        return found

    def free_unused(self) -> None:
        """See `Rank.free_unused`, on every rank."""
        asked = self._tell("free_unused")
        self.own.free_unused()
        self._answers(asked, "its memory")

    def memory(self) -> dict[str, float]:
        """The most that each rank has held, in GB; nothing where there is one."""
        if not self.others:
            return {}
        peaks = [self.own.peak_gb(), *self._answers(self._tell("peak_gb"), "its memory")]
        return {f"memory/rank_{number}_gb": peak for number, peak in enumerate(peaks)}

    # What goes to the others

    def _gather(self, name: str) -> None:
        self._tell("gather", name)

    def _read(self, method: str, rows: Sequence[Row], temperature: float, *more: Any) -> list[torch.Tensor]:
        if not self.others:
            return getattr(self.own, method)(rows, temperature, *more)
        shares = self._shares(rows)
        with self._naming():
            asked = self._ask(method, [(share, temperature) for share in self._rows(rows, shares)])
            read = [getattr(self.own, method)([rows[place] for place in shares[0]], temperature, *more)]
            read += [as_tensors(each) for each in self._answers(asked, "log-probs")]
        found: dict[int, torch.Tensor] = {}
        for share, log_probs in zip(shares, read, strict=True):
            found.update(zip(share, log_probs, strict=True))
        return [found[place] for place in range(len(rows))]

    def _shares(self, rows: Sequence[Row]) -> list[list[int]]:
        return shares_of(rows, self.count, share_prompts=verdict_of(self.own.model).reads_packed)

    def _rows(self, rows: Sequence[Row], shares: list[list[int]]) -> list[Any]:
        """The rows of each of the others' shares, as they are sent."""
        return [as_arrays([rows[place] for place in share]) for share in shares[1:]]

    def _ask(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Future[Any]]:
        """What each of the others makes of its own arguments, once it is there."""
        asked = []
        for other, each in zip(self.others, arguments, strict=True):
            future = other.submit("work", method, *each)
            future.add_done_callback(self.look)
            asked.append(future)
        return asked

    def _tell(self, method: str, *arguments: Any) -> list[Future[Any]]:
        return self._ask(method, [arguments] * len(self.others))

    def _answers(self, asked: Sequence[Future[Any]], what: str, seconds: float | None = None) -> list[Any]:
        """What the others have made of it. Raises RankError where one takes too long."""
        seconds = distributed.DEADLINE_SECONDS if seconds is None else seconds
        answers = []
        for rank, future in enumerate(asked, start=1):
            try:
                answers.append(future.result(seconds))
            except FutureTimeout:
                raise RankError(
                    f"waited {seconds:.0f} s for {what} of rank {rank}, which hangs or is much slower than rank 0; "
                    f"cluster.rank_seconds sets the limit, and rank-{rank}.log of the run says what it did"
                ) from None
        return answers

    # What becomes of them

    def look(self, future: Future[Any]) -> None:
        """Something that another rank was asked has come to an end: its errors end what this one does meanwhile."""
        error = future.exception()
        if error is None or isinstance(error, FloatingPointError) or self._alarm is None:
            return
        if isinstance(error, RlpostError):
            self._alarm.ring(error)
        else:
            log.error("another rank failed: %r\n%s", error, "\n".join(getattr(error, "__notes__", ())))
            self._alarm.ring(RankError(f"another rank failed, and the run's log.txt says where: {error!r}"))

    def _lost_one(self) -> None:
        lost = next((other.failure for other in self.others if other.failure is not None), None)
        if self._alarm is not None:
            self._alarm.ring(RankError(f"{lost}; the training ends with it: go on with --resume"))

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """What fails here because another rank is lost is told as that."""
        try:
            yield
        except RuntimeError as error:
            if self._alarm is None or (isinstance(error, RlpostError) and not isinstance(error, RankError)):
                raise
            if (reason := self._alarm.wait(NAMING_SECONDS)) is not None and reason is not error:
                raise reason from error
            raise


class Alarm:
    """Ends what the main thread does with an error that another thread has found, wherever it is."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._rung = threading.Event()
        self._closed = False
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        if self._in_main_thread:
            signal.signal(signal.SIGUSR1, self._raise)  # for good: one may be under way when this is closed

    def ring(self, error: BaseException) -> None:
        """Raise `error` in the main thread; where that does not end this process in time, end it."""
        if self._closed or self._rung.is_set():
            return
        self._error = error
        self._rung.set()
        log.error("%s", error)
        if self._in_main_thread:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            threading.Thread(target=self._last_resort, daemon=True).start()

    def wait(self, seconds: float) -> BaseException | None:
        """The error, where there is one within `seconds`."""
        self._rung.wait(seconds)
        return self._error

    def close(self) -> None:
        """Raise nothing any more."""
        self._closed = True

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._error is not None and not self._closed:
            raise self._error

    def _last_resort(self) -> None:
        """The main thread may wait in a library that does not come back: for a rank that is no more."""
        until = time.monotonic() + LAST_RESORT_SECONDS
        while time.monotonic() < until:
            if self._closed:
                return
            time.sleep(0.2)
        os.write(2, f"error: {self._error}\n".encode())
        os._exit(getattr(self._error, "exit_code", 1))
