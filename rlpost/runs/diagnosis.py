"""Problems of a run that its own metrics show: each symptom has its steps, its evidence and one thing to do.

The rules compare the last steps of a run with its first; all of them are applied after each step. They are set so that
a run which learns, however noisily, has no symptom.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Any, NamedTuple

from rlpost.errors import DataError
from rlpost.record import ACCURACY, LOSS, TRAINED_LOSSES, has_evaluation, number
from rlpost.text import counted

FIRST, LAST = 3, 5  # how many of the first steps are compared with how many of the last
AT_LEAST = 8  # steps before a rule is applied
FEW = 10  # held-out prompts or rows; a figure of fewer says little of others
STANDSTILL = ("dead reward", "no spread", "truncation")  # symptoms that are reasons for having learned nothing
Row = Mapping[str, Any]  # of metrics.jsonl


@dataclass(frozen=True)
class Symptom:
    """One thing that is wrong: its name, the steps that show it, the evidence in words, and what to do."""

    name: str
    steps: tuple[int, int]
    evidence: str
    fix: str

    def line(self) -> str:
        """The symptom on one line, for a person."""
        return f"{self.name} (steps {self.steps[0]}-{self.steps[1]}): {self.evidence}; {self.fix}"


class Findings(NamedTuple):
    """The symptoms of a run, each at the step it first showed."""

    symptoms: list[Symptom]
    steps: int  # how many were trained
    unread: str  # why the completions could not be read; empty if they were


def symptoms_of(
    rows: Sequence[Row], sampled: Sequence[int], completions_of: Callable[[int], Sequence[Row]]
) -> Findings:
    """Find the symptoms in a run's figures, and in the completions of the last of its steps that are `sampled`."""
    few = few_held_out(rows)
    found = {few.name: few} if few else {}
    diagnosis, unread = Diagnosis(), ""
    for row in rows:
        for symptom in diagnosis.after(row):
            found.setdefault(symptom.name, symptom)
    for step in sampled[-1:]:
        try:
            completions = completions_of(step)
        except DataError as error:
            unread = str(error)
            break
        texts = repeated_text(
            step, [row["completion"] for row in completions], [str(row["prompt"]) for row in completions]
        )
        if texts is not None:
            found.setdefault(texts.name, texts)
    return Findings(list(found.values()), sum(row["step"] > 0 for row in rows), unread)


def repeated_text(step: int, texts: Sequence[str], prompts: Sequence[str]) -> Symptom | None:
    """Completions that repeat themselves, or one completion for most prompts of a step."""
    long = [text for text in texts if len(text) >= 200]
    looping = [text for text in long if len(zlib.compress(text.encode(errors="replace"))) < 0.12 * len(text.encode())]
    if len(looping) > 0.5 * len(texts):
        evidence = f"{len(looping)} of {len(texts)} completions repeat themselves, as {_short(looping[0])}"
        return Symptom("repeated text", (step, step), evidence, "lower optim.lr, or go on from an earlier checkpoint")
    common = Counter(texts).most_common(1)
    if not common or len(set(prompts)) < 4:
        return None
    text, count = common[0]
    if text.strip() and count > 0.9 * len(texts) and len(texts) >= 16:
        evidence = f"{count} of {len(texts)} completions to {len(set(prompts))} prompts are {_short(text)}"
        return Symptom("repeated text", (step, step), evidence, "lower optim.lr, or raise sampling.temperature")
    return None


def few_held_out(rows: Sequence[Row]) -> Symptom | None:
    """The figures of the evaluations rest on a handful of prompts or rows; a training says so when it begins."""
    evaluated = [row for row in rows if has_evaluation(row)]
    found = [(count, unit) for unit in ("prompt", "row") for count in _known(evaluated[-1:], f"eval/{unit}s")]
    if not found or found[0][0] >= FEW:
        return None
    count, unit = int(found[0][0]), found[0][1]
    evidence = f"before and after are measured on {counted(count, f'held-out {unit}')}, which say little of others"
    steps = (evaluated[0]["step"], evaluated[-1]["step"])
    fix = "hold out more with eval.limit, env.held_out or env.test_path"
    return Symptom(f"few held-out {unit}s", steps, evidence, fix)


