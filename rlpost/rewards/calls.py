"""Calling reward functions with a batch, in this process: their arguments, their values, their errors.

Functions of a file are called so in a worker, by way of `serve`; see `rlpost.rewards.functions`.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlpost.errors import ConfigError, DataError, RewardError, named
from rlpost.rewards.builtin import BUILT_IN
from rlpost.rewards.score import TooLong, interrupted_after
from rlpost.settings.base import REWARDS
from rlpost.text import printable
from rlpost.user_file import import_file, where_in

TIMEOUT_SECONDS = 60.0  # timeout of a call, by default
LIMIT = "env.reward_timeout_seconds"  # what sets it
GRACE_SECONDS = 1.0  # for async calls to be cancelled in their process, which then need not be killed


# A batch, and what a function takes of it


@dataclass(frozen=True)
class Finished:
    """A finished conversation of one turn, as reward functions see it.

    `prompt` is a text, or messages; the reply is given in the same form. `answers` is what built-in
    rewards compare with: any of them is right.
    """

    prompt: str | list[dict[str, str]]
    reply: str
    reply_ids: list[int]
    columns: Mapping[str, Any]
    answers: list[str]
    step: int = 0  # for which the policy that sampled it had been trained

    @property
    def completion(self) -> str | list[dict[str, str]]:
        """The reply in the form of the prompt."""
        return self.reply if isinstance(self.prompt, str) else [{"role": "assistant", "content": self.reply}]


def offered(reference: str, batch: Sequence[Finished], columns: Sequence[str]) -> dict[str, Any]:
    """The possible arguments of the reward `reference`: a list each, columns by name, None where a row has none.

    `answer` is for a built-in one what it compares with, else a column. All are copies, each row's
    its own, so that no function changes what other rows, steps and functions see.
    """
    names = dict.fromkeys([*columns, *(name for finished in batch for name in finished.columns)])
    given: dict[str, Any] = {"step": [finished.step for finished in batch]}
    given |= {name: [deepcopy(finished.columns.get(name)) for finished in batch] for name in names}
    if reference in BUILT_IN:
        given["answer"] = [finished.answers for finished in batch]
    return given | {
        "prompts": [deepcopy(finished.prompt) for finished in batch],
        "completions": [finished.completion for finished in batch],
        "completion_ids": [list(finished.reply_ids) for finished in batch],
    }


@dataclass(frozen=True)
class Signature:
    """A function's parameters without a default, all of them (None if it takes `**kwargs`), and whether it is async."""

    required: list[str]
    takes: list[str] | None
    is_async: bool


@dataclass(frozen=True, eq=False)
class RewardFunction:
    """A function of the signature `f(prompts, completions, completion_ids, log_metric, <columns>, **kwargs)`.

    It is given what it names, or everything if it takes `**kwargs`, and returns for each completion a
    number (a bool, a NumPy or torch scalar), None where it does not apply, or an exception that says why
    there is none. `name` is what the metrics call it, `reference` what a message does; `file` is where it stands, if
    in a file.
    """

    name: str
    reference: str
    function: Callable[..., Any]
    file: str | None = None

    def signature(self) -> Signature:
        """The function's parameters."""
        parameters = inspect.signature(self.function).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return Signature(
            [p.name for p in named if p.default is p.empty],
            None if takes_all else [p.name for p in named],
            any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__))),
        )

    def invoke(self, given: Mapping[str, Any]) -> Any:
        """Call it with its parameters out of `given`."""
        takes = self.signature().takes
        return self.function(**{name: value for name, value in given.items() if takes is None or name in takes})

    def failure(self, error: BaseException) -> str:
        """The message for an exception that it raised, with the line in its file if it has one."""
        where = f"{where_in(self.file, error, self.reference.rpartition(':')[0] or self.file)}: " if self.file else ""
        return f"{self.reference} failed: {where}{named(error)}"


# Calls


@dataclass
class RowValues:
    """A function's results for some rows: one value (None: it does not apply) or one error for each."""

    values: list[float | None]
    errors: list[str | None]
    metrics: list[dict[str, float]]  # what it gave log_metric while each row was scored
    failed: bool = False  # the call failed, and which rows are at fault is not known: called one by one they tell

    @classmethod
    def of_error(cls, error: str, count: int, *, failed: bool = True) -> RowValues:
        """The results of a call for `count` rows that came to nothing but an error."""
        return cls([None] * count, [error] * count, [{}] * count, failed)


