"""The curves of a report: their names in words, the ones left out because they say nothing, and where the time went."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rlpost.record import (
    ACCURACY,
    BEGAN,
    FAILED,
    FINISHED,
    LOSS,
    MARGIN,
    PAIR_ACCURACY,
    REWARD,
    STOPPED,
    STRICT,
    number,
)
from rlpost.runs.reader import RunRecord, RunState

Row = Mapping[str, Any]
Points = list[list[float]]  # [step, value], or [step, value, low, high] with the ends of a 95% interval
NOISE = 1e-9  # share of a curve's largest value below which a value is rounding noise
ZERO = 1e-12  # below it a whole curve is
LEAST_SECONDS = 1e-3  # of a phase that is listed
SHARE = "%"
WORDS = {  # key of metrics.jsonl -> its name and unit, in the order of the page
    "reward/mean": ("reward of the step's completions", ""),
    "accuracy/lenient": ("accuracy of the step's completions", SHARE),
    "accuracy/strict": ("strict accuracy of the step's completions", SHARE),
    "loss/sft": ("training loss per token", ""),
    "loss/dpo": ("training loss per pair", ""),
    "loss/distill": ("distillation loss per token", ""),
    ACCURACY: ("held-out accuracy", SHARE),
    STRICT: ("held-out strict accuracy", SHARE),
    REWARD: ("held-out reward", ""),
    LOSS: ("held-out loss", ""),
    PAIR_ACCURACY: ("held-out pairs whose chosen reply is preferred", SHARE),
    MARGIN: ("held-out reward margin", ""),
    "pair_accuracy": ("pairs whose chosen reply is preferred", SHARE),
    "reward_margin": ("reward margin, chosen minus rejected", ""),
    "rewards/chosen": ("implicit reward of chosen replies", ""),
    "rewards/rejected": ("implicit reward of rejected replies", ""),
    "reward/std": ("standard deviation of the rewards", ""),
    "reward/failed": ("completions whose reward failed", ""),
    "reward/mean_drawn": ("reward of all completions drawn", ""),
    "reward/kl_penalty": ("KL penalty in the reward", ""),
    "groups/zero_std": ("groups with equal rewards, which teach nothing", SHARE),
    "selected/share": ("completions good enough to train on", SHARE),
    "selected/reward_mean": ("reward of the selected completions", ""),
    "completion/tokens_mean": ("tokens of a completion", ""),
    "completion/truncated": ("completions truncated at the limit", SHARE),
    "eval/tokens_mean": ("tokens of a held-out completion", ""),
    "eval/truncated": ("held-out completions truncated at the limit", SHARE),
    "eval/failed": ("held-out completions whose reward failed", ""),
    "turns/mean": ("turns of a conversation", ""),
    "turns/ran_out": ("conversations that ran out of turns", SHARE),
    "tools/calls_mean": ("tool calls of a completion", ""),
    "tools/errors_mean": ("failed tool calls of a completion", ""),
    "loss/policy": ("policy loss", ""),
    "loss/kl": ("KL term of the loss", ""),
    "loss/entropy": ("entropy term of the loss", ""),
    "entropy": ("entropy of the policy, nats a token", ""),
    "kl/ref": ("distance from the reference model, nats a token", ""),
    "kl/teacher": ("distance from the teacher, nats a token", ""),
    "kl/sampler": ("distance of sampler and trainer (KL), nats a token", ""),
    "sampler/logprob_gap": ("difference of sampler and trainer in log-prob, nats a token", ""),
    "sampler/ess": ("effective sample against the sampler", SHARE),
    "sampler/cut": ("tokens whose sampler weight is bounded", SHARE),
    "ess": ("effective sample of the update", SHARE),
    "ratio/clip_fraction": ("tokens whose policy ratio the loss clips", SHARE),
    "ratio/clip_low": ("tokens clipped at the lower bound", SHARE),
    "ratio/clip_high": ("tokens clipped at the upper bound", SHARE),
    "grad_norm": ("norm of the gradient, before clipping", ""),
    "lr": ("learning rate", ""),
    "epoch": ("passes over the rows", ""),
    "policy/version": ("weight updates when the completions were sampled", ""),
    "policy/lag_mean": ("weight updates between sampling and training", ""),
    "policy/lag_max": ("most weight updates between sampling and training", ""),
    "groups/drawn": ("groups sampled", ""),
    "groups/dropped": ("groups left out", ""),
    "groups/evicted": ("groups evicted, since the run began", ""),
    "buffer/dropped_by_age": ("groups dropped by age, since the run began", ""),
    "tokens/generated": ("tokens generated", ""),
    "tokens/read": ("tokens read", ""),
    "tokens/trained": ("tokens trained on", ""),
    "memory/peak_gb": ("peak memory", "GB"),
    "memory/host_gb": ("peak memory of the machine", "GB"),
    "time/step": ("time of a step", "s"),
    "time/rollout": ("sampling completions", "s"),
    "time/reward": ("rewards", "s"),
    "time/wait": ("waiting for completions", "s"),
    "time/train": ("training", "s"),
    "time/sync": ("weights to the sampler", "s"),
    "time/idle": ("samplers waiting for training", "s"),
}
ONCE = ("time/load", "time/eval")  # not of every step: the table of the time has them
NOT_DRAWN = ("step", "eval/prompts", "eval/rows", "eval/tokens", *ONCE)
OF_FIGURE = ("_low", "_high", "_prompts")  # ends of the keys that belong to a figure of an evaluation
_STAMP = re.compile(
    rf"^(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d+) [A-Z]+ ({BEGAN}|{FINISHED}|{STOPPED}|{FAILED})?", re.MULTILINE
)


def curves_of(runs: Sequence[RunRecord], story: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    """Each curve with the points of every run, those of `story` first; and which were left out, in words.

    Left out are lines that are flat in all runs, and lines that repeat an earlier one.
    """
    points = [points_of(run.metrics) for run in runs]
    known = list(dict.fromkeys(key for each in points for key in each))
    order = [*story, *WORDS, *sorted(key for key in known if key not in WORDS)]
    shown: list[dict[str, Any]] = []
    left_out: list[str] = []
    for key in dict.fromkeys(key for key in order if key in known):
        title, unit = words_of_metric(key)
        lines = [each.get(key, []) for each in points]
        is_flat = len({point[1] for line in lines for point in line}) < 2
        if key not in story and (is_flat or any(curve["lines"] == lines for curve in shown)):
            left_out.append(title)
        else:
            shown.append({"key": key, "title": title, "unit": unit, "story": key in story, "lines": lines})
    return shown, f"Left out, flat or equal to another: {', '.join(left_out)}." if left_out else ""


def points_of(metrics: Sequence[Row]) -> dict[str, Points]:
    """The points of every metric; an evaluation's also have the ends of its interval."""
    curves: dict[str, Points] = {}
    for row in metrics:
        for key in row:
            value = number(row, key)
            if key in NOT_DRAWN or value is None or (key.startswith("eval/") and key.endswith(OF_FIGURE)):
                continue
            low, high = number(row, f"{key}_low"), number(row, f"{key}_high")
            ends = [] if low is None or high is None else [low, high]
            curves.setdefault(key, []).append([row["step"], *map(short, [value, *ends])])
    return {key: _without_noise(points) for key, points in curves.items()}


