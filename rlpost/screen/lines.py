"""Plain lines: what a pipe, a dumb terminal and the log get, and what stays after the live picture."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlpost.folding import fold
from rlpost.record import ACCURACY, DECIDING, LOSS, REWARD, interval
from rlpost.screen.shown import Shown
from rlpost.text import counted

WIDTH = 100  # columns of a plain line
SAMPLE_LINES = 8
AGAIN = "Ctrl-C again leaves at once"
STOPPING = f"stopping: this step is finished and saved first; {AGAIN}"


def step_line(step: int, total: int, metrics: Mapping[str, float], left: str, *, width: int | None = None) -> str:
    """A step's figures on one line; where `width` columns do not hold them all, those that say most."""
    beside = "time/wait" in metrics  # collector=async: sampling goes on while the model is trained
    names = ("wait", "train", "idle") if beside else ("rollout", "train")
    seconds = [_figure(name + " {:.1f}s", metrics.get(f"time/{name}")) for name in names]
    if "time/rollout" not in metrics:  # nothing was sampled: the step is all training
        seconds = [_figure("{:.1f}s", metrics.get("time/step"))]
    parts = {
        "step": f"step {step:>{len(str(total))}}/{total}",
        "reward": _figure("reward {:.2f}", metrics.get("reward/mean")),
        "loss": _figure("loss {:.3f}", metrics.get("loss/sft")),
        "accuracy": _figure("accuracy {:4.0%}", metrics.get("accuracy/lenient")),
        "selected": _figure("selected {:.0%}", metrics.get("selected/share")),
        "tokens": _figure("tokens {:.0f}", metrics.get("completion/tokens_mean")),
        "epoch": _figure("epoch {:.2f}", metrics.get("epoch")),
        "lag": _figure("lag {:.1f}", metrics.get("policy/lag_mean")) if beside else "",
        "ess": _figure("ess {:.2f}", metrics.get("sampler/ess")) if beside else "",
        "gap": _figure("gap {:.3f}", metrics.get("sampler/logprob_gap")),
        "grad": _figure("grad {:.2f}", metrics.get("grad_norm")),
        "speed": _figure("{:.0f} tok/s", tokens_per_second(metrics)),
        "seconds": " ".join(filter(None, seconds)),
        "left": f"left {left}",
    }
    dispensable = ["seconds", "grad", "speed", "gap", "ess", "epoch", "tokens", "lag", "left", "selected"]
    while width is not None and len(_joined(parts)) > width and dispensable:
        del parts[dispensable.pop(0)]
    return _joined(parts)


def evaluation_line(metrics: Mapping[str, float | None], when: str) -> str:
    """An evaluation on one line, with 95% intervals and the number of prompts; what it lacks is left out."""
    prompts, failed, truncated = (metrics.get(f"eval/{name}") for name in ("prompts", "failed", "truncated"))
    count = None if prompts is None else round(prompts)
    measured = {"loss": LOSS, "accuracy": ACCURACY, "reward": REWARD, "deciding": f"{DECIDING}accuracy_lenient"}
    if measured["deciding"] not in metrics:
        measured["deciding"] = f"{DECIDING}reward"
    found = {name: interval(metrics, key) for name, key in measured.items()}
    told = {
        name: f"{name} {each.told('row' if name == 'loss' else 'prompt', said=count)}"
        for name, each in found.items()
        if each is not None
    }
    figures = [
        *told.values(),
        _figure("tokens {:.0f}", metrics.get("eval/tokens_mean")),
        _figure("truncated {:.0%}", truncated) if truncated else "",
        f"{counted(round(failed), 'reward')} failed" if failed else "",
    ]
    on = "" if count is None else f", {counted(count, 'prompt')}"
    return f"held-out {when}{on}:  " + "  ".join(figure for figure in figures if figure)


def _joined(parts: Mapping[str, str]) -> str:
    return "  ".join(filter(None, parts.values()))


def _figure(form: str, value: float | None) -> str:
    return "" if value is None or math.isnan(value) else form.format(value)


def tokens_per_second(metrics: Mapping[str, float]) -> float | None:
    """How fast the step sampled, or read where it only trained; of the whole step where both go on at once."""
    beside = "time/wait" in metrics
    tokens, seconds = metrics.get("tokens/generated"), metrics.get("time/step" if beside else "time/rollout")
    if tokens is None:
        tokens, seconds = metrics.get("tokens/read"), metrics.get("time/step")
    return None if tokens is None or seconds is None else tokens / max(seconds, 1e-9)


def sample_lines(sample: Shown) -> list[str]:
    """A completion on at most a dozen plain lines."""
    prompt = fold(sample.prompt, WIDTH - 4, 2)
    body = fold(sample.completion, WIDTH - 6, SAMPLE_LINES)
    return [*(f"    {line}" for line in prompt), *(f"    | {line}" for line in body), f"    {verdict(sample)}"]


def verdict(sample: Shown) -> str:
    """What a completion earned and how it ended: `reward 1.1 (correct 1, format 0.1), stop`."""
    if sample.reward is None:
        return f"reward failed, {sample.finish_reason}"
    parts = ", ".join(f"{name} {value:.3g}" for name, value in sample.reward_parts.items())
    return f"reward {sample.reward:.3g}" + (f" ({parts})" if parts else "") + f", {sample.finish_reason}"


def clock(seconds: float) -> str:
    """65 -> 1:05, 3700 -> 1:01:40."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