def joined(rows: Sequence[RowValues]) -> RowValues:
    """The rows of several as those of one."""
    return RowValues(
        [value for one in rows for value in one.values],
        [error for one in rows for error in one.errors],
        [metrics for one in rows for metrics in one.metrics],
        any(one.failed for one in rows),
    )


def late(reference: str, seconds: float, where: str = "") -> str:
    """The error of a function that took too long."""
    return f"{reference} did not return within {seconds:g} s{where}: raise {LIMIT} if it needs more"


def call_here(
    functions: Sequence[RewardFunction], batch: Sequence[Finished], columns: Sequence[str], seconds: float
) -> list[RowValues]:
    """The results of each function for a batch, all in this process; async ones run concurrently.

    A function that fails is called again row by row, to find the rows at fault; not one that returns a list of
    another length. Raises RewardError for a call that takes longer than `seconds`, which here cannot be killed;
    ConfigError and DataError pass through.
    """

    def results(calls: list[_Call]) -> list[RowValues]:
        _carry_out(calls, seconds, interrupted_after)
        if tardy := dict.fromkeys(call.function.reference for call in calls if call.late):
            raise RewardError(late(", ".join(tardy), seconds))
        return [call.rows() for call in calls]

    def call(function: RewardFunction, rows: Sequence[Finished]) -> _Call:
        return _Call(function, offered(function.reference, rows, columns), len(rows))

    whole = results([call(function, batch) for function in functions])
    return [
        joined(results([call(function, [row]) for row in batch])) if rows.failed and len(batch) > 1 else rows
        for function, rows in zip(functions, whole, strict=True)
    ]


@dataclass
class _Call:
    """One call of a function on some rows, and what came of it."""

    function: RewardFunction
    given: Mapping[str, Any]
    count: int
    result: Any = None  # what it returned or raised; of an async one an awaitable, until that is done
    late: bool = False
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def begin(self, limit: AbstractContextManager[Any]) -> None:
        """Call the function within `limit`, which may raise TooLong."""
        try:
            with limit:
                self.result = self.function.invoke({**self.given, "log_metric": self._log_metric})
        except TooLong:
            self.late = True
        except (Exception, SystemExit) as error:  # noqa: BLE001  any exception is reported, counted and excluded
            self.result = error

    async def finish(self, seconds: float) -> None:
        """Await `result`, at most for `seconds`."""
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                self.result = await self.result
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001  as above
            self.result, self.late = error, limit.expired()

    def rows(self) -> RowValues:
        """The result, row by row. Raises a deliberate error of rlpost's as it is."""
        result, count, reference = self.result, self.count, self.function.reference
        if isinstance(result, ConfigError | DataError | RewardError):
            raise result
        if isinstance(result, BaseException):
            return RowValues.of_error(self.function.failure(result) + _of_other_form(result, self.given), count)
        if hasattr(result, "tolist"):  # a NumPy array or a tensor
            result = result.tolist()
        # one row alone may be that of a larger call, tried again
        wanted = "a list with one number a completion" if count == 1 else f"a list of {count} numbers, one a completion"
        if not isinstance(result, list | tuple):
            return RowValues.of_error(f"{reference} returned {kind_of_value(result)}: it must return {wanted}", count)
        if len(result) != count:
            wrong = f"{reference} returned {len(result)} values: it must return {wanted}"
            return RowValues.of_error(wrong, count, failed=False)
        numbers = [as_number(value) for value in result]
        for place, (value, number) in enumerate(zip(result, numbers, strict=True)):
            if number is None and not (value is None or isinstance(value, Exception)):
                wrong = (
                    f"returned {kind_of_value(value)} at place {place} of its list: each value must be a number or None"
                )
                return RowValues.of_error(f"{reference} {wrong}", count)
        errors = [self.function.failure(value) if isinstance(value, Exception) else None for value in result]
        metrics = {name: sum(given) / len(given) for name, given in self.metrics.items()}
        return RowValues(numbers, errors, [metrics] * count)

    def _log_metric(self, name: str, value: Any) -> None:
        self.metrics.setdefault(name, []).append(float(value))


