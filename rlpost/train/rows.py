"""The parts of a training on rows that were there before: their order, resuming, held-out figures, accuracy.

Rows are demonstrations, or pairs of replies. `Kind` says what one of them is called, how it is encoded, and which rows
of a microbatch it becomes; the loop gives an objective and the figures of held-out rows.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from rlpost.catalog import option_of
from rlpost.config.compose import environments_of
from rlpost.data import rows
from rlpost.data.demonstrations import Demonstration, E, Encoded, Sample
from rlpost.data.encoding import LazySamples, RowEncoder, encode_all
from rlpost.data.rows import BadRows
from rlpost.envs.build import build_env, shown_of
from rlpost.envs.chat import DatasetChatEnv, OrderedRows
from rlpost.envs.checks import look_at_lengths
from rlpost.envs.row_checks import look_at_rows
from rlpost.errors import DataError, RlpostError
from rlpost.evaluation.pass_rates import RateFilter, choose_demonstrations
from rlpost.evaluation.play import held_out_metrics, play
from rlpost.evaluation.saved import demonstration_row, sample_rows
from rlpost.model.load import context_length
from rlpost.model.lora import describe_adapter
from rlpost.model.optim import learning_rate_of
from rlpost.model.packing import Row
from rlpost.model.precision import Precision
from rlpost.model.trainable import Reference, load_trainable, starting_tokenizer
from rlpost.model.weights import device_of
from rlpost.policies.base import Policy
from rlpost.settings import DatasetSettings, EnvSettings, FineTuningSettings, SamplingSettings
from rlpost.text import counted
from rlpost.train import narration
from rlpost.train.assemble import build_trained_policy
from rlpost.train.update import Objective, Update
from rlpost.weight_sync.base import WeightUpdater, default_updater

if TYPE_CHECKING:
    from rlpost.data.datasets import ShownRows
    from rlpost.data.rows import Digests
    from rlpost.train.session import Session

FIRST = 32  # rows drawn that are encoded to see that a run goes on with the same tokens
O = TypeVar("O", bound=Objective[Any])  # noqa: E741
# the figures of held-out rows, and the loss of each demonstration, summed over its tokens; empty for pairs
Figures = Callable[["Session[Any, Any]", Sequence[Row]], tuple[dict[str, float], list[float]]]


@dataclass(frozen=True)
class Kind(Generic[E]):
    """One kind of rows of data: its name, and how one becomes rows of a microbatch."""

    name: str  # of one: sample, pair
    encoder: Callable[[Any, int], RowEncoder[E]]  # of a tokenizer and the most tokens
    rows_of: Callable[[E], list[Row]]  # the rows for packing and the objective that one becomes


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


@dataclass
class AccuracyParts:
    """The policy that answers held-out prompts during fine-tuning."""

    env: DatasetChatEnv
    policy: Policy
    updater: WeightUpdater

    def close(self) -> None:
        """Stop the policy, and close the environment with its tools."""
        self.policy.close()
        self.env.close()


@dataclass
class RowParts(Generic[E, O]):
    """Everything that a loop on rows works with; `E` is a row as it is trained on."""

    model_folder: Path
    tokenizer: Any
    model: PreTrainedModel
    reference: Reference | None  # None unless the loss compares with it
    kind: Kind[E]
    samples: OrderedRows[E]
    bad_rows: BadRows  # where `samples` are lazy, the malformed ones: the samples themselves count the others
    bad_held_out: BadRows
    held_out: list[E]  # none where evaluation is off
    shown_held_out: list[Demonstration]  # the rows that they are made of, bad ones included
    shared: int  # of them, how many are trained on too
    accuracy: AccuracyParts | None  # None unless eval.accuracy
    notes: list[str]  # what a user should know of the data before training begins
    data: dict[str, str]  # the rows of each split: see `DatasetChatEnv.content`
    objective: O
    figures: Figures  # of the held-out rows
    optimizer: torch.optim.Optimizer

    @property
    def device(self) -> torch.device:
        """The device on which the model is trained."""
        return device_of(self.model)

    def start(self) -> None:
        """Start the policy that measures the accuracy, if any."""
        if self.accuracy:
            self.accuracy.policy.start()

    def close(self) -> None:
        """Close what measures the accuracy, if anything does."""
        if self.accuracy:
            self.accuracy.close()

    def total_steps(self, session: Session[Any, Any]) -> int:
        """As many as asked for, or as the epochs fill."""
        left = ceil(self.samples_left(session) / session.settings.minibatch_size)
        return session.settings.steps or session.progress.step + left

    def samples_left(self, session: Session[Any, Any]) -> int:
        """Samples until training ends. An epoch's end is not a boundary of minibatches, but the last one's is."""
        settings, progress = session.settings, session.progress
        if settings.steps is not None:
            return (settings.steps - progress.step) * settings.minibatch_size
        return (settings.epochs or 1) * self.samples.count() - progress.position

    def loaded(self, session: Session[Any, Any]) -> None:
        """Nothing is done before the first step."""

    def begin_step(self) -> None:
        """Nothing is done before a step."""

    def collected(self, session: Session[Any, Any], batch: Sequence[E]) -> None:
        """Nothing is to be said of samples that were there before."""

    def end_step(self, session: Session[Any, Any], *, changed: bool) -> None:
        """Nothing was pushed."""

    def announce(self, session: Session[Any, Any], numbers: Precision) -> None:
        """Print the plan."""
        settings, parts, run = session.settings, self, session.run
        samples = parts.samples.rows
        lazy = samples if isinstance(samples, LazySamples) else None
        if lazy is None:
            trained, read = sum(s.num_trained for s in samples), sum(s.num_read for s in samples)
        else:
            trained, read = lazy.num_trained, lazy.num_read
        unit, held_out = parts.kind.name, len(parts.held_out)
        looked_at = f" in the {lazy.looked_at:,} {unit}s looked at" if lazy else ""
        data, loss = narration.name_of_data(settings.env), option_of("loss", type(settings.loss))
        passes = run.total_steps * settings.minibatch_size / len(samples)
        length = counted(settings.epochs or 1, "epoch") if settings.steps is None else f"{passes:.3g} epochs"
        lines = [
            narration.model_line(settings.model, parts.model_folder, parts.model),
            numbers.line,
            *settings.cluster.rank_lines(session.ranks.count),
            *narration.reading_lines(parts.model),
            f"data    {data}, {counted(len(samples), unit)}" + (f", {held_out} held out" if held_out else ""),
            f"tokens  {trained} of {read} are trained{looked_at} ({trained / read:.0%}), at most "
            f"{settings.max_tokens} a sample",
            f"work    {counted(run.total_steps, 'step')} of {counted(settings.minibatch_size, unit)} ({length})"
            + ("" if settings.packing else ", each in a forward of its own"),
            *([f"lora    {describe_adapter(parts.model)}"] if settings.lora.enabled else []),
            f"loss    {loss}, lr {settings.optim.rate:g}, seed {settings.seed}",
            *([f"policy  {parts.accuracy.policy.name}, greedy"] if parts.accuracy else []),
        ]
        notes = [
            *parts.notes,
            *(parts.bad_rows if lazy is None else lazy.bad).noted(),
            *(f"bad rows: {line}" for line in parts.bad_rows.lines()),
            *(f"bad rows among those looked at: {line}" for line in (lazy.bad.lines() if lazy else ())),
            *(f"bad rows held out: {line}" for line in parts.bad_held_out.lines()),
            narration.thinking_note(settings.env, parts.tokenizer) if parts.accuracy else None,
        ]
        if parts.accuracy:
            available = parts.accuracy.env.num_tasks
            played = self._prompts_played(settings)
            divided, few = narration.held_out_told(settings.eval, settings.env, played, available)
            lines, notes = [*lines, *divided], [*notes, few]
        elif held_out:
            is_limited = held_out == (settings.eval.limit or settings.env.eval_limit)
            notes.append(narration.few_rows_note(settings.env, held_out, is_limited=is_limited))
        if shared := parts.shared:
            notes.append(
                f"{shared} of {counted(held_out, 'held-out row')} are trained on too, so a loss called "
                "held-out is not: take them out of one of the two"
            )
        narration.open_screen(run, numbers, lines, notes, f"{settings.model.path} · {data} · {loss}")

    def measure(self, session: Session[Any, Any], when: str) -> dict[str, float]:
        """The figures of the held-out rows, and where asked for the accuracy of greedy replies."""
        screen, rows, count = session.screen, self._held_out_rows, len(self.held_out)
        if not screen.is_live:
            screen.line(f"evaluating on {counted(count, 'held-out row')}, {when} ...")
        screen.phase("evaluating", "the loss")
        tokens = float(sum(row.num_trained for row in rows))
        figures, losses = self.figures(session, rows)
        if losses and self.accuracy is None:
            samples = [sample for each in self.held_out for sample in each.samples]
            session.keep_held_out(loss_rows(self.shown_held_out, samples, losses, self.tokenizer))
        return {**figures, "eval/tokens": tokens, "eval/rows": float(count)} | self._accuracy(session)

    @cached_property
    def _held_out_rows(self) -> list[Row]:
        """The rows of what is held out; they keep the reference's log-probs from one evaluation to the next."""
        return [row for each in self.held_out for row in self.kind.rows_of(each)]

    def _accuracy(self, session: Session[Any, Any]) -> dict[str, float]:
        """The accuracy of greedy replies; nothing if it is not measured."""
        if self.accuracy is None:
            return {}
        env, policy, phase = self.accuracy.env, self.accuracy.policy, session.screen.phase
        self.accuracy.updater.push(self.model)
        before = policy.tokens_sampled
        played = play(
            env,
            policy,
            num_prompts=self._prompts_played(session.settings),
            samples=1,
            sampling=SamplingSettings(temperature=0.0),
            progress=lambda done, total: phase("evaluating", "replies", done, total, policy.tokens_sampled - before),
        )
        policy.rest()
        session.keep_held_out(sample_rows(session.reported(played)))
        return held_out_metrics(played, k=[1], temperature=0.0, some_decide=bool(session.settings.eval.stops))

    def _prompts_played(self, settings: FineTuningSettings) -> int:
        """How many held-out prompts an evaluation plays; 0 where no reply is scored."""
        eval_, accuracy = settings.eval, self.accuracy
        return min(eval_.limit or settings.env.eval_limit, accuracy.env.num_tasks) if accuracy else 0

    def stream(self, session: Session[Any, Any]) -> Iterator[E]:
        """The samples from the saved position on, without end; see `samples_from`."""
        return samples_from(self.samples, self._drawn(session), session.screen.note)

    def take(self, session: Session[Any, Any], stream: Iterator[E]) -> list[E]:
        """The samples of a step: a minibatch, or fewer where training ends."""
        return list(itertools.islice(stream, min(session.settings.minibatch_size, self.samples_left(session))))

    def step_metrics(self, session: Session[Any, Any], updated: Update[Any], rows: Sequence[Row]) -> dict[str, float]:
        """Metrics of a step's update on `rows`; `epoch` counts the passes over all samples so far."""
        return {
            "tokens/read": float(sum(row.prompt.numel() + row.response.numel() for row in rows)),
            "grad_norm": updated.grad_norm,
            "lr": learning_rate_of(self.optimizer),
            "epoch": session.progress.position / self.samples.count(),
        }

    def _drawn(self, session: Session[Any, Any]) -> int:
        """Rows that have been drawn: the samples, and those skipped."""
        rows = self.samples.rows
        return session.progress.position + (rows.skipped if isinstance(rows, LazySamples) else 0)

    def _fingerprint(self, session: Session[Any, Any]) -> str:
        """Everything that the saved position depends on, in words; the first rows drawn are encoded for it."""
        samples, rows = self.samples, self.samples.rows
        said = samples.fingerprint(self._drawn(session))
        if not isinstance(rows, LazySamples):
            return said
        return f"{said}, tokens {rows.fingerprint(map(samples.row_at, range(min(self._drawn(session), FIRST))))}"

    def state(self, session: Session[Any, Any]) -> dict[str, Any]:
        """Everything that the saved position depends on."""
        rows = self.samples.rows
        return {"samples": self._fingerprint(session), "met": rows.state() if isinstance(rows, LazySamples) else None}

    def restore(self, session: Session[Any, Any], state: Mapping[str, Any]) -> None:
        """Take up what `state` gave. Raises DataError where the samples are not those the run began with."""
        rows = self.samples.rows
        if isinstance(rows, LazySamples) and state.get("met"):
            rows.restore(state["met"])
        these = self._fingerprint(session)
        if state["samples"] != these:
            raise DataError(
                f"--resume: the run has {state['samples']}, and this data gives {these}: resume with the data, the "
                "tokenizer and the env settings it began with; only rows that were not drawn yet may go"
            )

    def keep_batch(self, folder: Path, step: int, batch: Iterable[E]) -> None:
        """Write the samples of a step, one JSON object a line."""
        folder.mkdir(parents=True, exist_ok=True)
        samples = itertools.chain.from_iterable(each.samples for each in batch)
        rows = [
            {"where": s.where, "ids": s.ids, "mask": [int(m) for m in s.mask]}
            | ({"restarts": s.restarts} if s.restarts else {})
            for s in samples
        ]
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def why_nothing(self, session: Session[Any, Any]) -> str:
        """The likely reason where nothing is learned."""
        shown = "" if session.settings.learns_from_pairs else " with rlpost data preview"
        return f"no token's loss moves a weight; look at the rows{shown}"

    def conclude(self, session: Session[Any, Any]) -> None:
        """The commands to type next, for a run that was not stopped."""
        run, screen, progress = session.run, session.screen, session.progress
        if isinstance(rows := self.samples.rows, LazySamples) and rows.met:
            screen.line(f"bad rows met in training: {rows.met:,}, {rows.skipped:,} of all drawn were skipped")
        narration.say_best(run, progress)
        narration.say_talk(run)
        more = _words_for_rewards(session.settings.env)
        narration.say_evaluate(run, *(more or []))
        if more is not None:
            narration.say_train_on(run, *more)