class Diagnosis:
    """The steps of a run so far, its evaluations, the one before training included, and the symptoms that they show."""

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self.rows: list[Row] = []
        self.evaluations: list[Row] = []
        self._first: dict[str, list[float]] = {}  # of each name the first FIRST values
        for row in rows:
            self._add(row)

    def after(self, row: Row) -> list[Symptom]:
        """The symptoms after one more row, in the order of `RULES`."""
        self._add(row)
        found = [rule(self) for rule in RULES] if len(self.rows) >= AT_LEAST else []
        return [symptom for symptom in found if symptom is not None]

    def _add(self, row: Row) -> None:
        """Append one row of metrics.jsonl."""
        if row["step"] > 0:
            self.rows.append(row)
            for name in row:
                if len(first := self._first.setdefault(name, [])) < FIRST:
                    first += _known([row], name)
        if has_evaluation(row):
            self.evaluations.append(row)

    def last(self, name: str, count: int = LAST) -> list[float]:
        """The values of the last `count` steps; fewer if some step has none."""
        return _known(self.rows[-count:], name)

    def first(self, name: str) -> list[float]:
        """The values of the first steps that have one."""
        return self._first.get(name, [])

    def both(self, name: str) -> tuple[float, float] | None:
        """(mean of the first steps, mean of the last); None while either is unknown."""
        first, last = self.first(name), self.last(name)
        return (fmean(first), fmean(last)) if len(first) == FIRST and len(last) == LAST else None

    def steps(self, count: int = LAST) -> tuple[int, int]:
        """Numbers of the last `count` steps."""
        return self.rows[-count:][0]["step"], self.rows[-1]["step"]

    def rises(self, name: str, by: float) -> bool:
        """Whether the mean of the last steps is at least `by` above that of the first."""
        pair = self.both(name)
        return pair is not None and pair[1] >= pair[0] + by


# The rules


def dead_reward(run: Diagnosis) -> Symptom | None:
    """Every completion of the last steps earned the same."""
    means, spreads = run.last("reward/mean", AT_LEAST), run.last("reward/std", AT_LEAST)
    if len(means) < AT_LEAST or any(spreads) or len(set(means)) > 1 or _solved(run) or _taught(run):
        return None
    fix = "rlpost reward test and rlpost doctor show whether the reward finds answers; else an easier task"
    return Symptom("dead reward", run.steps(AT_LEAST), f"every completion earned {means[0]:g}", fix)


def no_spread(run: Diagnosis) -> Symptom | None:
    """The completions of a prompt all earn the same, so that nothing is learned from them."""
    shares = run.last("groups/zero_std", AT_LEAST)
    if len(shares) < AT_LEAST or fmean(shares) < 0.95 or _solved(run) or dead_reward(run):
        return None
    evidence = f"in {fmean(shares):.0%} of the groups all completions earned the same"
    return Symptom("no spread", run.steps(AT_LEAST), evidence, "raise group_size or sampling.temperature")


def strict_falls(run: Diagnosis) -> Symptom | None:
    """More answers are right, but fewer have the required form."""
    strict, lenient = run.both("accuracy/strict"), run.both("accuracy/lenient")
    if strict is None or lenient is None or strict[1] > strict[0] - 0.1 or lenient[1] < lenient[0] + 0.05:
        return None
    evidence = f"strict accuracy {_change(strict)}, lenient {_change(lenient)}"
    return Symptom("form lost", run.steps(), evidence, "let the reward pay for the form too, or score strictly")


def length_hacking(run: Diagnosis) -> Symptom | None:
    """Completions grow and earn more, and are not more often right."""
    length = run.both("completion/tokens_mean")
    if length is None or length[1] < 1.8 * length[0] or not run.rises("reward/mean", 0.02):
        return None
    accuracy = run.both("accuracy/lenient")
    if accuracy is not None and accuracy[1] > accuracy[0] + 0.02:
        return None
    if accuracy is None and length[1] < 2.5 * length[0]:
        return None
    evidence = f"tokens a completion {_change(length)}, reward {_change(run.both('reward/mean'))}"
    evidence += f", accuracy {_change(accuracy)}" if accuracy else ""
    return Symptom(
        "length hacking", run.steps(), evidence, "let the reward not grow with length; overlong.penalty_tokens"
    )


