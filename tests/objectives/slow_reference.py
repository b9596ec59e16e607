"""Every loss a second time: loops over tokens, one formula of a paper after another, plain floats.

It shares no code with rlpost. `x` are the log-probabilities a loss is a function of; `frozen` are the
same numbers wherever a paper stops the gradient, so that derivatives in `x` see them as constants.
Tables are lists of rows; a row of `mask` says which of its tokens count, and no other token is read.

Derivatives are exact to rounding: a loss at x + ih has h times its slope as its imaginary part (Squire and
Trapp, 1998), since every function here is analytic between its kinks and comparisons look at real parts.
"""

from __future__ import annotations

import cmath
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Table = list[list[Any]]  # of floats; of complex numbers where a derivative is taken


@dataclass
class Batch:
    """Tables of one shape; `advantage` is one too, whether or not it differs within a row."""

    old: Table
    advantage: Table
    mask: list[list[bool]]
    sampler: Table
    ref: Table


@dataclass
class Choice:
    """What a loss is made of, as `policy_loss` is given it; coefficients are those of the variant."""

    variant: str
    aggregation: str
    coefficients: dict[str, float] = field(default_factory=dict)
    kl_estimator: str = "k3"
    kl_coef: float = 0.0
    sampler_kl_coef: float = 0.0
    sampler_correction: str = "none"
    sampler_ratio_low: float | None = None
    sampler_ratio_high: float | None = None
    off_policy_mask: float | None = None
    normaliser: float | None = None


def exp(value: Any) -> Any:
    return cmath.exp(value) if isinstance(value, complex) else math.exp(value)


def log(value: Any) -> Any:
    return cmath.log(value) if isinstance(value, complex) else math.log(value)


def lesser(a: Any, b: Any) -> Any:
    return a if a.real <= b.real else b


def greater(a: Any, b: Any) -> Any:
    return b if a.real <= b.real else a


def clip(value: Any, low: float, high: float) -> Any:
    return low if value.real < low else high if value.real > high else value


def trained(batch: Batch, row: int) -> list[int]:
    """Positions of a row that count."""
    return [t for t, counts in enumerate(batch.mask[row]) if counts]


def mean_log_ratio(x: Table, batch: Batch, row: int) -> float:
    tokens = trained(batch, row)
    return sum(x[row][t] - batch.old[row][t] for t in tokens) / len(tokens)


def variant_loss(choice: Choice, x: Table, frozen: Table, batch: Batch, row: int, t: int) -> float:
    """The variant's loss of one token."""
    c, a = choice.coefficients, batch.advantage[row][t]
    ratio = exp(x[row][t] - batch.old[row][t])
    if choice.variant == "reinforce":
        return -a * x[row][t]
    if choice.variant == "sapo":
        tau = c["tau_good"] if a > 0 else c["tau_bad"]
        return -a * 4 / tau / (1 + exp(-tau * (ratio - 1)))
    if choice.variant == "gmpo":
        logs = [clip(x[row][s] - batch.old[row][s], *gmpo_bounds(choice, batch, row, s)) for s in trained(batch, row)]
        return -a * exp(sum(logs) / len(logs))
    if choice.variant.startswith("dppo"):
        if any(moved_too_far(choice, frozen, batch, row, t)):
            return 0.0
        return -min(exp(frozen[row][t] - batch.old[row][t]), c["max_ratio"]) * a * x[row][t]
    low, high = 1 - c["clip_low"], 1 + c["clip_high"]
    if choice.variant == "cispo":
        constant = exp(frozen[row][t] - batch.old[row][t])
        return -clip(constant, low, high) * a * x[row][t]
    if choice.variant == "gspo":
        ratio = exp(mean_log_ratio(x, batch, row))
    if choice.variant == "gspo_token":
        ratio = exp(mean_log_ratio(frozen, batch, row)) * exp(x[row][t]) / exp(frozen[row][t])
    if choice.variant == "two_sided":
        return -lesser(lesser(ratio, c["max_ratio"]) * a, clip(ratio, low, high) * a)
    inner = lesser(ratio * a, clip(ratio, low, high) * a)
    if choice.variant == "dual_clip" and a < 0:
        return -greater(inner, c["max_ratio"] * a)
    return -inner


