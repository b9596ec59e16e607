"""Pass rates: how often a model answers each prompt right, measured once, saved, and read to choose prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rlpost.data.conversation import Conversation, Message
from rlpost.envs.chat import DatasetChatEnv
from rlpost.errors import DataError
from rlpost.files import expanded, replaced
from rlpost.settings import EnvSettings
from rlpost.text import counted

if TYPE_CHECKING:
    pass


def rates_of(played: Sequence[Conversation]) -> list[dict[str, Any]]:
    """One object a prompt: `prompt` (its digest), `where`, `pass_rate`, `samples`.

    The rate is the mean lenient accuracy of its completions, which follow each other in `played`; without an accuracy
    their mean reward. Completions whose reward failed are left out, and so is a prompt that has no others.
    """
    rates = []
    for _, each in groupby(played, key=lambda c: c.group_id):
        scored = [c for c in each if c.valid]
        marks = [c.reward or 0.0 if c.accuracy_lenient is None else c.accuracy_lenient for c in scored]
        if scored:
            first = scored[0]
            rate = {"prompt": prompt_digest(prompt_of(first.messages)), "where": first.where, "pass_rate": fmean(marks)}
            rates.append(rate | {"samples": len(marks)})
    return rates


def summary_of(rates: Sequence[Mapping[str, Any]]) -> str:
    """How many of the prompts were never, sometimes and always answered right."""
    shares = [each["pass_rate"] for each in rates]
    never, always = shares.count(0), shares.count(1)
    between = len(shares) - never - always
    return f"{counted(len(shares), 'prompt')}: {never:,} never right, {between:,} sometimes, {always:,} always"


def write_rates(file: Path, rates: Sequence[Mapping[str, Any]], measured: Mapping[str, Any]) -> None:
    """Write `rates`, one JSON object a line, below a line that records how they were `measured`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replaced(file) as making:
        making.write_text("".join(json.dumps(each) + "\n" for each in [{"measured": measured}, *rates]))


def read_rates(path: str) -> dict[str, float]:
    """Prompt digest -> pass rate. Raises DataError for a file that `rlpost data measure` did not write."""
    advice = "give a file that rlpost data measure has written"
    try:
        lines = [json.loads(line) for line in expanded(path).read_text(encoding="utf-8").splitlines()]
        return {each["prompt"]: float(each["pass_rate"]) for each in lines if "measured" not in each}
    except OSError as error:
        raise DataError(f"env.pass_rates={path} cannot be read ({error.strerror}): {advice}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"env.pass_rates={path} holds no pass rates ({error}): {advice}") from error


def choose_by_pass_rate(env: DatasetChatEnv, settings: EnvSettings) -> str | None:
    """Drop the prompts of `env`, or of each source of a mix, whose pass rates its settings exclude.

    Returns a line to report; None if no rates are given. Raises DataError for prompts that were not measured, and if
    none is kept.
    """
    reports = []
    for part in env.parts:
        names = ("pass_rates", "min_pass_rate", "max_pass_rate")
        path, low, high = (getattr(part.source_settings or settings, name, None) for name in names)
        if path is not None and low is not None and high is not None:
            prompts = ((part.where(n), part.opening_messages(row)) for n, row in enumerate(part.rows))
            out, report = _left_out(prompts, path, low, high)
            reports.append(report)
            if out:
                part.drop_rows(out, report)
    return "; ".join(reports) or None


def _left_out(
    prompts: Iterable[tuple[str, Sequence[Message]]], path: str, low: float, high: float
) -> tuple[list[int], str]:
    """The numbers of the `prompts`, each with its place, whose rates are out of bounds; how many are kept, in words.

    Raises DataError for prompts that were not measured.
    """
    rates = read_rates(path)
    found = [(where, rates.get(prompt_digest(messages))) for where, messages in prompts]
    if missing := [where for where, rate in found if rate is None]:
        raise DataError(
            f"env.pass_rates={path} has no rate for {len(missing):,} of {counted(len(found), 'prompt')}, such as "
            f"{missing[0]}: measure again with rlpost data measure and the same env settings"
        )
    out = [n for n, (_, rate) in enumerate(found) if rate is not None and not low <= rate <= high]
    kept, of = len(found) - len(out), counted(len(found), "prompt")
    return out, f"{kept:,} of {of} have pass rates in [{low:g}, {high:g}]"


def prompt_digest(messages: Sequence[Message]) -> str:
    """The digest of a prompt: of the role and content of each of its messages."""
    contents = [[message["role"], message["content"]] for message in messages]
    return hashlib.blake2b(json.dumps(contents).encode(), digest_size=12).hexdigest()


def prompt_of(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages before the assistant's first."""
    return messages[: next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))]
