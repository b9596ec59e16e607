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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from rlpost.errors import ConfigError, DataError, RewardError
from rlpost.files import expanded
from rlpost.imports import require
from rlpost.rewards.builtin import BUILT_IN, best
from rlpost.rewards.calls import (
    GRACE_SECONDS,
    TIMEOUT_SECONDS,
    Finished,
    Request,
    RewardFunction,
    RowValues,
    Signature,
    call_here,
    joined,
    late,
    offered,
)
from rlpost.rewards.score import Patience, Score, log_failures, why_untrainable
from rlpost.rewards.workers import Outcome, Worker, at_once
from rlpost.settings import EnvSettings, OwnRowsSettings
from rlpost.settings.base import RESERVED_PARTS, REWARD_FILES, REWARDS
from rlpost.text import did_you_mean, nearest, printable
from rlpost.user_file import check_defines

OFFERED = ("prompts", "completions", "completion_ids", "log_metric", "step")  # besides the columns
NOT_OFFERED = ("trainer_state", "log_extra", "environments")  # of TRL's signature
PRINTED_SHOWN = 200  # characters of a failed call's output
_workers: WeakValueDictionary[tuple[str, str], Worker] = WeakValueDictionary()  # each ends with its last user
log = logging.getLogger("rlpost")


# Loading and scoring


def load_rewards(settings: EnvSettings) -> Rewards | None:
    """The rewards that the settings of an environment name, their files imported; None if it has its own, or none.

    Raises ConfigError for one that cannot be loaded.
    """
    if not isinstance(settings, OwnRowsSettings) or not settings.reward:
        return None
    accuracy = settings.accuracy
    if accuracy is None:
        measures = [name for name, each in BUILT_IN.items() if each.measures_accuracy]
        accuracy = next((name for name in settings.reward if name in measures), None)
    references = [*settings.reward, *([] if accuracy is None else [accuracy])]
    found = [_find_reward(reference, name) for reference, name in zip(references, _names(references), strict=True)]
    for reward in found:
        reward.signature()  # waits until its file is imported
    functions = found[: len(settings.reward)]
    weights = settings.reward_weights or [1.0] * len(functions)
    return Rewards(functions, weights, None if accuracy is None else found[-1], settings.reward_timeout_seconds)


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
        # a function that is among the rewards too is called once
        self.accuracy = accuracy and next((f for f in functions if f.reference == accuracy.reference), accuracy)
        self.timeout_seconds = timeout_seconds
        self.columns: Sequence[str] = ()
        self.judge = BUILT_IN[accuracy.reference].judge if accuracy and accuracy.reference in BUILT_IN else None
        self._called = list(functions)
        if self.accuracy and not self.judge and self.accuracy not in functions:
            self._called.append(self.accuracy)

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
        wanted = [function.signature().takes for function in self._called if function.reference not in BUILT_IN]
        return any(names is None or column in names for names in wanted)

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

    def _call_all(self, batch: Sequence[Finished]) -> dict[AnyReward, RowValues]:
        """The results of all functions: functions of files in their processes, then the others in this one."""
        given = batch, self.columns, self.timeout_seconds
        apart = {reward.reference: reward for reward in self._called if isinstance(reward, WorkerReward)}
        here = [reward for reward in self._called if isinstance(reward, RewardFunction)]
        rewards, workers = list(apart.values()), [reward.worker for reward in apart.values()]
        found = dict(zip(apart, at_once(lambda reward: reward.values(*given), rewards, workers), strict=True))
        results: dict[AnyReward, RowValues] = dict(zip(here, call_here(here, *given), strict=True))
        results |= {r: found[r.reference] for r in self._called if isinstance(r, WorkerReward)}
        return {reward: results[reward] for reward in self._called}

    def _add_up(self, results: Mapping[AnyReward, RowValues], row: int) -> Score:
        """The score of one row from what each function said of it."""
        parts: dict[str, float] = {}
        weights: dict[str, float] = {}
        total = 0.0
        for function, weight in zip(self.functions, self.weights, strict=True):
            value, error = results[function].values[row], results[function].errors[row]
            if not error and value is not None and (wrong := why_untrainable(value)):
                error = f"{function.reference} returned {value:g}, {wrong}"
            if error:
                return Score(math.nan, valid=False, error=error)
            if value is not None:
                parts[function.name], weights[function.name] = value, weight
                total += weight * value
        if not parts:
            reason = f"{', '.join(f.reference for f in self.functions)} returned None: no reward applies to this row"
            return Score(math.nan, valid=False, error=reason)
        if wrong := why_untrainable(total):
            return Score(math.nan, valid=False, error=f"the rewards times env.reward_weights are {total:g}, {wrong}")
        shown = {name: value for outcome in results.values() for name, value in outcome.metrics[row].items()}
        score = Score(total, parts | shown, weights=weights | dict.fromkeys(shown, 0.0))
        if self.accuracy and not self.judge:
            value, score.error = results[self.accuracy].values[row], results[self.accuracy].errors[row]
            score.valid = score.error is None
            if value not in (0.0, 1.0, None):
                reference = self.accuracy.reference
                raise RewardError(f"env.accuracy={reference} returned {value}: it must return 0, 1 or None")
            score.accuracy_strict = score.accuracy_lenient = value
        return score


def load_reward(reward: str) -> AnyReward:
    """The reward that a name or FILE.py:FUNCTION stands for; its file is imported, in a process of its own.

    Raises ConfigError where there is none, or where importing fails.
    """
    found = _find_reward(reward, reward.rpartition(":")[2])
    found.signature()  # waits until its file is imported
    return found


