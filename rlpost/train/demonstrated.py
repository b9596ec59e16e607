"""The loss of demonstrated replies under a model, for `rlpost eval` where no reward scores sampled ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from rlpost.data.encoding import Encoder, encode_all
from rlpost.envs.build import build_env
from rlpost.errors import DataError
from rlpost.evaluation.play import Evaluation
from rlpost.evaluation.saved import figures_in, metrics_of
from rlpost.evaluation.statistics import ratio_interval
from rlpost.model.load import load_model
from rlpost.model.locate import locate_model
from rlpost.model.precision import this_device
from rlpost.model.tokenizer import load_tokenizer
from rlpost.model.weights import device_of
from rlpost.output import output_aside
from rlpost.record import Fact
from rlpost.settings import EvalSettings
from rlpost.text import counted
from rlpost.train.facts import precision_fact
from rlpost.train.resolve import kept_of, resolve
from rlpost.train.rows import loss_rows, row_of
from rlpost.train.update import Microbatches, read_log_probs


@dataclass(frozen=True)
class LossResult:
    """The mean loss per token of demonstrated replies, with its 95% interval (None for one row)."""

    num_prompts: int  # rows
    num_tokens: int  # of their replies
    loss: float  # nats
    loss_low: float | None
    loss_high: float | None
    bad_rows: int  # left out
    num_samples: int = 1

    def lines(self) -> list[str]:
        """A small table for people."""
        figure = figures_in(metrics_of(asdict(self)))["loss"]
        bad = f", {self.bad_rows} bad ones left out" if self.bad_rows else ""
        return [
            f"{counted(self.num_prompts, 'demonstration')}, 95% interval{bad}",
            f"  {'loss per token':<18}{figure}",
            f"  {'tokens':<18}{self.num_tokens}",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def evaluate_demonstrations(
    settings: EvalSettings,
    progress: Callable[[int, int, int], None],
    tell: Callable[[Fact], None],
    note: Callable[[str], None],
) -> Evaluation:
    """`rlpost eval` on rows without a reward: every demonstration of the split, or the first `env.limit`.

    See `rlpost.train.assemble.evaluate_command` for the arguments. Raises DataError where no row can be read as a
    demonstration.
    """
    env = build_env(settings.env)
    with closing(env):
        shown = env.demonstrated()
        given = list(islice(env.demonstrations() if shown is None else shown.in_turn(), settings.env.limit))
    settings, changes = resolve(settings, this_device(settings.model.device), None)
    tell(precision_fact(settings.model, None, changes, trains=False))
    with output_aside():
        folder = locate_model(settings.model.path, settings.model.revision)
        tokenizer = load_tokenizer(folder, settings.model)
        samples, bad = encode_all(given, Encoder(tokenizer, settings.max_tokens))
        if not samples:
            raise DataError(
                f"the split {settings.env.split} has no rows to measure the loss on: give another env.split"
            )
        model = load_model(folder, settings.model).eval()
    for line in bad.noted():
        note(line)
    for line in bad.lines():
        note(f"bad rows: {line}")
    microbatches = Microbatches(None, device_of(model), settings.model.autocast)
    rows = [row_of(sample) for sample in samples]
    read = read_log_probs(model, microbatches, rows, progress=lambda done, total: progress(done, total, 0))
    losses = [-each.double().sum().item() for each in read]
    counts = [row.num_trained for row in rows]
    low, high = ratio_interval(losses, counts) or (None, None)
    found = LossResult(len(rows), sum(counts), sum(losses) / sum(counts), low, high, len(given) - len(samples))
    kept = kept_of(settings.model, settings.policy, changes)
    return Evaluation(found, [], kept, loss_rows(given, samples, losses, tokenizer))
