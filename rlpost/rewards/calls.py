"""Calling reward functions in this process, plain or async ones: their arguments, their values, their errors.

Functions of a file are called so in a worker, by way of `serve`; see `rlpost.rewards.functions`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
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
_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


# Calling


@dataclass(frozen=True)
class RewardFunction:
    """A function of the signature `f(prompts, completions, completion_ids, log_metric, <columns>, **kwargs)`.

    It is given what it names, or everything if it takes `**kwargs`, and returns for each completion a
    number (a bool, a NumPy or torch scalar), None where it does not apply, or an exception that says why
    there is none. `reference` is how a message calls it and `file` where it stands, if in a file.
    """

    name: str
    reference: str
    function: Callable[..., Any]
    file: str | None = None

    def named(self, name: str) -> RewardFunction:
        """A copy that is called `name` in the metrics."""
        return replace(self, name=name)

    def required(self) -> list[str]:
        """The parameters that have no default."""
        empty = inspect.Parameter.empty
        return [
            p.name for p in self._parameters() if p.default is empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]

    def takes(self) -> list[str] | None:
        """The names of its parameters; None if it takes `**kwargs`."""
        parameters = self._parameters()
        return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else [p.name for p in parameters]

    def invoke(self, offered: Mapping[str, Any]) -> Any:
        """Call it with its parameters out of `offered`."""
        parameters = self._parameters()
        first = [offered[p.name] for p in parameters if p.kind is p.POSITIONAL_ONLY and p.name in offered]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            positional = {p.name for p in parameters if p.kind is p.POSITIONAL_ONLY}
            return self.function(*first, **{name: value for name, value in offered.items() if name not in positional})
        names = [p.name for p in parameters if p.kind in _KEYWORD and p.name in offered]
        return self.function(*first, **{name: offered[name] for name in names})

    def failure(self, error: BaseException) -> str:
        """The message for an exception that it raised, with the line in its file if it has one."""
        if self.file is None:
            return f"{self.reference} failed: {named(error)}"
        return (
            f"{self.reference} failed: {where_in(self.file, error, self.reference.rpartition(':')[0])}: {named(error)}"
        )

    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.function).parameters.values())


@dataclass
class RowValues:
    """A function's results for some rows: one value (None: it does not apply) or one error for each."""

    values: list[float | None]
    errors: list[str | None]
    metrics: list[dict[str, float]]  # what it gave log_metric while each row was scored
    failed: bool = False  # the call failed, and which rows are at fault is not known: called one by one they tell


class _WrongLength(TypeError):
    """A function has returned more or fewer values than there are rows."""


def _of_other_form(error: BaseException, offered: Mapping[str, Any]) -> str:
    """A hint where a function took texts for messages, or messages for texts; empty for any other error."""
    if not offered.get("completions") or not isinstance(error, TypeError | AttributeError):
        return ""
    if isinstance(offered["completions"][0], str):
        if not str(error).startswith("string indices must be integers"):
            return ""
        return (
            '; the prompts are texts, so each completion is a text: write completion for completion[0]["content"], '
            "or give the prompts as messages"
        )
    if "string" in str(error) or "'list' object has no attribute" in str(error):
        return '; the prompts are messages, so each completion is a list of one: its text is completion[0]["content"]'
    return ""


