"""The parts of a training on rows that were there before: their order, resuming, held-out figures, accuracy.

Rows are demonstrations, or pairs of replies. `Kind` says what one of them is called, how it is encoded, and which rows
of a microbatch it becomes; the loop gives an objective and the figures of held-out rows.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
import torch

from rlpost.config.compose import environments_of
from rlpost.data import faults
from rlpost.data.demonstrations import Demonstration, E, Encoded, Sample
from rlpost.data.encoding import LazySamples, RowEncoder, encode_all
from rlpost.data.faults import BadRows
from rlpost.data.order import OrderedRows
from rlpost.envs.build import build_env
from rlpost.envs.chat import DatasetChatEnv
from rlpost.envs.checks import look_at_lengths
from rlpost.envs.row_checks import look_at_rows
from rlpost.errors import DataError, RlpostError
from rlpost.evaluation.saved import demonstration_row
from rlpost.model.load import context_length
from rlpost.model.packing import Row
from rlpost.model.trainable import load_trainable, starting_tokenizer
from rlpost.policies.build import build_policy
from rlpost.record import Fact
from rlpost.screen import Screen
from rlpost.settings import FineTuningSettings, OwnRowsSettings, SamplingSettings
from rlpost.text import counted
from rlpost.train.facts import Seen, Tokens, facts_of, trained_on_too
from rlpost.train.parts import HeldOut, ObjectiveT, Parts
from rlpost.train.progress import Closing
from rlpost.train.ranks import Ranks
from rlpost.train.resolve import Change
from rlpost.weight_sync.base import WeightUpdater, default_updater

if TYPE_CHECKING:
    from rlpost.data.datasets import ShownRows
    from rlpost.data.order import Digests

FIRST = 32  # rows drawn that are encoded to see that a run goes on with the same tokens
# the figures of held-out rows, and the loss of each demonstration, summed over its tokens; empty for pairs
Figures = Callable[[Ranks, Sequence[Row], Callable[[int, int], None]], tuple[dict[str, float], list[float]]]


@dataclass(frozen=True)
class Kind(Generic[E]):
    """One kind of rows of data: its name, and how one becomes rows of a microbatch."""

    name: str  # of one: sample, pair
    encoder: Callable[[Any, int], RowEncoder[E]]  # of a tokenizer and the most tokens
    rows_of: Callable[[E], list[Row]]  # the rows for packing and the objective that one becomes
    shown_of: Callable[[DatasetChatEnv], ShownRows | None]  # those of an environment; None: they can only be iterated


def row_of(sample: Sample, prompt_length: int | None = None) -> Row:
    """A sample as a row for packing and the objective; the ids before the first trained one are its prompt.

    Of these, the ids before a restart, which no trained id sees, are left out. A smaller `prompt_length` makes the rest
    of them part of the response, which is read but not trained.
    """
    ids, mask = torch.tensor(sample.ids), torch.tensor(sample.mask)
    first = sample.prompt_length if prompt_length is None else prompt_length
    start = max((each for each in sample.restarts if each < first), default=0)
    response = ids[first:]
    return Row(
        prompt=ids[start:first],
        response=response,
        sampled=mask[first:],
        sampler_log_probs=torch.zeros(response.numel()),  # nothing was sampled, and no objective here reads them
        advantage=1.0,
        restarts=tuple(each - first for each in sample.restarts if each >= first),
    )


@dataclass(kw_only=True)
class RowParts(Parts[ObjectiveT], Generic[E, ObjectiveT]):
    """Everything that a loop on rows works with; `E` is a row as it is trained on."""

    settings: FineTuningSettings
    kind: Kind[E]
    samples: OrderedRows[E]
    bad_rows: BadRows  # where `samples` are lazy, the malformed ones: the samples themselves count the others
    bad_held_out: BadRows
    held_out: list[E]  # none where evaluation is off
    shown_held_out: list[Demonstration]  # the rows that they are made of, bad ones included
    shared: int  # of them, how many are trained on too
    figures: Figures  # of the held-out rows
    position: int = 0  # samples trained on, those of every epoch counted

    @property
    def lazy(self) -> LazySamples[E] | None:
        """The samples, where they are encoded when they are drawn."""
        return self.samples.rows if isinstance(self.samples.rows, LazySamples) else None

    @property
    def samples_left(self) -> int | None:
        """Samples until the epochs end; None if training ends after a number of steps.

        An epoch's end is not a boundary of minibatches, but the last one's is.
        """
        settings = self.settings
        return None if settings.steps is not None else (settings.epochs or 1) * self.samples.count() - self.position

    def stream(self, note: Callable[[str], None]) -> Iterator[E]:
        """The samples from the saved position on, without end.

        Of many rows, which are encoded here, untrainable ones are skipped, and the next take their
        place: the first of each kind is given to `note`. Raises DataError where more than
        `max_bad_share` of the rows met so far are bad.
        """
        samples, rows, drawn = self.samples, self.lazy, self._drawn
        if rows is None:
            yield from samples.iter_from(drawn)
            return
        noted: set[tuple[str, str]] = set()
        for place in itertools.count(drawn):
            sample, is_news = rows.meet(samples.row_at(place), first_pass=place < len(rows))
            fault = sample.fault.value if sample.fault else ""
            done = "the rest is trained on" if sample.num_trained else "skipped"
            if is_news and (fault, done) not in noted:  # the end of the run counts them all
                noted.add((fault, done))
                note(f"bad row: {sample.where}: {fault}: {sample.reason}: {done}")
            if sample.num_trained:
                yield sample

    def take(self, stream: Iterator[E]) -> list[E]:
        """The samples of a step: a minibatch, or fewer where training ends."""
        size, left = self.settings.minibatch_size, self.samples_left
        samples = list(itertools.islice(stream, size if left is None else min(size, left)))
        self.position += len(samples)
        return samples

    def reading(self, rows: Sequence[Row]) -> dict[str, float]:
        """The metrics of a step that read `rows`; `epoch` counts the passes over all samples so far."""
        tokens = sum(row.prompt.numel() + row.response.numel() for row in rows)
        return {"tokens/read": float(tokens), "epoch": self.position / self.samples.count()}

    def facts(self, changes: Sequence[Change], seen: Seen) -> list[Fact]:
        """The facts of this training; `seen` says what is known of it beside its parts."""
        settings, samples, lazy = self.settings, self.samples.rows, self.lazy
        trained = lazy.num_trained if lazy else sum(sample.num_trained for sample in samples)
        read = lazy.num_read if lazy else sum(sample.num_read for sample in samples)
        notes = [
            *(lazy.bad if lazy else self.bad_rows).noted(),
            *(f"bad rows: {line}" for line in self.bad_rows.lines()),
            *(f"bad rows among those looked at: {line}" for line in (lazy.bad.lines() if lazy else ())),
            *(f"bad rows held out: {line}" for line in self.bad_held_out.lines()),
        ]
        if self.shared:
            notes.append(trained_on_too(self.shared, counted(len(self.held_out), "held-out row"), "a loss"))
        seen = replace(
            seen,
            rows=len(samples),
            held_out=len(self.held_out),
            prompts_held_out=self.eval_env.num_tasks if self.policy is not None else None,
            tokens=Tokens(trained, read, lazy.looked_at if lazy else None),
            notes=[*seen.notes, *notes, *self.notes],
        )
        return facts_of(settings, changes, seen)

    @property
    def closing(self) -> Closing:
        """The notes at the end of the training, and the settings that score replies."""
        bad = []
        if self.lazy is not None and self.lazy.met:
            bad = [f"bad rows met in training: {self.lazy.met:,}, {self.lazy.skipped:,} of all drawn were skipped"]
        return Closing(notes=bad, talks=True, reward_words=self.words_for_rewards)

    @property
    def words_for_rewards(self) -> list[str] | None:
        """The settings to add so that replies can be scored; None if the rows have no answers."""
        env = self.settings.env
        if all(each.scores for each in environments_of(env)):
            return []
        if not isinstance(env, OwnRowsSettings):
            return None
        try:
            columns = look_at_rows(replace(env, reward=["exact"]), ["test"], demonstrated=False).columns
        except RlpostError:
            return None
        return ["env.reward=exact"] if "answer" in (columns or []) else None

    def measure(self, ranks: Ranks, screen: Screen, when: str) -> HeldOut:
        """The figures of the held-out rows, and where asked for the accuracy of greedy replies."""
        rows, count = self._held_out_rows, len(self.held_out)
        if not screen.is_live:
            screen.line(f"evaluating on {counted(count, 'held-out row')}, {when} ...")
        screen.phase("evaluating", "the loss")
        tokens = float(sum(row.num_trained for row in rows))
        figures, losses = self.figures(ranks, rows, lambda n, total: screen.phase("evaluating", "the loss", n, total))
        figures = {**figures, "eval/tokens": tokens, "eval/rows": float(count)}
        if self.policy is not None:
            self._updater.push(self.model)
            replies = self.play_held_out(screen, SamplingSettings(temperature=0.0), what="replies")
            self.policy.rest()
            return HeldOut(figures | replies.metrics, replies.table)
        samples = [sample for each in self.held_out for sample in each.samples]
        return HeldOut(figures, loss_rows(self.shown_held_out, samples, losses, self.tokenizer) if losses else [])

    @cached_property
    def _held_out_rows(self) -> list[Row]:
        """The rows of what is held out; they keep the reference's log-probs from one evaluation to the next."""
        return [row for each in self.held_out for row in self.kind.rows_of(each)]

    @cached_property
    def _updater(self) -> WeightUpdater:
        assert self.policy is not None
        return default_updater(self.policy)

    @property
    def _drawn(self) -> int:
        """Rows that have been drawn: the samples, and those skipped."""
        return self.position + (0 if self.lazy is None else self.lazy.skipped)

    def _fingerprint(self) -> str:
        """Everything that the saved position depends on, in words; the first rows drawn are encoded for it."""
        text = self.samples.fingerprint(self._drawn)
        if self.lazy is None:
            return text
        return f"{text}, tokens {self.lazy.fingerprint(map(self.samples.row_at, range(min(self._drawn, FIRST))))}"

    def state(self) -> dict[str, Any]:
        """The position in the samples, and everything that it depends on."""
        met = None if self.lazy is None else self.lazy.state()
        return {"samples": self._fingerprint(), "met": met, "position": self.position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Raises DataError where the samples are not those the run began with."""
        if self.lazy is not None and state.get("met"):
            self.lazy.restore(state["met"])
        self.position = state["position"] if "position" in state else state["progress"]["position"]  # of an older run
        these = self._fingerprint()
        if state["samples"] != these:
            raise DataError(
                f"--resume: the run has {state['samples']}, and this data gives {these}: resume with the data, the "
                "tokenizer and the env settings it began with; only rows that were not drawn yet may go"
            )


def assemble_rows(
    settings: FineTuningSettings, checkpoint: Path | None, kind: Kind[E], objective: ObjectiveT, figures: Figures
) -> RowParts[E, ObjectiveT]:
    """The parts of a loop on rows of one `kind`, with the weights of `checkpoint` if it is given.

    A policy is not started yet. Raises DataError if more than `max_bad_share` of the rows cannot be trained on.
    """
    env = build_env(settings.env, seed=settings.seed)
    eval_env = build_env(settings.env.held_out_for(settings.eval.limit))
    if settings.eval.accuracy:
        eval_env.start()  # a bad path or row is found here, before a model is loaded
    tokenizer, folder = starting_tokenizer(settings.model, settings.lora.path, checkpoint)
    notes: list[str | None] = []
    if settings.eval.accuracy:
        notes.append(look_at_lengths(eval_env, settings.env, tokenizer, context_length(folder)))
    encoder = kind.encoder(tokenizer, settings.max_tokens)
    shown = kind.shown_of(env)
    data = {"train": env.content(shown)}
    samples, bad_rows = read_samples(env, shown, encoder, settings.max_bad_share)
    notes.append(shown.not_used if shown else None)
    held_out: list[E] = []
    first: list[Demonstration] = []
    bad_held_out, shared = BadRows(), 0
    if settings.eval.enabled:
        shown, most = kind.shown_of(eval_env), settings.eval.limit or settings.env.eval_limit
        data["held out"] = eval_env.content(shown)
        first = [*itertools.islice(eval_env.demonstrations() if shown is None else shown.in_turn(), most)]
        held_out, bad_held_out = encode_all(first, encoder, max_bad_share=settings.max_bad_share)
        if isinstance(samples.rows, LazySamples) and shown is not None:  # those with the same row
            shared = int(np.isin(shown.digests[:most], samples.rows.digests).sum())
        else:
            shared = _shared(samples.rows, held_out)
        if not held_out:
            raise DataError("no rows are held out to measure the loss on: keep some back, or add eval.enabled=false")
    if not samples.rows:
        raise DataError("there are no rows to train on: give some")
    trainable = load_trainable(settings, checkpoint)
    policy, opened = None, ExitStack()
    if settings.eval.accuracy:
        opened.callback(eval_env.close)
        policy = build_policy(
            settings.policy,
            trainable.folder,
            tokenizer,
            model=trainable.model,
            model_settings=settings.model,
            env_settings=settings.env,
            sampling=SamplingSettings(temperature=0.0),
            seed=settings.seed,
            adapter_rank=trainable.adapter_rank,
            adapter=trainable.adapter,
        )
        opened.callback(policy.close)
    return RowParts(
        settings=settings,
        kind=kind,
        model_folder=trainable.folder,
        tokenizer=tokenizer,
        model=trainable.model,
        reference=trainable.reference,
        samples=samples,
        shared=shared,
        bad_rows=bad_rows,
        bad_held_out=bad_held_out,
        held_out=held_out,
        shown_held_out=first,
        eval_env=eval_env,
        policy=policy,
        opened=opened,
        notes=[note for note in notes if note],
        data=data,
        objective=objective,
        figures=figures,
        optimizer=trainable.optimizer,
    )


def loss_rows(
    given: Sequence[Demonstration], samples: Sequence[Sample], losses: Sequence[float], tokenizer: Any
) -> list[dict[str, Any]]:
    """A row of the table of samples for each of `samples`, made of some of `given`; `losses` are sums over tokens."""
    by_place = {demonstration.where: demonstration for demonstration in given}
    found = []
    for number, (sample, loss) in enumerate(zip(samples, losses, strict=True), start=1):
        shown, first = by_place[sample.where], sample.prompt_length
        task = {"text": shown.text} if shown.messages is None else {"messages": shown.messages, "tools": shown.tools}
        texts = tokenizer.decode(sample.ids[:first]), tokenizer.decode(sample.ids[first:])
        found.append(demonstration_row(number, task, texts, loss / sample.num_trained, sample.num_trained))
    return found


def read_samples(
    env: DatasetChatEnv, shown: ShownRows | None, encoder: RowEncoder[E], max_bad_share: float
) -> tuple[OrderedRows[E], BadRows]:
    """The rows of `env`, `shown` if they are numbered, in their order.

    Beyond `faults.ALL_UP_TO` rows are encoded when they are asked for.
    """
    if shown is None:
        samples, bad = encode_all(env.demonstrations(), encoder, max_bad_share=max_bad_share)
    elif len(shown) <= faults.ALL_UP_TO:
        samples, bad = encode_all(shown.in_turn(), encoder, max_bad_share=max_bad_share)
    else:
        samples = LazySamples(shown, encoder, max_bad_share=max_bad_share)
        bad = samples.malformed
    digests = samples.digests if isinstance(samples, LazySamples) else _digests_of(samples)
    return OrderedRows(samples, shuffle=env.shuffle, seed=env.seed, digests=digests), bad


def _shared(samples: Sequence[Encoded], held_out: Sequence[Encoded]) -> int:
    def ids_of(each: Encoded) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sample.ids) for sample in each.samples)

    trained = set(map(ids_of, samples)) if held_out else set()
    return sum(ids_of(each) in trained for each in held_out)


def _digests_of(samples: Sequence[Encoded]) -> Digests:
    """One hash for each sample, of its ids and its mask."""
    digests = (hashlib.blake2b(repr(each.content).encode(), digest_size=8).digest() for each in samples)
    return np.frombuffer(b"".join(digests), np.uint64)
