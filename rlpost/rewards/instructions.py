"""Does a reply follow the instructions of its prompt? Verdicts, strict and loose, and the reward made of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from rlpost.errors import ConfigError, DataError, RewardError
from rlpost.nearest import did_you_mean, nearest
from rlpost.rewards.checkers import require_nltk_data
from rlpost.rewards.score import Score

Check = Callable[[str], bool]  # whether a text follows one instruction

WEIGHTS = (0.4, 0.3, 0.2, 0.1)  # all strictly, share strictly, all loosely, share loosely
ANSWER_BONUS = 0.1  # for exactly one <answer> block, where only that is judged
THINK_BONUS = 0.05  # for exactly one <think> block, likewise

_PROBE = "One sentence, and *another* one. Is this a third?\n\nP.S. The second paragraph ends here."


class InstructionError(DataError):
    """An instruction that cannot be checked: `field` of its row is at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Judged:
    """What a reply follows: a verdict for each instruction, and the reply's complete think and answer blocks."""

    strict: list[bool]
    loose: list[bool]
    think_blocks: list[str]
    answer_blocks: list[str]


@dataclass(frozen=True)
class InstructionSet:
    """The kinds of instructions of one benchmark.

    `checkers()` maps each kind to its class; `own` to a check of this package's instead, where the
    class draws lots: a function from the instruction's arguments to the check. `nltk_data` says
    which of NLTK's packages a kind reads.
    """

    name: str
    checkers: Callable[[], Mapping[str, Any]]
    own: Mapping[str, Callable[..., Check]] = field(default_factory=dict)
    nltk_data: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def verdicts(
        self, instruction_ids: Sequence[str], kwargs: Sequence[Mapping[str, Any]], prompt: str, response: str
    ) -> tuple[list[bool], list[bool]]:
        """Which instructions `response` follows, strictly and loosely, in their order.

        Strictly: the response itself does. Loosely: it does, or one of the seven others that leave
        out its first line, its last, or both, and its asterisks or not (Zhou et al. 2023,
        arXiv:2311.07911, section 2.3). Blank text follows nothing. `kwargs` are the arguments of
        each instruction, `None` being none. Raises DataError for an instruction that is unknown or
        lacks an argument, RewardError, naming it, where its check fails on the response;
        MissingExtraError.
        """
        checks = self.checks(instruction_ids, kwargs)
        strict, loose = [], []
        for kind, check in zip(instruction_ids, checks, strict=True):
            follows = partial(_follows, kind, check, prompt)
            strict.append(follows(response))
            loose.append(strict[-1] or any(map(follows, _variants(response))))
        return strict, loose

    def judge(
        self,
        instruction_ids: Sequence[str],
        kwargs: Sequence[Mapping[str, Any]],
        prompt: str,
        reply: str,
        *,
        answer_only: bool,
    ) -> Judged:
        """The verdicts on all of `reply` or, with `answer_only`, on its first answer block; see `verdicts`."""
        answers = blocks(reply, "answer")
        judged = (answers[0] if answers else "") if answer_only else reply
        return Judged(*self.verdicts(instruction_ids, kwargs, prompt, judged), blocks(reply, "think"), answers)

    def complaint(self, row: Mapping[str, Any]) -> tuple[str, str] | None:
        """The field of a row that cannot be used and what is wrong with it, or None.

        Each instruction is set up and tried once. Raises DataError where NLTK's data are missing.
        """
        for name in ("instruction_id_list", "kwargs"):
            if not isinstance(row.get(name), list | tuple):
                return name, "missing" if name not in row else "must be a list, one entry an instruction"
        try:
            checks = self.checks(row["instruction_id_list"], row["kwargs"])
            for kind, arguments, check in zip(row["instruction_id_list"], row["kwargs"], checks, strict=True):
                _try(kind, arguments or {}, check)
        except InstructionError as error:
            return error.field, str(error)
        return None

    def checks(self, instruction_ids: Sequence[str], kwargs: Sequence[Mapping[str, Any]]) -> list[Check]:
        """A check for each instruction. Raises DataError as `verdicts` does."""
        if not instruction_ids:
            raise InstructionError("instruction_id_list", "there is no instruction to follow")
        if len(kwargs) != len(instruction_ids):
            raise InstructionError(
                "kwargs",
                f"there are {len(kwargs)} for {len(instruction_ids)} instructions: each needs one, {{}} if empty",
            )
        if wrong := next((one for one in kwargs if not isinstance(one, Mapping | None)), None):
            raise InstructionError("kwargs", f"{wrong!r:.60} is no object of named arguments")
        return [self._check(kind, arguments) for kind, arguments in zip(instruction_ids, kwargs, strict=True)]

    def _check(self, kind: str, arguments: Mapping[str, Any] | None) -> Check:
        checkers = self.checkers()
        if kind not in checkers:
            families = ", ".join(dict.fromkeys(name.partition(":")[0] for name in checkers))
            near = nearest(str(kind), checkers)
            raise InstructionError(
                "instruction_id_list",
                f"{kind!r} is no instruction of {self.name}{did_you_mean(near, f'its families are {families}')}",
            )
        for package in self.nltk_data.get(kind, ()):
            require_nltk_data(package, kind)
        build = self.own.get(kind)
        checker = checkers[kind](kind)
        given = _given(kind, arguments or {}, build or checker.build_description)
        return build(**given) if build else _library_check(kind, checker, given)