def check_columns(reward: AnyReward, columns: Sequence[str], source: str) -> None:
    """Raise DataError if `reward` has a parameter that is neither always offered nor a column of `source`.

    ConfigError for what TRL offers and rlpost does not.
    """
    for name in reward.signature().required:
        if name in NOT_OFFERED:
            raise ConfigError(f"{reward.reference} takes {name}, which rlpost does not offer: write {name}=None there")
        if name not in OFFERED and name not in columns:
            listed = f"it has {', '.join(columns)}, and {', '.join(OFFERED)} are there always"
            near = nearest(name, [*columns, *OFFERED])
            hint = f"; did you mean {near}? {listed}" if near else f": {listed}"
            raise DataError(f"{reward.reference} takes {name}, which is not a column of {source}{hint}")


def _find_reward(reward: str, name: str) -> AnyReward:
    """The reward, called `name` in the metrics, its process started and not waited for."""
    if reward in BUILT_IN:
        needs = BUILT_IN[reward].needs
        if needs is None:
            return RewardFunction(name, reward, BUILT_IN[reward].function)
        require(*needs, f"env.reward={reward}")
        path = ""
    elif reward in REWARDS:
        if reward not in REWARD_FILES:  # by code that another process cannot import
            return RewardFunction(name, reward, REWARDS[reward])
        path = REWARD_FILES[reward]
    else:
        file, _, function = reward.rpartition(":")
        if not file:
            known = [*BUILT_IN, *REWARDS]
            hint = did_you_mean(nearest(reward, known), f"give FILE.py:FUNCTION, or one of {', '.join(known)}")
            raise ConfigError(f"{reward} is not a reward{hint}")
        check_defines(file, function, f"reward {reward}")
        path = str(expanded(file).resolve())
    found = WorkerReward(name, reward, path)
    found.worker.start()
    return found


# Functions of a file, in processes of their own


@dataclass(eq=False)
class WorkerReward:
    """The reward `reference` of the file or plugin at `path` (built-in: ""), in a warm process of its own.

    `name` is what the metrics call it. Rewards of one reference share the process, which ends with the last of them,
    or with their `close`.
    """

    name: str
    reference: str
    path: str = ""
    _worker: Worker | None = field(default=None, init=False)

    @property
    def worker(self) -> Worker:
        """The worker, started if necessary; returns at once."""
        if self._worker is None:
            self._worker = _workers.setdefault((self.reference, self.path), self.new_worker())
            self._worker.start()
        return self._worker

    def new_worker(self, environment: dict[str, str] | None = None) -> Worker:
        """A worker that is not shared, with `environment` added to this process's."""
        return Worker("rlpost.rewards.calls:serve", (self.reference, self.path), environment=environment)

    def signature(self) -> Signature:
        """The function's parameters, once its file is imported. Raises ConfigError if that fails."""
        try:
            return self.worker.ready()
        except RewardError as error:
            raise ConfigError(f"{self.reference}: {error}") from error

    def close(self) -> None:
        """Release the process."""
        self._worker = None

    def values(self, batch: Sequence[Finished], columns: Sequence[str], seconds: float) -> RowValues:
        """The values of a batch, called within `seconds`.

        If the call fails, the function is called row by row, to find the rows at fault, with a deadline each; not if
        it returned a list of another length. Raises ConfigError and DataError that it raised.
        """
        rows, lost = self.call([batch], columns, seconds)
        if not rows.failed or len(batch) == 1:
            return rows
        log.info("scoring %d rows one by one to find the rows that fail", len(batch))
        if not lost and self.signature().is_async:  # together
            rows, lost = self.call([[row] for row in batch], columns, seconds)
            if not lost:
                return rows
        alone: list[RowValues] = []
        patience = Patience()
        for row in batch:
            if patience.refusal:
                alone.append(RowValues.of_error(patience.refusal, 1))
                continue
            rows, lost = self.call([[row]], columns, seconds)
            patience.note(rows.errors[0] if lost else None)
            alone.append(rows)
        return joined(alone)

    def call(
        self,
        batches: Sequence[Sequence[Finished]],
        columns: Sequence[str],
        seconds: float,
        worker: Worker | None = None,
    ) -> tuple[RowValues, bool]:
        """The values of some calls of the function, one a batch, and whether they cost their process.

        They are made in one call of the `worker`, async ones at the same time.
        """
        signature = self.signature()
        calls: list[tuple[dict[str, Any], int]] = []
        for batch in batches:
            given = offered(self.reference, batch, columns)
            wanted = given if signature.takes is None else {n: given[n] for n in signature.takes if n in given}
            calls.append((wanted, len(batch)))
        deadline = seconds + (GRACE_SECONDS if signature.is_async else 0.0)
        outcome = (worker or self.worker).call(Request(calls, seconds), deadline)
        if outcome.error is None:
            rows = joined([RowValues(**answer) for answer in outcome.value])
        else:
            rows = RowValues.of_error(self._failure(outcome, seconds), sum(map(len, batches)))
        if printed := printable(" ".join(outcome.printed.split())):
            log.info("%s printed: %s", self.reference, printed)
            rows.errors = [error and f"{error}; it printed: {printed[:PRINTED_SHOWN]}" for error in rows.errors]
        return rows, outcome.lost

    def _failure(self, outcome: Outcome, seconds: float) -> str:
        """The message about a call whose process was late or died."""
        if not outcome.late:
            return f"{self.reference} failed: {outcome.error}"
        line = outcome.line_in(self.path)
        return late(self.reference, seconds, f", at line {line}" if line else "")


AnyReward = RewardFunction | WorkerReward