def entropy_collapse(run: Diagnosis) -> Symptom | None:
    """The model gives one answer again and again, and it is not right."""
    entropy, alike = run.both("entropy"), run.last("groups/zero_std")
    if entropy is None or len(alike) < LAST or _solved(run):
        return None
    if entropy[1] > 0.03 or entropy[1] > 0.1 * entropy[0] or fmean(alike) < 0.9:
        return None
    evidence = f"entropy {_change(entropy)} nats, and {fmean(alike):.0%} of the groups are without a spread"
    return Symptom("entropy collapse", run.steps(), evidence, "lower optim.lr, or raise loss.clip_high (DAPO: 0.28)")


def entropy_rises(run: Diagnosis) -> Symptom | None:
    """The model becomes less sure, and earns no more."""
    entropy, reward = run.both("entropy"), run.both("reward/mean")
    if entropy is None or reward is None or _solved(run) or _taught(run) or rate_too_high(run):
        return None
    if entropy[1] < 1.3 * entropy[0] + 0.1 or reward[1] >= reward[0] + 0.02:
        return None
    evidence = f"entropy {_change(entropy)} nats, reward {_change(reward)}"
    return Symptom("entropy rises", run.steps(), evidence, "lower optim.lr, and loss.entropy_coef where it is set")


def clip_saturation(run: Diagnosis) -> Symptom | None:
    """Most of the gradient is cut off by the clip."""
    clipped = run.last("ratio/clip_fraction")
    if len(clipped) < LAST or fmean(clipped) < 0.3:
        return None
    evidence = f"the ratio of {fmean(clipped):.0%} of the tokens is beyond the clip"
    return Symptom("clip saturation", run.steps(), evidence, "lower optim.lr, passes or the updates of a step")


def rate_zero(run: Diagnosis) -> Symptom | None:
    """The learning rate changes nothing."""
    rates = run.last("lr", AT_LEAST)
    norms = run.last("grad_norm", AT_LEAST)
    if len(rates) < AT_LEAST or any(rates) or not any(norms):
        return None
    return Symptom("rate zero", run.steps(AT_LEAST), "the learning rate was 0", "see optim.lr, warmup_steps, schedule")


def rate_too_high(run: Diagnosis) -> Symptom | None:
    """Rewards fall again, or the model gives one answer after a few steps: the distribution has changed too far."""
    return _fell_at_once(run) or _lost_again(run)


def reward_up_accuracy_down(run: Diagnosis) -> Symptom | None:
    """The reward rises and the accuracy falls."""
    reward, accuracy = run.both("reward/mean"), run.both("accuracy/lenient")
    if reward is None or accuracy is None or reward[1] < reward[0] + 0.05 or accuracy[1] > accuracy[0] - 0.05:
        return None
    evidence = f"reward {_change(reward)}, accuracy {_change(accuracy)}"
    fix = "rlpost runs rollouts RUN shows the best completions; correct the reward"
    return Symptom("reward hacking", run.steps(), evidence, fix)


def reward_without_accuracy(run: Diagnosis) -> Symptom | None:
    """The reward rises, and no completion of the run is right."""
    reward, accuracy = run.both("reward/mean"), _known(run.rows, "accuracy/lenient")
    if reward is None or reward[1] < reward[0] + 0.05 or not accuracy or any(accuracy):
        return None
    evidence = f"reward {_change(reward)}, and no completion was right in {len(accuracy)} steps"
    fix = "rlpost runs rollouts RUN shows the completions that earn it; let a right answer earn more"
    return Symptom("reward without accuracy", run.steps(), evidence, fix)


def drift(run: Diagnosis) -> Symptom | None:
    """Sampler and trainer, or the model and its start, drift apart."""
    gap = run.both("sampler/logprob_gap")
    if gap is not None and gap[1] > 0.3 and gap[1] > 5 * gap[0]:
        evidence = f"sampler and trainer are {_change(gap)} nats a token apart"
        return Symptom(
            "sampler drift", run.steps(), evidence, "loss.sampler_correction=tis_token, or policy.dtype=float32"
        )
    kl = run.both("kl/ref")
    if kl is not None and kl[1] > 2.0 and kl[1] > 5 * kl[0]:
        evidence = f"the KL to the starting model is {_change(kl)} nats a token"
        return Symptom("drift", run.steps(), evidence, "raise loss.kl_coef, or lower optim.lr")
    return None