def gmpo_bounds(choice: Choice, batch: Batch, row: int, t: int) -> tuple[float, float]:
    """The bounds of a token's log ratio: of the two, the one that holds back the way its advantage pushes."""
    if batch.advantage[row][t] < 0:
        return -choice.coefficients["clip_low"], math.inf
    return -math.inf, choice.coefficients["clip_high"]


def moved_too_far(choice: Choice, frozen: Table, batch: Batch, row: int, t: int) -> tuple[bool, bool]:
    """Whether DPPO drops a token that has fallen, and one that has risen."""
    c, a = choice.coefficients, batch.advantage[row][t]
    p, q = exp(batch.old[row][t]), exp(frozen[row][t])
    if choice.variant == "dppo_tv":
        return a < 0 and p - q > c["max_fall"], a > 0 and q - p > c["max_rise"]
    far = p * log(p / q) + (1 - p) * log((1 - p) / (1 - q)) > c["max_kl"]
    return far and a < 0 and q < p, far and a > 0 and q > p


def off_policy(choice: Choice, frozen: Table, batch: Batch, row: int, t: int) -> bool:
    """Whether a bad completion has moved too far from µ."""
    most, tokens = choice.off_policy_mask, trained(batch, row)
    if most is None or batch.advantage[row][t] >= 0:
        return False
    return sum(batch.sampler[row][each] - frozen[row][each] for each in tokens) / len(tokens) > most


def kl_term(estimator: str, x: Any, frozen: float, other: float, old: float) -> Any:
    """An estimate of KL(π ‖ other) from one token."""
    if estimator == "k1":
        return x - other
    if estimator == "k2":
        return 0.5 * (x - other) ** 2
    if estimator == "k3":
        return exp(other - x) - (other - x) - 1
    if estimator == "k3_k2grad":  # at x = frozen this is k3, and moves with x as k2 does
        return exp(other - frozen) - (other - frozen) - 1 + 0.5 * (x - other) ** 2 - 0.5 * (frozen - other) ** 2
    if estimator == "k3_rho":
        return exp(x - old) * (exp(other - x) - (other - x) - 1)
    raise KeyError(estimator)


def sampler_weight(choice: Choice, batch: Batch, row: int, t: int) -> tuple[float, bool]:
    """w = π_old/µ of a token after the correction, and whether a bound changed it."""
    kind, _, level = choice.sampler_correction.partition("_")
    low, high = choice.sampler_ratio_low, choice.sampler_ratio_high
    if kind == "none":
        return 1.0, False
    assert low is not None
    assert high is not None
    if kind == "geo":
        mean = exp(
            sum(batch.old[row][s] - batch.sampler[row][s] for s in trained(batch, row)) / len(trained(batch, row))
        )
        own = exp(batch.old[row][t] - batch.sampler[row][t]) if choice.sampler_correction == "geo_mask_tis" else 1.0
        inside = low <= mean <= high
        return (min(own, 2.0) if inside else 0.0), not inside or own > 2.0
    tokens = trained(batch, row) if level == "sequence" else [t]
    weight = 1.0
    for s in tokens:
        weight *= exp(batch.old[row][s]) / exp(batch.sampler[row][s])
    if kind == "tis":
        return min(weight, high), weight > high
    inside = low <= weight <= high
    return (weight if inside else 0.0), not inside


def averaged(choice: Choice, batch: Batch, values: Table) -> float:
    """The values of the tokens that count as one number."""
    rows, length = len(batch.mask), len(batch.mask[0])
    total, count = 0.0, 0
    for row in range(rows):
        tokens = trained(batch, row)
        count += len(tokens)
        for t in tokens:
            total += values[row][t] / len(tokens) if choice.aggregation == "sequence_mean" else values[row][t]
    if choice.normaliser is not None:
        return total / choice.normaliser
    if choice.aggregation == "token_mean":
        return total / count if count else 0.0
    return total / rows if choice.aggregation == "sequence_mean" else total / (rows * length)