def words_of_metric(key: str) -> tuple[str, str]:
    """The title of a metric and its unit; a reward part has its own name, and any other key stands for itself."""
    if key in WORDS:
        return WORDS[key]
    if key.startswith(("reward/", "eval/reward/")):
        held_out = "held-out " if key.startswith("eval/") else ""
        return f"{held_out}reward part {key.rpartition('/')[2]}", ""
    return key, "s" if key.startswith("time/") else ""


def story_keys(runs: Sequence[RunRecord], held_out: Iterable[str]) -> list[str]:
    """The curve of the training steps and that of the main held-out figure, for each kind of run."""
    learned = ("loss/distill", "reward/mean", "loss/dpo", "loss/sft")
    keys = [next((key for key in learned if run.series(key)), "") for run in runs]
    return [key for key in dict.fromkeys([*keys, *held_out]) if key]


def short(value: float) -> float:
    """Six digits of a number: more cannot be seen."""
    return float(f"{value:.6g}")


def _without_noise(points: Points) -> Points:
    """The points, with 0 for a value that is rounding noise beside the others."""
    least = max(NOISE * max(abs(point[1]) for point in points), ZERO)
    return [[step, *(0.0 if abs(value) < least else value for value in values)] for step, *values in points]


# Time


def time_of(run: RunRecord, log: str) -> list[tuple[str, float]]:
    """(phase, seconds) of the whole run, from its beginning to its end in `log`, the text of log.txt.

    While sampling goes on beside the training, the phases of the steps are the training's own.
    """
    parts = [(WORDS[f"time/{name}"][0], seconds) for name, seconds in run.phases().items()]
    of_steps = run.seconds - sum(seconds for _, seconds in parts)
    parts.append(("the rest of the steps" if run.series("time/train") else "training", of_steps))
    loading, evaluating = (sum(run.series(key)) for key in ONCE)
    parts = [("loading", loading), ("evaluating", evaluating), *parts]
    if whole := wall_clock(log, now=datetime.now() if run.state is RunState.running else None):
        whole += sum(run.series("time/load")[1:])  # a resumed run is loaded before its log says that it began
        rest = "saving and all else" if loading else "loading, evaluating, saving and all else"
        parts.append((rest, whole - sum(seconds for _, seconds in parts)))
    return [(name, seconds) for name, seconds in parts if seconds >= LEAST_SECONDS]


def wall_clock(log: str, now: datetime | None = None) -> float:
    """Seconds between the beginning and the end of each attempt, all together; an attempt that runs ends `now`.

    One that was killed ends with its last dated line. 0 without a dated line.
    """
    attempts: list[list[datetime]] = []  # first and last dated line of each
    runs = False
    for stamp, verdict in _STAMP.findall(log):
        at = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f")
        if verdict == BEGAN:
            attempts.append([at, at])
            runs = True
        elif runs:
            attempts[-1][1] = at
            runs = not verdict
    if runs and now is not None:
        attempts[-1][1] = now
    return sum((last - first).total_seconds() for first, last in attempts)
