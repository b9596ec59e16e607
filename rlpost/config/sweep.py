"""A sweep: settings with several values become one list of words for every combination of them."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from rlpost.config.overrides import Override, parse_words, shown
from rlpost.errors import ConfigError

MOST_JOBS = 200  # each is composed before the first begins, and they run one after the other
LONGEST_NAME = 60  # characters of a folder
FUNCTION = re.compile(r"(choice|range)\((.*)\)", re.DOTALL)
OTHER_FUNCTION = re.compile(r"(glob|interval|shuffle|sort|tag)\(.*\)", re.DOTALL)
OPENING, CLOSING, QUOTES = "([{", ")]}", "'\""


@dataclass(frozen=True)
class Job:
    """One combination: a readable name for its folder, what differs (key -> text), and all its words."""

    name: str
    differs: dict[str, str]
    words: list[str]

    @property
    def title(self) -> str:
        """What differs, on one line; long texts are cut."""
        return " ".join(f"{key}={shown(text)}" for key, text in self.differs.items())


def expand(words: Sequence[str]) -> list[Job]:
    """The jobs that `words` ask for; the last setting with several values changes fastest.

    A setting has several values as `a,b,c`, `choice(a,b,c)` or `range(start,stop,step)` (numbers
    below `stop`). Commas within quotes or brackets separate nothing, so `[add],[add,subtract]` is
    two lists and `"one, two"` one text. Values are not checked: composing each job does that.

    Raises ConfigError for a word that is no setting, values that cannot be read, and where no
    setting has several.
    """
    overrides = parse_words(words)
    values = {override.key: _values(override) for override in overrides}
    swept = [override.key for override in overrides if _is_swept(override)]
    if not swept:
        raise ConfigError("-m runs once for each of several values, and no setting has several: as in seed=0,1,2")
    if (count := math.prod(len(texts) for texts in values.values())) > MOST_JOBS:
        raise ConfigError(f"this is a sweep of {count:,} jobs: {MOST_JOBS:,} are the most at once")
    jobs = []
    for texts in itertools.product(*values.values()):
        chosen = dict(zip(values, texts, strict=True))
        differs = {key: chosen[key] for key in swept}
        jobs.append(Job(folder_name(differs), differs, [f"{key}={text}" for key, text in chosen.items()]))
    return _with_names_apart(jobs)


def folder_name(differs: Mapping[str, str]) -> str:
    """`{"optim.lr": "1e-5", "group_size": "8"}` -> `lr-1e-5_group-size-8`."""
    last_parts = [key.rpartition(".")[2] for key in differs]
    parts = []
    for key, text in differs.items():
        last = key.rpartition(".")[2]
        parts.append(f"{_plain(last if last_parts.count(last) == 1 else key)}-{_plain(text)}")
    return "_".join(parts)[:LONGEST_NAME].strip("-_.")


def _values(override: Override) -> list[str]:
    """The texts of one setting's values: itself alone where it has but one."""
    parts = split_at_commas(override.text)
    if unknown := next((part for part in parts if OTHER_FUNCTION.fullmatch(part)), None):
        name = unknown.partition("(")[0]
        raise ConfigError(f"{override}: a sweep knows a,b,c and choice(a,b,c) and range(start,stop,step), no {name}")
    function = FUNCTION.fullmatch(parts[0])
    if len(parts) > 1:
        if any(FUNCTION.fullmatch(part) for part in parts):
            raise ConfigError(f"{override}: choice and range stand alone; write out the values with commas")
        return _complete(parts, override)
    if function is None:
        return [override.text]
    if function[1] == "range":
        return _range(function[2], override)
    return _complete(split_at_commas(function[2]), override)


def _is_swept(override: Override) -> bool:
    parts = split_at_commas(override.text)
    return len(parts) > 1 or FUNCTION.fullmatch(parts[0]) is not None


def split_at_commas(text: str) -> list[str]:
    """The parts between the commas that stand outside quotes and brackets, without surrounding spaces.

    A quote opens where a part begins, so the apostrophe of `don't` is none.
    """
    parts, begin, depth, quote = [], 0, 0, ""
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote and text[i - 1] != "\\" else quote
        elif c in QUOTES and not text[begin:i].strip("([{ "):
            quote = c
        elif c in OPENING:
            depth += 1
        elif c in CLOSING:
            depth = max(0, depth - 1)
        elif c == "," and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    return [*parts, text[begin:].strip()]


def _complete(parts: list[str], override: Override) -> list[str]:
    if "" in parts:
        raise ConfigError(f"{override}: there is no value on one side of a comma; write two quotes for an empty text")
    if twice := next((part for i, part in enumerate(parts) if part in parts[:i]), None):
        raise ConfigError(f"{override}: {shown(twice)} stands there twice")
    return parts


def _range(arguments: str, override: Override) -> list[str]:
    try:
        numbers = [Decimal(part) for part in split_at_commas(arguments)]
        finite = all(number.is_finite() for number in numbers)
    except InvalidOperation:
        numbers, finite = [], False
    if not finite or len(numbers) not in (1, 2, 3) or (len(numbers) == 3 and numbers[2] == 0):
        raise ConfigError(f"{override}: write range(start,stop) or range(start,stop,step), as in range(0,1,0.25)")
    start, stop, step = (*([Decimal(0)] if len(numbers) == 1 else []), *numbers, Decimal(1))[:3]
    try:
        steps = (stop - start) / step
    except ArithmeticError:  # more than a Decimal can be
        steps = Decimal("Infinity")
    if steps > MOST_JOBS:
        count = f"{math.ceil(steps):,}" if steps < 10**15 else "countless"
        raise ConfigError(f"{override} has {count} values: {MOST_JOBS:,} jobs are the most at once")
    if steps <= 0:
        raise ConfigError(f"{override} is empty: from {start} there is no step of {step} towards {stop}")
    return [_number(start + i * step) for i in range(math.ceil(steps))]


def _number(value: Decimal) -> str:
    """0.25, 50, 1.5e-5."""
    plain = value == 0 or abs(value) >= Decimal("0.001")
    return f"{value.normalize():f}" if plain else f"{value.normalize():e}"


def _plain(text: str) -> str:
    return re.sub(r"(?:[^\w.+-]|_)+", "-", text).strip("-.")


def _with_names_apart(jobs: Iterable[Job]) -> list[Job]:
    """Jobs whose names coincide (long paths, texts of signs) get a few letters that depend on their words alone."""
    jobs = list(jobs)
    names = [job.name for job in jobs]
    return [job if job.name and names.count(job.name) == 1 else _named_apart(job) for job in jobs]


def _named_apart(job: Job) -> Job:
    letters = hashlib.sha256("\n".join(job.words).encode()).hexdigest()[:6]
    return Job(f"{job.name}_{letters}".lstrip("_"), job.differs, job.words)