def loss(choice: Choice, x: Table, frozen: Table, batch: Batch) -> float:
    """The whole policy loss at `x`."""
    policy, to_ref, to_sampler = ([[0.0] * len(x[0]) for _ in x] for _ in range(3))
    for row in range(len(x)):
        for t in trained(batch, row):
            weight, _ = sampler_weight(choice, batch, row, t)
            if not off_policy(choice, frozen, batch, row, t):
                policy[row][t] = weight * variant_loss(choice, x, frozen, batch, row, t)
            here, old = (x[row][t], frozen[row][t]), batch.old[row][t]
            to_ref[row][t] = kl_term(choice.kl_estimator, *here, batch.ref[row][t], old)
            to_sampler[row][t] = kl_term(choice.kl_estimator, *here, batch.sampler[row][t], old)
    total = averaged(choice, batch, policy)
    if choice.kl_coef:
        total += choice.kl_coef * averaged(choice, batch, to_ref)
    if choice.sampler_kl_coef:
        total += choice.sampler_kl_coef * averaged(choice, batch, to_sampler)
    return total


def gradient(choice: Choice, x: Table, batch: Batch) -> Table:
    """∂loss/∂x; 0 where the mask is False."""
    return slopes(lambda moved: loss(choice, moved, x, batch), x, batch)


def slopes(value: Callable[[Table], Any], x: Table, batch: Batch) -> Table:
    """The derivatives of `value` at `x`; 0 where the mask is False."""
    found = [[0.0] * len(x[0]) for _ in x]
    step = 1e-30
    for row in range(len(x)):
        for t in trained(batch, row):
            moved = [list(r) for r in x]
            moved[row][t] = complex(x[row][t], step)
            found[row][t] = value(moved).imag / step
    return found


def metrics(choice: Choice, x: Table, batch: Batch) -> dict[str, float]:
    """Means over the tokens that count."""
    c = choice.coefficients
    low, high = 1 - c.get("clip_low", 1e9), 1 + c.get("clip_high", 1e9)  # no bound: reinforce
    ceiling = c.get("max_ratio", 1e9)
    sums: dict[str, float] = defaultdict(float)
    count, squares = 0, 0.0
    of_sampler: list[float] = []  # pi_old / mu
    for row in range(len(x)):
        for t in trained(batch, row):
            count += 1
            own, a = exp(x[row][t] - batch.old[row][t]), batch.advantage[row][t]
            used = exp(mean_log_ratio(x, batch, row)) if choice.variant.startswith("gspo") else own
            if choice.variant == "gmpo":
                low, high = exp(-c["clip_low"]), exp(c["clip_high"])
            if choice.variant.startswith("dppo"):
                fell, rose = moved_too_far(choice, x, batch, row, t)
            elif choice.variant == "cispo":
                fell, rose = a != 0 and used < low, a != 0 and used > high
            else:
                fell, rose = a < 0 and used < low, (a > 0 and used > high) or (a < 0 and used > ceiling)
            sums["clip_fraction_low"] += fell or off_policy(choice, x, batch, row, t)
            sums["clip_fraction_high"] += rose
            sums["ratio_mean"] += own
            squares += own * own
            sums["kl_to_old"] += batch.old[row][t] - x[row][t]
            here, old = (x[row][t], x[row][t]), batch.old[row][t]
            sums["kl_to_ref"] += kl_term(choice.kl_estimator, *here, batch.ref[row][t], old)
            sums["kl_to_sampler"] += kl_term(choice.kl_estimator, *here, batch.sampler[row][t], old)
            sums["sampler_gap"] += abs(batch.old[row][t] - batch.sampler[row][t])
            of_sampler.append(exp(batch.old[row][t] - batch.sampler[row][t]))
            weight, cut = sampler_weight(choice, batch, row, t)
            sums["sampler_weight_mean"] += weight
            sums["sampler_cut_fraction"] += cut
    means = {name: total / count for name, total in sums.items()}
    means["ess"] = sums["ratio_mean"] ** 2 / (count * squares)
    means["sampler_ess"] = sum(of_sampler) ** 2 / (count * sum(w * w for w in of_sampler))
    means["clip_fraction"] = means["clip_fraction_low"] + means["clip_fraction_high"]
    return means


def minor_sft_loss(x: Table, batch: Batch, beta: float, by_length: bool, choice: Choice) -> float:
    """−log σ(β(s − s_ref)) of each row, averaged as `choice` says."""
    values = [[0.0] * len(x[0]) for _ in x]
    for row in range(len(x)):
        tokens = trained(batch, row)
        difference = sum(x[row][t] - batch.ref[row][t] for t in tokens)
        if by_length and tokens:
            difference /= len(tokens)
        for t in tokens:
            values[row][t] = -log(1 / (1 + exp(-beta * difference)))
    return averaged(choice, batch, values)
