"""The record of a run: the words of its log.txt, and metrics.jsonl read back. Imports nothing heavy."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from rlpost.text import counted

# lines of log.txt about the run itself
BEGAN = "the run began"
FINISHED = "the run finished"
STOPPED = "the run was stopped by a signal"
FAILED = "the run ended with"
TOTAL_STEPS = "total_steps"  # key in environment.json: the number of steps, which may depend on the data
PRECISION = "numbers"  # key in environment.json and in a checkpoint's state.json: the precisions a run computes in
CODE = "code"  # key in environment.json: a hash of rlpost's files, and of each file of the user's code
DATA = "data"  # key in environment.json: the rows of each split, in words with a hash
ENDED_EARLY = "ended_early"  # key in environment.json: why a run ended before its last step, if not by a signal
# settings that older runs left open in config.yaml, though they chose a value
LEFT_OPEN = ("model.autocast", "model.day", "policy.dtype", "max_policy_lag", "loss.sampler_correction")
AS_BEGUN = "as the run began"  # why a resumed run has a setting that was chosen for it
INCIDENT = "incident.json"  # in the folder of a run that an error ended
FACTS = "facts"  # key in environment.json: see `Fact`
CHOSEN = "chosen"  # key in environment.json: the settings that rlpost chose, each with its reason

# keys of an evaluation's figures
ACCURACY = "eval/accuracy_lenient"
STRICT = "eval/accuracy_strict"
REWARD = "eval/reward"
MEANS_STRICT = "strict counts a right answer only in the exact form that the task asks for"
MEANS_LATE = "late: mean of the last quarter of the steps"
LOSS = "eval/loss"
MARGIN = "eval/reward_margin"  # of pairs of replies: by how much the chosen one's implicit reward is higher
PAIR_ACCURACY = "eval/pair_accuracy"  # share of the pairs in which it is
OF_ROWS = (LOSS, MARGIN, PAIR_ACCURACY)  # figures of held-out rows, not of prompts
HELD_OUT_FIGURES = (
    ("accuracy", ACCURACY),
    ("strict accuracy", STRICT),
    ("reward", REWARD),
    ("loss", LOSS),
    ("pair accuracy", PAIR_ACCURACY),
    ("reward margin", MARGIN),
)
TRAINED_LOSSES = ("loss/dpo", "loss/distill", "loss/sft")  # the main loss of a step, where no reward is trained on
DECIDING = "eval/deciding_"  # prefix of figures that only decide when training ends


class Metric(NamedTuple):
    """How a figure of metrics.jsonl is called: its title, its unit, and its short word on the screen."""

    title: str
    unit: str = ""
    word: str = ""


SHARE = "%"
METRICS = {  # in the order of a report's page
    "reward/mean": Metric("reward of the step's completions"),
    "accuracy/lenient": Metric("completions with a right answer", SHARE, "accuracy"),
    "accuracy/strict": Metric("completions with a right answer in the exact form", SHARE),
    "loss/sft": Metric("training loss per token"),
    "loss/dpo": Metric("training loss per pair"),
    "loss/distill": Metric("distillation loss per token"),
    ACCURACY: Metric("held-out accuracy", SHARE),
    STRICT: Metric("held-out strict accuracy", SHARE),
    REWARD: Metric("held-out reward"),
    LOSS: Metric("held-out loss"),
    PAIR_ACCURACY: Metric("held-out pairs whose chosen reply is preferred", SHARE),
    MARGIN: Metric("held-out reward margin"),
    "pair_accuracy": Metric("pairs whose chosen reply is preferred", SHARE, "pairs"),
    "reward_margin": Metric("reward margin, chosen minus rejected"),
    "rewards/chosen": Metric("implicit reward of chosen replies"),
    "rewards/rejected": Metric("implicit reward of rejected replies"),
    "reward/std": Metric("standard deviation of the rewards", "", "reward sd"),
    "reward/failed": Metric("completions whose reward failed"),
    "reward/mean_drawn": Metric("reward of all completions drawn"),
    "reward/kl_penalty": Metric("KL penalty in the reward"),
    "groups/zero_std": Metric("groups with equal rewards, which teach nothing", SHARE, "no spread"),
    "selected/share": Metric("completions good enough to train on", SHARE, "selected"),
    "selected/reward_mean": Metric("reward of the selected completions"),
    "completion/tokens_mean": Metric("mean tokens of a completion", "", "tokens"),
    "completion/truncated": Metric("completions truncated at the limit", SHARE, "truncated"),
    "eval/tokens_mean": Metric("tokens of a held-out completion"),
    "eval/truncated": Metric("held-out completions truncated at the limit", SHARE),
    "eval/failed": Metric("held-out completions whose reward failed"),
    "turns/mean": Metric("turns of a conversation"),
    "turns/ran_out": Metric("conversations that ran out of turns", SHARE),
    "tools/calls_mean": Metric("tool calls of a completion"),
    "tools/errors_mean": Metric("failed tool calls of a completion"),
    "loss/policy": Metric("policy loss"),
    "loss/kl": Metric("KL term of the loss"),
    "loss/entropy": Metric("entropy term of the loss"),
    "entropy": Metric("entropy of the policy in nats a token, 0 if it is certain", "", "entropy"),
    "kl/ref": Metric("distance from the reference model, nats a token", "", "kl to ref"),
    "kl/teacher": Metric("distance from the teacher, nats a token", "", "kl to teacher"),
    "kl/sampler": Metric("distance of sampler and trainer (KL), nats a token"),
    "sampler/logprob_gap": Metric("difference of sampler and trainer in log-prob, nats a token", "", "gap"),
    "sampler/ess": Metric("effective share of the sample, 1 if all weigh the same", SHARE, "ess"),
    "sampler/cut": Metric("tokens whose sampler weight is bounded", SHARE),
    "ess": Metric("effective sample of the update", SHARE),
    "ratio/clip_fraction": Metric("tokens whose policy ratio the loss clips", SHARE, "clipped"),
    "ratio/clip_low": Metric("tokens clipped at the lower bound", SHARE),
    "ratio/clip_high": Metric("tokens clipped at the upper bound", SHARE),
    "grad_norm": Metric("norm of the gradient, before clipping", "", "grad"),
    "lr": Metric("learning rate"),
    "epoch": Metric("passes over the rows"),
    "policy/version": Metric("weight updates when the completions were sampled"),
    "policy/lag_mean": Metric("weight updates between sampling and training", "", "lag"),
    "policy/lag_max": Metric("most weight updates between sampling and training"),
    "groups/drawn": Metric("groups sampled"),
    "groups/dropped": Metric("groups left out"),
    "groups/evicted": Metric("groups evicted, since the run began"),
    "buffer/dropped_by_age": Metric("groups dropped by age, since the run began"),
    "tokens/generated": Metric("tokens generated"),
    "tokens/read": Metric("tokens read"),
    "tokens/trained": Metric("tokens trained on"),
    "memory/peak_gb": Metric("peak memory", "GB"),
    "memory/host_gb": Metric("peak memory of the machine", "GB"),
    "time/step": Metric("time of a step", "s"),
    "time/rollout": Metric("sampling completions", "s", "rollout"),
    "time/reward": Metric("scoring completions", "s", "scoring"),
    "time/wait": Metric("training waiting for completions", "s", "wait"),
    "time/train": Metric("training", "s"),
    "time/sync": Metric("weights to the sampler", "s", "sync"),
    "time/idle": Metric("samplers waiting for training", "s", "idle"),
}
WORDS = {each.word: each.title for each in METRICS.values() if each.word} | {  # short word -> its meaning
    "check": "comparing sampler and trainer",
    "eval": "held-out data",
    "save": "checkpoints",
    "record": "metrics and completions to disk",
    "rest": "all else",
}


R = TypeVar("R", bound=Mapping[str, Any])


class Fact(NamedTuple):
    """One fact of a training, as its plan, its record and its report show it; a note warns the user."""

    name: str
    value: str = ""  # empty: there is only a note
    note: str = ""
    reason: str = ""  # why it is so, where rlpost chose it

    @property
    def text(self) -> str:
        """The value, with the reason for it."""
        return self.value + (f" ({self.reason})" if self.reason else "")

    def __str__(self) -> str:
        return f"{self.name:<7} {self.text}"


def facts_in(environment: Mapping[str, Any]) -> list[Fact]:
    """The facts that environment.json keeps; none in the record of an earlier version."""
    return [Fact(**each) for each in environment.get(FACTS, [])]


def is_apart(key: str, values: Sequence[Any]) -> bool:
    """Whether a setting differs between runs; the day does not count, nor a value that an older run left open."""
    known = [value for value in values if key not in LEFT_OPEN or value not in (None, "auto")]
    return key != "model.day" and any(value != known[0] for value in known)


class Interval(NamedTuple):
    """A held-out figure with its 95% interval, and the number of prompts, or rows, that it is a mean of."""

    value: float
    low: float | None  # None: unknown variance, as when all prompts have the same score
    high: float | None
    prompts: int | None = None  # None: not recorded
    is_share: bool = True  # shown in percent; False for a reward or a loss

    def __str__(self) -> str:
        value = f"{self.value:6.1%}" if self.is_share else f"{self.value:.3f}"
        if self.low is None or self.high is None:
            return f"{value} (no interval)"
        if self.is_share:
            return f"{value} [{self.low:.1%}, {self.high:.1%}]"
        return f"{value} [{self.low:.3f}, {self.high:.3f}]"

    def as_text(self, unit: str = "prompt", *, shown: int | None = None) -> str:
        """As text with the number of prompts, unless `shown` says that number already."""
        return f"{self}".strip() + ("" if self.prompts in (None, shown) else f" of {counted(self.prompts, unit)}")

    def as_dict(self) -> dict[str, float | None]:
        """Plain values, for JSON."""
        return {"value": self.value, "low": self.low, "high": self.high, "prompts": self.prompts}

    def differs_from(self, other: Interval) -> bool:
        """Whether the 95% interval of the difference of two independent figures excludes 0.

        It is joined from both intervals (Newcombe 1998). Without an interval nothing differs.
        """
        less, more = sorted((self, other), key=lambda each: each.value)
        if more.low is None or less.high is None:
            return False
        return more.value - less.value > math.hypot(more.value - more.low, less.high - less.value)

    @property
    def half_width(self) -> float | None:
        """The larger distance to an end of the interval."""
        return None if self.low is None or self.high is None else max(self.high - self.value, self.value - self.low)


def read_metrics(file: Path) -> tuple[list[dict[str, Any]], int]:
    """The complete rows of metrics.jsonl, and how many lines are incomplete."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [], 0
    lines = [line for line in text.splitlines() if line.strip()]
    rows = [row for line in lines if (row := metrics_row(line)) is not None]
    return rows, len(lines) - len(rows)