def _carry_out(
    calls: Sequence[_Call], seconds: float, within: Callable[[float], AbstractContextManager[Any]] = nullcontext
) -> None:
    """Make the calls: plain functions one after the other, then all awaitables together.

    A call that raises TooLong in the block `within(seconds)` is late.
    """
    for call in calls:
        call.begin(within(seconds))
        if call.late:  # which ends the run, so nothing is waited for
            for begun in calls:
                if inspect.iscoroutine(begun.result):
                    begun.result.close()
            return
    waiting = [call for call in calls if inspect.isawaitable(call.result)]
    if not waiting:
        return
    try:
        with within(seconds + GRACE_SECONDS):
            _complete(waiting, seconds)
    except TooLong:
        _of_thread.__dict__.clear()  # its loop was left in the middle of a call
        for call in waiting:
            call.late |= inspect.isawaitable(call.result)


def _complete(calls: Sequence[_Call], seconds: float) -> None:
    """Finish calls in this thread: in the main thread of a process code may set alarms, as math-verify does."""

    async def together() -> None:
        await asyncio.gather(*(call.finish(seconds) for call in calls))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if not hasattr(_of_thread, "loop"):
            _of_thread.loop = asyncio.new_event_loop()
        _of_thread.loop.run_until_complete(together())
    else:  # a notebook's loop runs here
        with ThreadPoolExecutor(1, "rlpost-rewards") as pool:
            pool.submit(asyncio.run, together()).result()


_of_thread = threading.local()  # a `loop` for a thread's life, so that clients a user keeps between calls go on working


def _of_other_form(error: BaseException, given: Mapping[str, Any]) -> str:
    """A hint where a function took texts for messages, or messages for texts; empty for any other error."""
    if not given.get("completions") or not isinstance(error, TypeError | AttributeError):
        return ""
    if isinstance(given["completions"][0], str):
        if not str(error).startswith("string indices must be integers"):
            return ""
        return (
            '; the prompts are texts, so each completion is a text: write completion for completion[0]["content"], '
            "or give the prompts as messages"
        )
    if "string" in str(error) or "'list' object has no attribute" in str(error):
        return '; the prompts are messages, so each completion is a list of one: its text is completion[0]["content"]'
    return ""


def as_number(value: Any) -> float | None:
    """A number, bool, or NumPy or torch scalar as a float; None for anything else."""
    if not isinstance(value, bool | int | float) and hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, TypeError, ValueError):  # more than one element
            return None
    return float(value) if isinstance(value, bool | int | float) else None


def kind_of_value(value: Any) -> str:
    """The type of a value and its beginning, for a message."""
    return "None" if value is None else printable(f"{type(value).__name__} {value!r:.40}")


# In a worker


@dataclass(frozen=True)
class Request:
    """Calls to make of a worker's function: what each is given, and for how many rows.

    `seconds` are for async ones.
    """

    calls: list[tuple[dict[str, Any], int]]
    seconds: float


def serve(reference: str, path: str) -> tuple[Callable[[Request], list[dict[str, Any]]], Signature]:
    """The function that a worker calls for the reward found by `find`, and the reward's signature.

    It answers a request with the fields of each call's `RowValues`. Raises ConfigError as `find`.
    """
    reward = find(reference, path)
    return partial(_answer, reward), reward.signature()


def find(reference: str, path: str) -> RewardFunction:
    """The reward FILE:NAME, or the one of this name that the plugin at `path` registers; a built-in one for path "".

    Raises ConfigError where there is none, or where importing the file fails.
    """
    if not path:
        return RewardFunction(reference, reference, BUILT_IN[reference].function)
    shown, _, name = reference.rpartition(":")
    module = import_file(path, shown or path)
    function = getattr(module, name, None) if shown else REWARDS.get(name)
    if not callable(function):
        raise ConfigError(f"{reference} is not a function but {type(function).__name__}: give the name of a function")
    return RewardFunction(name, reference, function, path)


def _answer(reward: RewardFunction, request: Request) -> list[dict[str, Any]]:
    calls = [_Call(reward, given, count) for given, count in request.calls]
    _carry_out(calls, request.seconds)
    tardy = late(reward.reference, request.seconds)
    return [vars(RowValues.of_error(tardy, call.count) if call.late else call.rows()) for call in calls]