def truncation(run: Diagnosis) -> Symptom | None:
    """Nearly all completions are truncated, and nothing gets better; evaluations show it first."""
    return _truncated_held_out(run) or _truncated_in_training(run)


def memorised(run: Diagnosis) -> Symptom | None:
    """The loss of demonstrations, seen several times, is near 0, and that of held-out ones is not."""
    loss, passes, held_out = run.both("loss/sft"), run.last("epoch", 1), _known(run.evaluations, LOSS)
    if loss is None or not passes or loss[1] > 0.05 or passes[0] < 3 or (held_out and held_out[-1] < 0.1 + 5 * loss[1]):
        return None
    evidence = f"loss {_change(loss)} after {passes[0]:.0f} passes over the rows"
    evidence += f", and {held_out[-1]:.3g} on held-out ones" if held_out else ""
    return Symptom("memorised", run.steps(), evidence, "give fewer epochs, or more rows")


def overfitting(run: Diagnosis) -> Symptom | None:
    """The loss of the training rows falls, and that of the held-out ones has begun to rise."""
    known = [row for row in run.evaluations if number(row, LOSS) is not None]
    loss = next((pair for key in TRAINED_LOSSES if (pair := run.both(key)) is not None), None)
    if len(known) < 2 or loss is None or loss[1] >= loss[0]:
        return None
    best, last = min(known[:-1], key=lambda row: row[LOSS]), known[-1]
    if last[LOSS] < 1.05 * best[LOSS]:
        return None
    evidence = f"held-out loss {_change((best[LOSS], last[LOSS]))} since step {best['step']}, training {_change(loss)}"
    fix = "give fewer epochs or a lower optim.lr; with eval.every, checkpoints/best is the step with the least loss"
    return Symptom("overfitting", (max(1, best["step"]), last["step"]), evidence, fix)


def nothing_left(run: Diagnosis) -> Symptom | None:
    """The chosen reply of every pair has been preferred for most of the training; only the margin grows."""
    right, margin = _known(run.rows, "pair_accuracy"), run.last("reward_margin")
    since = next((place for place in range(len(right), 0, -1) if right[place - 1] < 1), 0)
    if len(right) < AT_LEAST or since > len(right) / 2 or len(margin) < LAST or fmean(margin) < 3:
        return None
    first = run.rows[since]["step"]
    evidence = f"every chosen reply is preferred since step {first}, and the reward margin is {fmean(margin):.3g}"
    fix = "give fewer epochs or a lower optim.lr, or rows whose replies differ less"
    return Symptom("nothing left in the pairs", (first, run.rows[-1]["step"]), evidence, fix)


def chosen_falls(run: Diagnosis) -> Symptom | None:
    """Chosen replies become less likely too; only their distance to the rejected ones grows."""
    chosen = run.last("rewards/chosen")
    if len(chosen) < LAST or fmean(chosen) > -1:
        return None
    evidence = f"the implicit reward of chosen replies is {fmean(chosen):.3g}: they are less likely than at the start"
    return Symptom("chosen replies fall", run.steps(), evidence, "loss.sft_coef=0.1 keeps them likely; lower optim.lr")


RULES: tuple[Callable[[Diagnosis], Symptom | None], ...] = (
    dead_reward,
    no_spread,
    strict_falls,
    length_hacking,
    entropy_collapse,
    entropy_rises,
    clip_saturation,
    rate_zero,
    rate_too_high,
    reward_up_accuracy_down,
    reward_without_accuracy,
    drift,
    truncation,
    memorised,
    overfitting,
    nothing_left,
    chosen_falls,
)