def metrics_row(line: str) -> dict[str, Any] | None:
    """One line of metrics.jsonl, with None for numbers that are not finite; None for an incomplete line."""
    try:
        row = json.loads(line, parse_constant=lambda nan: None)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


class MetricsFile:
    """Reads metrics.jsonl while it grows; gives each row once, also when a resumed run replaces the file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._inode = 0
        self._offset = 0
        self._read: set[int] = set()  # hashes of the lines already returned

    def new_rows(self) -> list[dict[str, Any]]:
        """The rows that were completed since the last call."""
        try:
            with self.file.open("rb") as stream:
                status = os.fstat(stream.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset = status.st_ino, 0
                stream.seek(self._offset)
                whole = stream.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self._offset += len(whole) + 1 if whole else 0
        fresh = [line for line in whole.splitlines() if hash(line) not in self._read]
        self._read.update(map(hash, fresh))
        return [row for line in fresh if (row := metrics_row(line.decode(errors="replace"))) is not None]


def legend(text: str) -> str:
    """The meanings of the short words in `text`, in one line."""
    found = [word for word in WORDS if re.search(rf"(?<![\w/-]){word}(?![\w/-])", text)]
    return "; ".join(f"{word}: {WORDS[word]}" for word in found)


def has_evaluation(row: Mapping[str, Any]) -> bool:
    """Whether a metrics row holds figures of an evaluation."""
    return any(key.startswith("eval/") for key in row)


def number(row: Mapping[str, Any], key: str) -> float | None:
    """A figure of a metrics row; None if it is missing or was not finite when it was recorded."""
    return row.get(key)


def interval(row: Mapping[str, Any], key: str = "eval/accuracy_lenient") -> Interval | None:
    """A held-out figure of a metrics row, with its interval; None if the row has none.

    Those of `OF_ROWS` count rows, all others prompts: those in `KEY_prompts` if only some have the figure, otherwise
    all that were scored.
    """
    value, low, high = (number(row, key + end) for end in ("", "_low", "_high"))
    if value is None:
        return None
    counts = ("eval/rows",) if key in OF_ROWS else (f"{key}_prompts", f"{key.rpartition('/')[0]}/prompts")
    if key.startswith(DECIDING):
        counts = (f"{key}_prompts", f"{DECIDING}prompts")
    count = next((found for name in counts if (found := number(row, name)) is not None), None)
    return Interval(value, low, high, None if count is None else round(count), "reward" not in key and key != LOSS)


def trained_loss(row: Mapping[str, Any]) -> float | None:
    """The main loss of a step that learned from rows; None for other steps."""
    return next((value for key in TRAINED_LOSSES if (value := number(row, key)) is not None), None)


def late_mean(values: Iterable[float | None]) -> float | None:
    """The mean of the last quarter of the known `values`; None without any. A single step's reward is mostly noise."""
    known = [value for value in values if value is not None]
    return fmean(known[-max(1, len(known) // 4) :]) if known else None


def main_figure(row: Mapping[str, Any]) -> Interval | None:
    """Held-out accuracy, or the reward if the environment measures no accuracy."""
    return interval(row, ACCURACY) or interval(row, REWARD)


def main_figures(rows: Sequence[Mapping[str, Any]]) -> list[Interval | None]:
    """The accuracy in each of a run's evaluations; the reward if there is none, or if only the reward is not 0."""
    accuracies, rewards = ([interval(row, key) for row in rows] for key in (ACCURACY, REWARD))
    moves = any(figure.value for figure in accuracies if figure)
    return (
        accuracies if moves or (any(accuracies) and not any(figure.value for figure in rewards if figure)) else rewards
    )


def says_more(strict: Sequence[float | None], lenient: Sequence[float | None]) -> bool:
    """Whether strict accuracies are worth showing beside the lenient ones: they differ, and are not all 0."""
    return any(strict) and list(strict) != list(lenient)


def worth_showing(values: Mapping[str, Sequence[float | None]]) -> list[str]:
    """The keys of held-out figures to show: those with a value, without strict accuracy where it says no more than the
    lenient one and without a reward that is the accuracy.
    """
    kept = [key for key, its in values.items() if any(value is not None for value in its)]
    accuracy = list(values.get(ACCURACY, ()))
    adds = {STRICT: says_more(values.get(STRICT, ()), accuracy), REWARD: list(values.get(REWARD, ())) != accuracy}
    return [key for key in kept if adds.get(key, True)]


class HeldOut(NamedTuple):
    """A held-out figure before and after training; None where it was not measured."""

    name: str
    key: str
    before: Interval | None
    after: Interval | None


def held_out(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[HeldOut]:
    """The figures worth showing of the metrics of two evaluations, before training and after it."""
    shown = worth_showing({key: [number(before, key), number(after, key)] for _, key in HELD_OUT_FIGURES})
    named = [(name, key) for name, key in HELD_OUT_FIGURES if key in shown]
    return [HeldOut(name, key, interval(before, key), interval(after, key)) for name, key in named]


def prompts_of(found: Sequence[HeldOut]) -> int | None:
    """How many prompts held-out figures were measured on; None if that is not known, or if rows were measured."""
    figures = [figure for each in found if each.key not in OF_ROWS for figure in (each.after, each.before) if figure]
    return figures[0].prompts if figures else None


def held_out_lines(found: Sequence[HeldOut], prompts: int | None) -> list[str]:
    """Held-out figures before and after training, one a line, for a page that names the number of `prompts`."""
    lines = []
    for each in found:
        unit = "row" if each.key in OF_ROWS else "prompt"
        pair = (f.as_text(unit, shown=prompts) if f else "not measured" for f in (each.before, each.after))
        lines.append(f"{each.name:<18}{'  ->  '.join(pair)}")
    return [*lines, MEANS_STRICT] if any(each.key == STRICT for each in found) else lines


def one_of_each_first(rows: Sequence[R], key: str) -> list[R]:
    """`rows` with the first of each value of `key` in front, otherwise in their order."""
    numbers: dict[Any, int] = {}
    is_first = [numbers.setdefault(row[key], i) == i for i, row in enumerate(rows)]
    return [row for first in (True, False) for row, its in zip(rows, is_first, strict=True) if its is first]