@dataclass
class _Call:
    """One call of a function on some rows, and what came of it."""

    function: RewardFunction
    offered: Mapping[str, Any]
    count: int
    result: Any = None
    late: bool = False
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def begin(self) -> None:
        """Call the function; an async one leaves an awaitable in `result`, a failing one the exception."""
        try:
            self.result = self.function.invoke({**self.offered, "log_metric": self._log_metric})
        except (Exception, SystemExit) as error:  # noqa: BLE001  any exception is reported, counted and excluded
            self.result = error

    async def finish(self, seconds: float | None) -> None:
        """Await `result`, at most for `seconds`."""
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                self.result = await self.result
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001  as above
            self.result, self.late = error, limit.expired()

    def outcome(self, seconds: float | None = None, limit: str = LIMIT) -> dict[str, Any]:
        """`values` and `metrics`, or an `error`. Raises a deliberate error of rlpost's as it is."""
        if self.late and seconds is not None:
            return {"error": late(self.function.reference, seconds, limit)}
        if isinstance(self.result, ConfigError | DataError | RewardError):
            raise self.result
        if isinstance(self.result, BaseException):
            return {"error": self.function.failure(self.result) + _of_other_form(self.result, self.offered)}
        try:
            values = _values(self.result, self.count, self.function.reference)
        except _WrongLength as error:
            return {"error": str(error), "of_call": True}
        except TypeError as error:
            return {"error": str(error)}
        return {
            "values": [None if isinstance(value, Exception) else value for value in values],
            "errors": [self.function.failure(value) if isinstance(value, Exception) else None for value in values],
            "metrics": {name: sum(given) / len(given) for name, given in self.metrics.items()},
        }

    def _log_metric(self, name: str, value: Any) -> None:
        self.metrics.setdefault(name, []).append(float(value))


def row_values(outcome: Mapping[str, Any], count: int) -> RowValues:
    """The values of a call, one entry a row; the same error for each if it failed."""
    if "error" in outcome:
        failed = not outcome.get("of_call", False)
        return RowValues([None] * count, [outcome["error"]] * count, [{}] * count, failed)
    return RowValues(list(outcome["values"]), list(outcome["errors"]), [outcome["metrics"]] * count)


def joined(rows: Sequence[RowValues]) -> RowValues:
    """The rows of several as those of one."""
    return RowValues(
        [value for one in rows for value in one.values],
        [error for one in rows for error in one.errors],
        [metrics for one in rows for metrics in one.metrics],
    )


def late(reference: str, seconds: float, limit: str = LIMIT, where: str = "") -> str:
    """The error of a function that took longer than `limit` allows."""
    return f"{reference} did not return within {seconds:g} s{where}: raise {limit} if it needs more"


