"""Reward functions of a user: found, loaded, called, and added up into a score for each completion.

A reward function has TRL's signature: `f(prompts, completions, completion_ids, log_metric, step, <every
column by name>, **kwargs) -> list of number or None`, plain or async, called once for a batch of
finished conversations with the arguments that it names. A function of a file is called in a process of
its own, which can be killed; if it fails, it is called row by row to find the rows at fault. If the prompts
are messages, prompts and completions are lists of messages, else texts. `step` is how many steps the policy that
sampled a completion had been trained for, a list with one number a completion; a column of that name comes first. TRL's
`trainer_state` and `log_extra` are not offered: completions of one call may be of several steps, and rollouts have no
columns for texts of a reward.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

from rlpost.errors import ConfigError, DataError, RewardError
from rlpost.files import expanded
from rlpost.imports import require
from rlpost.rewards.builtin import BUILT_IN, best
from rlpost.rewards.calls import (
    GRACE_SECONDS,
    LIMIT,
    TIMEOUT_SECONDS,
    RewardFunction,
    RowValues,
    call_here,
    joined,
    late,
    row_values,
)
from rlpost.rewards.score import Patience, Score, log_failures, why_untrainable
from rlpost.rewards.workers import Outcome, Worker, call_each
from rlpost.settings import DatasetSettings, EnvSettings
from rlpost.settings.base import RESERVED_PARTS, REWARD_FILES, REWARDS
from rlpost.text import did_you_mean, nearest, printable
from rlpost.user_file import check_defines

OFFERED = ("prompts", "completions", "completion_ids", "log_metric", "step")  # besides the columns
NOT_OFFERED = ("trainer_state", "log_extra")  # of TRL's signature
PRINTED_SHOWN = 200  # characters of a failed call's output
Offer = Callable[[Any, Sequence[int]], Mapping[str, Any]]
_Order = tuple[str, str, str, bool]
_workers: WeakValueDictionary[_Order, Worker] = WeakValueDictionary()  # each ends with its last user
log = logging.getLogger("rlpost")


# Loading and scoring


def load_rewards(settings: EnvSettings) -> Rewards | None:
    """The rewards that the settings of an environment name, their files imported; None if it has its own, or none.

    Raises ConfigError for one that cannot be loaded.
    """
    if not isinstance(settings, DatasetSettings) or not settings.reward:
        return None
    functions = [_find_reward(reward) for reward in settings.reward]
    accuracy = settings.accuracy
    if accuracy is None:
        measures = [name for name, each in BUILT_IN.items() if each.measures_accuracy]
        accuracy = next((name for name in settings.reward if name in measures), None)
    measure = None if accuracy is None else _find_reward(accuracy)
    _imported(functions if measure is None else [*functions, measure])
    weights = settings.reward_weights or [1.0] * len(functions)
    apart = [function.named(name) for function, name in zip(functions, _names(settings.reward), strict=True)]
    return Rewards(apart, weights, measure, settings.reward_timeout_seconds)


def _names(rewards: Sequence[str]) -> list[str]:
    """The names of the parts; `_2` and so on follow a name that occurred before or is taken."""
    names: list[str] = []
    for reward in rewards:
        own = name = reward.rpartition(":")[2]
        number = 1
        while name in names or name in RESERVED_PARTS:
            number += 1
            name = f"{own}_{number}"
        names.append(name)
    return names


class Rewards:
    """Reward functions that are added up, each times its weight, and the one that measures accuracy if any.

    The parts of a score are the functions' own values, before their weights, and what they gave
    `log_metric`, which is in no sum.
    """

    def __init__(
        self,
        functions: Sequence[AnyReward],
        weights: Sequence[float],
        accuracy: AnyReward | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.functions = functions
        self.weights = weights
        self.accuracy = accuracy
        self.timeout_seconds = timeout_seconds
        self.columns: Sequence[str] = ()
        self.judge = BUILT_IN[accuracy.reference].judge if accuracy and accuracy.reference in BUILT_IN else None
        self._called = list(functions)
        if accuracy and not self.judge and accuracy.reference not in [f.reference for f in functions]:
            self._called.append(accuracy)

    def offer_columns(self, columns: Sequence[str], source: str) -> None:
        """Offer `columns` from now on, None for a row without one.

        Raises DataError for a parameter that is neither offered nor a column of `source`.
        """
        self.columns = columns
        for function in self._called:
            if function.reference not in BUILT_IN:
                check_columns(function, columns, source)

    def reads(self, column: str) -> bool:
        """Whether one of the functions takes a column."""
        read_columns = [function.takes() for function in self._called if function.reference not in BUILT_IN]
        return any(names is None or column in names for names in read_columns)

    def score(self, batch: Sequence[Finished]) -> list[Score]:
        """One score a conversation; what could not be scored is `valid=False` with its error.

        Raises RewardError where not one of several conversations could be scored, for an accuracy that
        is none, and for a function given from Python that does not return in time.
        """
        results = self._call_all(batch)
        scores = [self._add_up(results, row) for row in range(len(batch))]
        errors = [score.error for score in scores if not score.valid]
        if len(errors) == len(batch) > 1:
            raise RewardError(f"no reward for any of {len(batch)} completions; the first: {errors[0]}")
        log_failures(errors, len(batch))
        for score, conversation in zip(scores, batch, strict=True):
            if self.judge and score.valid:
                verdict = best(self.judge, conversation.reply, conversation.answers)
                score.accuracy_strict, score.accuracy_lenient = verdict.accuracy_strict, verdict.accuracy_lenient
                score.answer = verdict.answer
        return scores

    def close(self) -> None:
        """Release the processes that run its functions."""
        for function in self._called:
            if isinstance(function, WorkerReward):
                function.close()

    def _call_all(self, batch: Sequence[Finished]) -> list[RowValues]:
        """The results of all functions: functions of files in their processes, then the others in this one."""

        def offer(function: AnyReward, rows: Sequence[int]) -> dict[str, Any]:
            return offered([batch[i] for i in rows], self.columns, built_in=function.reference in BUILT_IN)

        apart = [function for function in self._called if isinstance(function, WorkerReward)]
        here = [function for function in self._called if isinstance(function, RewardFunction)]
        from_workers = iter(call_apart(apart, offer, len(batch), self.timeout_seconds))
        from_here = iter(call_here(here, offer, len(batch), self.timeout_seconds))
        return [next(from_workers if isinstance(f, WorkerReward) else from_here) for f in self._called]

    def _add_up(self, outcomes: Sequence[RowValues], row: int) -> Score:
        """The score of one row from what each function said of it."""
        parts: dict[str, float] = {}
        weights: dict[str, float] = {}
        total = 0.0
        for function, weight, outcome in zip(self.functions, self.weights, outcomes, strict=False):
            value = outcome.values[row]
            if error := outcome.errors[row] or _complaint(function, value):
                return Score(math.nan, valid=False, error=error)
            if value is not None:
                parts[function.name], weights[function.name] = value, weight
                total += weight * value
        if not parts:
            reason = f"{', '.join(f.reference for f in self.functions)} returned None: no reward applies to this row"
            return Score(math.nan, valid=False, error=reason)
        if wrong := why_untrainable(total):
            return Score(math.nan, valid=False, error=f"the rewards times env.reward_weights are {total:g}, {wrong}")
        shown = {name: value for outcome in outcomes for name, value in outcome.metrics[row].items()}
        score = Score(total, parts | shown, weights=weights | dict.fromkeys(shown, 0.0))
        if self.accuracy and not self.judge:
            place = next(i for i, function in enumerate(self._called) if function.reference == self.accuracy.reference)
            self._measure(score, self.accuracy, outcomes[place], row)
        return score

    def _measure(self, score: Score, function: AnyReward, outcome: RowValues, row: int) -> None:
        """Write the accuracy that `function` gave; raises RewardError for other than 0, 1 and None."""
        value, error = outcome.values[row], outcome.errors[row]
        if error:
            score.valid, score.error = False, error
        elif value not in (0.0, 1.0, None):
            raise RewardError(f"env.accuracy={function.reference} returned {value}: it must return 0, 1 or None")
        else:
            score.accuracy_strict = score.accuracy_lenient = value


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


def load_reward(reward: str) -> AnyReward:
    """The reward that a name or FILE.py:FUNCTION stands for; its file is imported, in a process of its own.

    Raises ConfigError where there is none, or where importing fails.
    """
    return _imported([_find_reward(reward)])[0]


def offered(batch: Sequence[Finished], columns: Sequence[str] = (), *, built_in: bool = False) -> dict[str, Any]:
    """The possible arguments of a function for conversations: a list each, columns by name, None where a row has none.

    `answer` is for a `built_in` one what it compares with, else a column. All are copies, each row's
    its own, so that no function changes what other rows, steps and functions see.
    """
    names = dict.fromkeys([*columns, *(name for finished in batch for name in finished.columns)])
    given: dict[str, Any] = {"step": [finished.step for finished in batch]}
    given |= {name: [deepcopy(finished.columns.get(name)) for finished in batch] for name in names}
    if built_in:
        given["answer"] = [finished.answers for finished in batch]
    return given | {
        "prompts": [deepcopy(finished.prompt) for finished in batch],
        "completions": [finished.completion for finished in batch],
        "completion_ids": [list(finished.reply_ids) for finished in batch],
    }


def check_columns(reward: AnyReward, columns: Sequence[str], source: str) -> None:
    """Raise DataError if `reward` has a parameter that is neither always offered nor a column of `source`.

    ConfigError for what TRL offers and rlpost does not.
    """
    for name in reward.required():
        if name in NOT_OFFERED:
            raise ConfigError(f"{reward.reference} takes {name}, which rlpost does not offer: write {name}=None there")
        if name not in OFFERED and name not in columns:
            listed = f"it has {', '.join(columns)}, and {', '.join(OFFERED)} are there always"
            near = nearest(name, [*columns, *OFFERED])
            hint = f"; did you mean {near}? {listed}" if near else f": {listed}"
            raise DataError(f"{reward.reference} takes {name}, which is not a column of {source}{hint}")


def _find_reward(reward: str) -> AnyReward:
    """The reward, its process started and not waited for."""
    if reward in BUILT_IN:
        needs = BUILT_IN[reward].needs
        if needs is None:
            return RewardFunction(reward, reward, BUILT_IN[reward].function)
        require(*needs, f"env.reward={reward}")
        found = WorkerReward(reward, reward, "", reward)
    elif reward in REWARDS and reward not in REWARD_FILES:  # by code that another process cannot import
        return RewardFunction(reward, reward, REWARDS[reward])
    elif reward in REWARDS:
        found = WorkerReward(reward, reward, REWARD_FILES[reward], reward, registered=True)
    else:
        path, _, name = reward.rpartition(":")
        if not path:
            known = [*BUILT_IN, *REWARDS]
            hint = did_you_mean(nearest(reward, known), f"give FILE.py:FUNCTION, or one of {', '.join(known)}")
            raise ConfigError(f"{reward} is not a reward{hint}")
        check_defines(path, name, f"reward {reward}")
        found = WorkerReward(name, reward, str(expanded(path).resolve()), name)
    found.worker.start()
    return found


def _imported(rewards: list[AnyReward]) -> list[AnyReward]:
    """`rewards`, once their files are imported. Raises ConfigError where that fails."""
    for reward in rewards:
        if isinstance(reward, WorkerReward):
            reward.about()
    return rewards


def _complaint(function: AnyReward, value: float | None) -> str | None:
    wrong = None if value is None else why_untrainable(value)
    return f"{function.reference} returned {value:g}, {wrong}" if wrong else None


# Functions of a file, in processes of their own


@dataclass(eq=False)
class WorkerReward:
    """The function `name` of the file at `path`, or that this plugin `registered`, in a warm process of its own.

    Rewards of one reference share the process, which ends with the last of them, or with their `close`.
    `limit` is the name of the deadline's setting in messages.
    """

    name: str
    reference: str
    path: str
    function: str
    registered: bool = False
    limit: str = LIMIT
    _worker: Worker | None = field(default=None, init=False)

    def named(self, name: str) -> WorkerReward:
        """A copy that is called `name` in the metrics."""
        return replace(self, name=name)

    @property
    def _order(self) -> _Order:
        return self.reference, self.path, self.function, self.registered

    @property
    def worker(self) -> Worker:
        """The worker, started if necessary; returns at once."""
        if self._worker is None:
            worker = _workers.get(self._order)
            if worker is None:
                worker = _workers[self._order] = self.new_worker()
            self._worker = worker
            worker.start()
        return self._worker

    def new_worker(self, environment: Mapping[str, str] | None = None) -> Worker:
        """A worker that is not shared, with `environment` added to this process's."""
        return Worker("rlpost.rewards.calls:serve", self._order, environment=environment)

    def about(self) -> dict[str, Any]:
        """The function's parameters, once its file is imported. Raises ConfigError if that fails."""
        try:
            return self.worker.about or self.worker.ready()
        except RewardError as error:
            raise ConfigError(f"{self.reference}: {error}") from error

    def required(self) -> list[str]:
        """The parameters that have no default."""
        return self.about()["required"]

    def takes(self) -> list[str] | None:
        """The names of its parameters; None if it takes `**kwargs`."""
        return self.about()["takes"]

    def close(self) -> None:
        """Release the process."""
        self._worker = None

    def request(self, offer: Offer, calls: Sequence[Sequence[int]], seconds: float) -> tuple[Worker, Any, float]:
        """A call of the worker for some calls of the function, each of some rows."""
        about = self.about()

        def arguments(rows: Sequence[int]) -> dict[str, Any]:
            offered = offer(self, rows)
            return {n: v for n, v in offered.items() if about["takes"] is None or n in about["takes"]}

        item = {"calls": [(arguments(rows), len(rows)) for rows in calls], "seconds": seconds, "limit": self.limit}
        return self.worker, item, seconds + (GRACE_SECONDS if about["is_async"] else 0.0)

    def failure(self, outcome: Outcome, seconds: float) -> str:
        """The message about a call whose process was late or died."""
        if not outcome.late:
            return f"{self.reference} failed: {outcome.error}"
        line = outcome.line_in(self.path)
        return late(self.reference, seconds, self.limit, f", at line {line}" if line else "")

    def values_of(self, outcome: Outcome, counts: Sequence[int], seconds: float) -> list[RowValues]:
        """The values that each call of a request returned for its rows."""
        printed = printable(" ".join(outcome.printed.split()))
        if printed:
            log.info("%s printed: %s", self.reference, printed)
        results = outcome.value if outcome.error is None else [{"error": self.failure(outcome, seconds)}] * len(counts)
        shown = f"; it printed: {printed[:PRINTED_SHOWN]}" if printed else ""
        with_output = [
            result | {"error": result["error"] + shown} if "error" in result else result for result in results
        ]
        return [row_values(result, count) for result, count in zip(with_output, counts, strict=True)]