def samples_from(samples: OrderedRows[E], drawn: int, note: Callable[[str], None]) -> Iterator[E]:
    """The samples that follow the first `drawn` rows, without end.

    Of many rows, which are encoded here, untrainable ones are skipped, and the next take their
    place: the first of each kind is given to `note`. Raises DataError where more than
    `max_bad_share` of the rows met so far are bad.
    """
    rows = samples.rows
    if not isinstance(rows, LazySamples):
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


def assemble_rows(
    settings: FineTuningSettings, checkpoint: Path | None, kind: Kind[E], objective: O, figures: Figures
) -> RowParts[E, O]:
    """The parts of a loop on rows of one `kind`, with the weights of `checkpoint` if it is given.

    A policy is not started yet. Raises DataError if more than `max_bad_share` of the rows cannot be trained on.
    """
    env = build_env(settings.env, num_prompts=1, group_size=1, seed=settings.seed)
    eval_env = build_env(settings.env.held_out_for(settings.eval.limit), num_prompts=1, group_size=1, seed=0)
    if settings.eval.accuracy:
        eval_env.start()  # a bad path or row is found here, before a model is loaded
    tokenizer, folder = starting_tokenizer(settings, checkpoint)
    notes: list[str | None] = []
    if settings.eval.accuracy:
        notes.append(look_at_lengths(eval_env, settings.env, tokenizer, context_length(folder)))
    encoder = kind.encoder(tokenizer, settings.max_tokens)
    shown = shown_of(env, settings)
    data = {"train": env.content(shown)}
    samples, bad_rows, told = read_samples(env, shown, settings, encoder)
    notes += [told, shown.not_used if shown else None]
    held_out: list[E] = []
    first: list[Demonstration] = []
    bad_held_out, shared = BadRows(), 0
    if settings.eval.enabled:
        shown, most = shown_of(eval_env, settings), settings.eval.limit or settings.env.eval_limit
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
    trainable = load_trainable(settings, checkpoint, with_reference=settings.needs_reference)
    accuracy = None
    if settings.eval.accuracy:
        policy = build_trained_policy(settings, tokenizer, trainable, SamplingSettings(temperature=0.0))
        accuracy = AccuracyParts(eval_env, policy, default_updater(policy))
    return RowParts(
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
        accuracy=accuracy,
        notes=[told for told in notes if told],
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
    env: DatasetChatEnv, shown: ShownRows | None, settings: FineTuningSettings, encoder: RowEncoder[E]
) -> tuple[OrderedRows[E], BadRows, str | None]:
    """The rows of `env`, `shown` if they are numbered, in their order; and a note on how they were chosen.

    Beyond `rows.ALL_UP_TO` rows are encoded when they are asked for, unless they are chosen by pass rates.
    """
    told = None
    if shown is None or RateFilter.of(settings.env) is not None:
        demonstrations, told = choose_demonstrations(env, settings.env)
        samples, bad = encode_all(demonstrations, encoder, max_bad_share=settings.max_bad_share)
    elif len(shown) <= rows.ALL_UP_TO:
        samples, bad = encode_all(shown.in_turn(), encoder, max_bad_share=settings.max_bad_share)
    else:
        samples = LazySamples(shown, encoder, max_bad_share=settings.max_bad_share)
        bad = samples.malformed
    digests = samples.digests if isinstance(samples, LazySamples) else _digests_of(samples)
    return OrderedRows(samples, shuffle=env.shuffle, seed=env.seed, digests=digests), bad, told


def _shared(samples: Sequence[Encoded], held_out: Sequence[Encoded]) -> int:
    def ids_of(each: Encoded) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sample.ids) for sample in each.samples)

    trained = set(map(ids_of, samples)) if held_out else set()
    return sum(ids_of(each) in trained for each in held_out)


def _digests_of(samples: Sequence[Encoded]) -> Digests:
    """One hash for each sample, of its ids and its mask."""
    digests = (hashlib.blake2b(repr(each.content).encode(), digest_size=8).digest() for each in samples)
    return np.frombuffer(b"".join(digests), np.uint64)


def _words_for_rewards(env: EnvSettings) -> list[str] | None:
    """The settings to add so that replies can be scored; None if the rows have no answers."""
    if all(each.scores for each in environments_of(env)):
        return []
    if not isinstance(env, DatasetSettings):
        return None
    try:
        columns = look_at_rows(replace(env, reward=["exact"]), ["test"], demonstrated=False).columns
    except RlpostError:
        return None
    return ["env.reward=exact"] if "answer" in (columns or []) else None