def _fell_at_once(run: Diagnosis) -> Symptom | None:
    """Tokens became certain within three steps, and the groups have had no spread since."""
    entropy, alike = _known(run.rows[:20], "entropy"), run.last("groups/zero_std")
    falls = [(a, b) for a, b in zip(entropy, entropy[2:], strict=False) if a > 1.0 and b < 0.2 * a]
    if not falls or len(alike) < LAST or fmean(alike) < 0.9:
        return None
    evidence = f"entropy {_change(falls[0])} nats within three steps, and no spread since"
    return Symptom("rate too high", run.steps(), evidence, "begin again with optim.lr ten times lower")


def _lost_again(run: Diagnosis) -> Symptom | None:
    rewards = _known(run.rows, "reward/mean")
    entropy = _known(run.rows, "entropy")
    if len(rewards) < AT_LEAST or len(entropy) < LAST + FIRST:
        return None
    best = max(fmean(rewards[i : i + FIRST]) for i in range(len(rewards) - LAST))
    now, low = fmean(rewards[-LAST:]), min(rewards)
    before, after = fmean(entropy[:FIRST]), fmean(entropy[-LAST:])
    has_moved = after > 1.5 * before + 0.2 or after < 0.02 * before
    if not has_moved or best <= low or now - low > 0.35 * (best - low) or best - now < 0.04:
        return None
    evidence = f"rewards fell from {best:.3g} to {now:.3g}, entropy {before:.3g} -> {after:.3g}"
    return Symptom(
        "rate too high", run.steps(), evidence, "go on from an earlier checkpoint with optim.lr ten times lower"
    )


def _truncated_held_out(run: Diagnosis) -> Symptom | None:
    """In the latest evaluation more completions are truncated than in the first, or as many and no more are right."""
    cut, right = _known(run.evaluations, "eval/truncated"), _known(run.evaluations, ACCURACY)
    if not cut or cut[-1] < 0.95 or not (cut[-1] >= cut[0] + 0.1 or (right and right[-1] <= right[0])):
        return None
    change = f"{cut[0]:.0%} -> {cut[-1]:.0%}" if len(cut) > 1 else f"{cut[-1]:.0%}"
    evidence = f"{change} of the held-out completions were truncated"
    return Symptom("truncation", run.steps(), evidence, "raise env.max_completion_tokens")


def _truncated_in_training(run: Diagnosis) -> Symptom | None:
    cut, goal = run.last("completion/truncated", AT_LEAST), ("reward/mean", 0.02)
    if len(cut) < AT_LEAST or fmean(cut) < 0.95 or min(cut) < 0.9 or _varied(run):
        return None
    if run.both("accuracy/lenient") is not None:  # where it is measured, a reward that rises alone is not progress
        goal = ("accuracy/lenient", 0.01)
    if run.rises(*goal):
        return None
    evidence = f"{fmean(cut):.0%} of the completions were truncated"
    return Symptom("truncation", run.steps(AT_LEAST), evidence, "raise env.max_completion_tokens")


def _solved(run: Diagnosis) -> bool:
    """Whether nearly every answer is right; without an accuracy, whether rewards have risen to their best and stay."""
    accuracy, reward = run.last("accuracy/lenient"), run.both("reward/mean")
    if accuracy or reward is None:
        return len(accuracy) == LAST and fmean(accuracy) >= 0.9
    highest = max(_known(run.rows, "reward/mean"))
    return reward[1] > reward[0] and reward[1] >= highest - 0.05 * abs(highest)


def _taught(run: Diagnosis) -> bool:
    """Whether a teacher says what is learned: rewards may stay equal, and the entropy becomes the teacher's."""
    return bool(run.last("kl/teacher"))


def _varied(run: Diagnosis) -> bool:
    """Whether rewards differ although nearly all completions are truncated: the rewarded part may come early."""
    spreads, lengths = run.last("groups/zero_std"), run.last("completion/tokens_mean")
    return bool(spreads) and fmean(spreads) < 0.1 and bool(lengths) and fmean(lengths) < 16


def _known(rows: Iterable[Row], name: str) -> list[float]:
    """The finite values of the rows that have one: a training has NaN for what metrics.jsonl has as null."""
    figures = [number(row, name) for row in rows]
    return [figure for figure in figures if figure is not None and isfinite(figure)]


def _change(pair: tuple[float, float] | None) -> str:
    return "unknown" if pair is None else f"{pair[0]:.3g} -> {pair[1]:.3g}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}")