AnyReward = RewardFunction | WorkerReward


def call_apart(rewards: Sequence[WorkerReward], offer: Offer, count: int, seconds: float) -> list[RowValues]:
    """The values of each reward for rows 0 to `count` - 1 (at least one), called concurrently, within `seconds`.

    `offer(reward, rows)` gives the arguments it can take. One that fails is called again row by row, to find the
    rows at fault, a deadline each; not one that returns a list of another length. Raises ConfigError and
    DataError that a function raised.
    """
    distinct = {reward.reference: reward for reward in rewards}
    outcomes = call_each([reward.request(offer, [range(count)], seconds) for reward in distinct.values()])
    by_reference: dict[str, RowValues] = {}
    for reward, outcome in zip(distinct.values(), outcomes, strict=True):
        [whole] = reward.values_of(outcome, [count], seconds)
        if whole.failed and count > 1:
            log.info("scoring %d rows one by one to find the rows that fail", count)
            whole = _one_by_one(reward, offer, count, seconds, together=not outcome.lost)
        by_reference[reward.reference] = whole
    return [by_reference[reward.reference] for reward in rewards]


def _one_by_one(reward: WorkerReward, offer: Offer, count: int, seconds: float, *, together: bool) -> RowValues:
    """The values of each row called alone; with `together`, an async function's calls run concurrently."""
    if together and reward.about()["is_async"]:
        [outcome] = call_each([reward.request(offer, [[i] for i in range(count)], seconds)])
        if not outcome.lost:
            return joined(reward.values_of(outcome, [1] * count, seconds))
    rows: list[RowValues] = []
    patience = Patience()
    for row in range(count):
        if patience.refusal:
            rows.append(row_values({"error": patience.refusal}, 1))
            continue
        [outcome] = call_each([reward.request(offer, [[row]], seconds)])
        rows += reward.values_of(outcome, [1], seconds)
        patience.note(rows[-1].errors[0] if outcome.lost else None)
    return joined(rows)