def score(judged: Judged, *, answer_only: bool, weights: Sequence[float] = WEIGHTS) -> Score:
    """The reward of the verdicts: `weights` times (all strictly, share strictly, all loosely, share loosely).

    With `answer_only`, exactly one answer block earns 0.1 more and exactly one think block 0.05.
    The parts sum to the reward. Accuracy is whether all instructions are followed: strictly
    (`accuracy_strict`), loosely (`accuracy_lenient`).
    """
    strict, loose = judged.strict, judged.loose
    measures = (float(all(strict)), fmean(strict), float(all(loose)), fmean(loose))
    names = ("prompt_strict", "instructions_strict", "prompt_loose", "instructions_loose")
    parts = {name: weight * measure for name, weight, measure in zip(names, weights, measures, strict=True)}
    if answer_only:
        parts["answer_block"] = ANSWER_BONUS * (len(judged.answer_blocks) == 1)
        parts["think_block"] = THINK_BONUS * (len(judged.think_blocks) == 1)
    return Score(
        math.fsum(parts.values()),
        parts,
        accuracy_strict=measures[0],
        accuracy_lenient=measures[2],
        instructions={"strict": strict, "loose": loose},
    )


def best_reward(*, answer_only: bool, weights: Sequence[float] = WEIGHTS) -> float:
    """What `score` gives a reply that follows everything, in its form too."""
    return score(Judged([True], [True], [""], [""]), answer_only=answer_only, weights=weights).reward


def checked_weights(weights: Sequence[float]) -> tuple[float, ...]:
    """`weights` as they are, or ConfigError unless they are four finite numbers."""
    if len(weights) != len(WEIGHTS) or not all(math.isfinite(weight) for weight in weights):
        raise ConfigError(
            f"format_weights={list(weights)} must be four numbers: all strictly, share strictly, all loosely, share "
            "loosely"
        )
    return tuple(weights)


def blocks(reply: str, tag: str) -> list[str]:
    """What stands in each `<tag>...</tag>` of `reply`, white space around it left out. Linear in its length."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    found, at = [], 0
    while (start := reply.find(opening, at)) >= 0 and (end := reply.find(closing, start)) >= 0:
        found.append(reply[start + len(opening) : end].strip())
        at = end + len(closing)
    return found


def _variants(response: str) -> list[str]:
    """The seven texts besides `response` itself that may follow an instruction for it, each once."""
    lines = response.split("\n")
    cut = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    plain = [text.replace("*", "") for text in cut]
    return list(dict.fromkeys([*cut[1:], *plain]))


def _follows(kind: str, check: Check, prompt: str, text: str) -> bool:
    if not text.strip():
        return False
    try:
        return bool(check(text))
    except Exception as error:
        asked = prompt if len(prompt) <= 60 else f"{prompt[:60]}..."
        raise RewardError(
            f"{kind} cannot be checked on a reply to {asked!r}: {type(error).__name__}: {error}"
        ) from error


def _given(kind: str, arguments: Mapping[str, Any], build: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of an instruction that say something: a 0 does where `build` takes it, an empty other one not."""
    taken = inspect.signature(build).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    given = {name: v for name, v in arguments.items() if v or (v is not None and name in taken)}
    for name in () if anything else given:
        if name not in taken:
            near = nearest(name, taken)
            known = f"it takes {', '.join(taken)}" if taken else "it takes none"
            raise InstructionError("kwargs", f"{kind} has no argument {name!r}{did_you_mean(near, known)}")
    needed = [name for name, p in taken.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if lacking := [name for name in needed if name not in given]:
        raise InstructionError("kwargs", f"{kind} needs {', '.join(lacking)}")
    return given


def _library_check(kind: str, checker: Any, given: Mapping[str, Any]) -> Check:
    """The check of one of the library's classes, which draws an argument it is not given, or cannot use, at random."""
    try:
        checker.build_description(**given)
    except Exception as error:
        raise InstructionError("kwargs", f"{kind} cannot be checked with {dict(given)}: {error}") from error
    used = checker.get_instruction_args() or {}
    drawn = [name for name, value in used.items() if _plain(value) != _plain(given.get(name))]
    if drawn:
        asked = ", ".join(f"{name}={given[name]!r}" if name in given else name for name in drawn)
        wrong = "cannot be checked with" if any(name in given for name in drawn) else "needs"
        raise InstructionError("kwargs", f"{kind} {wrong} {asked}")
    return checker.check_following


def _plain(value: Any) -> Any:
    """An argument without what the library's classes change in it: order, repetition, case, white space around it."""
    if isinstance(value, list | tuple | set):
        return sorted({str(_plain(one)) for one in value})
    return value.strip().lower() if isinstance(value, str) else value


def _try(kind: str, arguments: Mapping[str, Any], check: Check) -> None:
    """Run a check once, so that an argument it cannot work with is found before training.

    The text has the arguments in it: a check that looks for one after the other comes to the last.
    """
    given = [one for value in arguments.values() for one in (value if isinstance(value, list) else [value])]
    try:
        check(f"{_PROBE}\n{' '.join(map(str, given))}")
    except Exception as error:
        raise InstructionError("kwargs", f"{kind} cannot be checked with them: {error}") from error