def call_here(
    functions: Sequence[RewardFunction],
    offer: Callable[[RewardFunction, Sequence[int]], Mapping[str, Any]],
    count: int,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[RowValues]:
    """The results of each function for rows 0 to `count` - 1, all in this process; async ones run concurrently.

    `offer(function, rows)` returns its possible arguments. A function that fails is called again row by row, to
    find the rows at fault; not one that returns a list of another length. Raises RewardError for a call
    that takes longer than `timeout_seconds`, which here cannot be killed; ConfigError and DataError pass through.
    """
    whole = _run([_Call(function, offer(function, range(count)), count) for function in functions], timeout_seconds)
    results = []
    for call in whole:
        rows = row_values(call.outcome(), count)
        if rows.failed and count > 1:
            singles = [_Call(call.function, offer(call.function, [i]), 1) for i in range(count)]
            rows = joined([row_values(c.outcome(), 1) for c in _run(singles, timeout_seconds)])
        results.append(rows)
    return results


# In a worker


def serve(
    reference: str, path: str, name: str, registered: bool
) -> tuple[Callable[[Mapping[str, Any]], list[dict[str, Any]]], dict[str, Any]]:
    """The function that a worker calls for the reward found by `find`, and data about it.

    A request holds `calls`, each what is offered and for how many rows, the `seconds` for an async one
    and the `limit` that sets them; the answer is what each call told. Raises ConfigError where there is no
    such function.
    """
    reward = find(reference, path, name, registered=registered)
    return partial(answer, reward), about(reward)


def find(reference: str, path: str, name: str, *, registered: bool) -> RewardFunction:
    """The function `name` of the file at `path`, or that it `registered`; a built-in one for the path "".

    Raises ConfigError where there is none, or where importing the file fails.
    """
    if not path:
        return RewardFunction(name, reference, BUILT_IN[name].function)
    module = import_file(path, path if registered else reference.rpartition(":")[0])
    function = REWARDS.get(name) if registered else getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{reference} is not a function but {type(function).__name__}: give the name of a function")
    return RewardFunction(name, reference, function, str(path))


def about(reward: RewardFunction) -> dict[str, Any]:
    """The function's parameters, and whether it is async, for the process that calls it."""
    is_async = any(map(inspect.iscoroutinefunction, (reward.function, type(reward.function).__call__)))
    return {"required": reward.required(), "takes": reward.takes(), "is_async": is_async}


def answer(reward: RewardFunction, request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make the calls of a request: plain functions one after the other, then all awaitables together."""
    calls = [_Call(reward, offered, count) for offered, count in request["calls"]]
    for call in calls:
        call.begin()
    waiting = [call for call in calls if inspect.isawaitable(call.result)]
    if waiting:
        _complete(_together(waiting, request["seconds"]))
    return [call.outcome(request["seconds"], request["limit"]) for call in calls]


def _run(calls: list[_Call], timeout_seconds: float) -> list[_Call]:
    """Make the calls: plain functions one after the other, then all awaitables together."""
    for call in calls:
        try:
            with interrupted_after(timeout_seconds):
                call.begin()
        except TooLong:
            for other in calls:
                if inspect.iscoroutine(other.result):
                    other.result.close()
            raise _late([call], timeout_seconds) from None
    waiting = [call for call in calls if inspect.isawaitable(call.result)]
    if waiting:
        try:
            with interrupted_after(timeout_seconds + GRACE_SECONDS):
                _complete(_together(waiting, timeout_seconds))
        except TooLong:
            _of_thread.__dict__.clear()  # its loop was left in the middle of a call
            raise _late([c for c in waiting if inspect.isawaitable(c.result)], timeout_seconds) from None
        if tardy := [call for call in waiting if call.late]:
            raise _late(tardy, timeout_seconds)
    return calls


def _late(calls: Sequence[_Call], seconds: float) -> RewardError:
    return RewardError(late(", ".join(dict.fromkeys(call.function.reference for call in calls)), seconds))


async def _together(calls: Sequence[_Call], seconds: float | None) -> None:
    await asyncio.gather(*(call.finish(seconds) for call in calls))


def _complete(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` in this thread: in the main thread of a process code may set alarms, as math-verify does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        _loop().run_until_complete(work)
    else:  # a notebook's loop runs here
        with ThreadPoolExecutor(1, "rlpost-rewards") as pool:
            pool.submit(asyncio.run, work).result()


_of_thread = threading.local()


def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for the life of a thread, so that clients a user keeps between calls go on working."""
    if not hasattr(_of_thread, "loop"):
        _of_thread.loop = asyncio.new_event_loop()
    return _of_thread.loop


def _values(result: Any, count: int, reference: str) -> list[float | Exception | None]:
    """`result` as floats, exceptions and Nones. Raises TypeError, naming the function, for anything else."""
    if hasattr(result, "tolist"):  # a NumPy array or a tensor
        result = result.tolist()
    # one row alone may be that of a larger call, tried again
    wanted = "a list with one number a completion" if count == 1 else f"a list of {count} numbers, one a completion"
    if not isinstance(result, list | tuple):
        raise TypeError(f"{reference} returned {_kind(result)}: it must return {wanted}")
    if len(result) != count:
        raise _WrongLength(f"{reference} returned {len(result)} values: it must return {wanted}")
    values = [value if isinstance(value, Exception) else _number(value) for value in result]
    for place, (value, read) in enumerate(zip(result, values, strict=True)):
        if read is None and value is not None:
            raise TypeError(
                f"{reference} returned {_kind(value)} at place {place} of its list: each value must be a number or None"
            )
    return values


def _number(value: Any) -> float | None:
    """A number, bool, or NumPy or torch scalar as a float; None for anything else."""
    if not isinstance(value, bool | int | float) and hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, TypeError, ValueError):  # more than one element
            return None
    try:
        return float(value) if isinstance(value, bool | int | float) else None
    except OverflowError:
        return math.inf


def _kind(value: Any) -> str:
    return "None" if value is None else printable(f"{type(value).__name__} {value!r:.40}")
