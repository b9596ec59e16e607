"""Supervised fine-tuning, from top to bottom: samples in a shuffled order, minibatches, update, held-out loss.

Samples are packed into microbatches without seeing each other, and the loss of a minibatch is
averaged over all its trained tokens, so neither packing nor the size of a microbatch changes the
gradient (`loss.aggregation=sequence_mean` lets every sample weigh the same instead).
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from rlpost.catalog import option_of
from rlpost.config.compose import environments_of
from rlpost.data.demonstrations import Sample
from rlpost.data.encoding import LazySamples
from rlpost.envs.row_checks import look_at_rows
from rlpost.errors import DataError, RlpostError
from rlpost.evaluation.play import held_out_metrics, play
from rlpost.evaluation.statistics import ratio_interval
from rlpost.model.lora import describe_adapter
from rlpost.model.optim import learning_rate_of
from rlpost.model.packing import Row
from rlpost.model.precision import Numbers
from rlpost.objectives.supervised import SFTOutput, sft_metrics
from rlpost.record import LOSS
from rlpost.settings import DatasetSettings, SamplingSettings, SFTSettings
from rlpost.settings.commands import RunRequest
from rlpost.text import counted
from rlpost.train import narration
from rlpost.train.assemble import SFTParts, assemble_sft
from rlpost.train.progress import Progress
from rlpost.train.session import Session
from rlpost.train.update import Update

FIRST = 32  # rows drawn that are encoded to see that a run goes on with the same tokens
ONE_SAMPLE = 1  # tokens a microbatch that no two samples fit in


def train(settings: SFTSettings, request: RunRequest) -> int:
    """Run or resume the training that `settings` describes; returns the process's exit code."""
    with SFTSession(settings, request) as session:
        session.load(assemble_sft)
        learn(session)
    return session.run.exit_code


def learn(session: SFTSession) -> None:
    """The loop: every step still to do, one minibatch each."""
    settings, parts = session.settings, session.parts
    ranks = session.ranks.over(session.run.total_steps)
    stream = session.stream()
    for step in session.steps():
        samples = list(itertools.islice(stream, min(settings.minibatch_size, session.samples_left())))
        session.screen.phase("training")
        rows = [row_of(sample) for sample in samples]
        ranks.fill_reference(rows)
        with session.diverging(samples):
            updated = ranks.update(rows, step - 1)
        session.progress.position += len(samples)
        session.metrics |= step_metrics(parts, updated, rows, session.progress)
        session.finish()


def step_metrics(
    parts: SFTParts, updated: Update[SFTOutput], rows: Sequence[Row], progress: Progress
) -> dict[str, float]:
    """Metrics of one step; `epoch` counts the passes over all samples so far."""
    return {
        **sft_metrics(updated.outputs),
        "tokens/read": float(sum(row.prompt.numel() + row.response.numel() for row in rows)),
        "grad_norm": updated.grad_norm,
        "lr": learning_rate_of(parts.optimizer),
        "epoch": progress.position / parts.samples.count(),
    }


def row_of(sample: Sample) -> Row:
    """A sample as a row for packing and the objective; the ids before the first trained one are its prompt."""
    ids, mask = torch.tensor(sample.ids), torch.tensor(sample.mask)
    response = ids[sample.prompt_length :]
    return Row(
        prompt=ids[: sample.prompt_length],
        response=response,
        sampled=mask[sample.prompt_length :],
        sampler_log_probs=torch.zeros(response.numel()),  # nothing was sampled, and no objective here reads them
        advantage=1.0,
    )


class SFTSession(Session[SFTSettings, SFTParts]):
    """A training on samples in an order that their position alone decides."""

    waits_for = "reading the data, loading the model"

    @property
    def tokens_per_microbatch(self) -> int | None:
        """See `Session.tokens_per_microbatch`."""
        return self.settings.tokens_per_microbatch if self.settings.packing else ONE_SAMPLE

    def total_steps(self) -> int:
        """As many as asked for, or as the epochs fill."""
        return self.settings.steps or self.progress.step + ceil(self.samples_left() / self.settings.minibatch_size)

    def samples_left(self) -> int:
        """Samples until training ends. An epoch's end is no boundary of minibatches, but the last one's is."""
        if self.settings.steps is not None:
            return (self.settings.steps - self.progress.step) * self.settings.minibatch_size
        return (self.settings.epochs or 1) * self.parts.samples.count() - self.progress.position

    def announce(self, numbers: Numbers) -> None:
        """See `Session.announce`."""
        settings, parts, run = self.settings, self.parts, self.run
        samples = parts.samples.rows
        lazy = samples if isinstance(samples, LazySamples) else None
        if lazy is None:
            trained, read = sum(s.num_trained for s in samples), sum(len(s.ids) for s in samples)
        else:
            trained, read = lazy.num_trained, lazy.num_read
        looked_at = f" in the {lazy.looked_at:,} samples looked at" if lazy else ""
        data, loss = narration.name_of_data(settings.env), option_of("loss", type(settings.loss))
        passes = run.total_steps * settings.minibatch_size / len(samples)
        length = counted(settings.epochs or 1, "epoch") if settings.steps is None else f"{passes:.3g} epochs"
        lines = [
            narration.model_line(settings.model, parts.model_folder, parts.model),
            numbers.line,
            *settings.cluster.told_of_ranks(self.ranks.count),
            *narration.reading_lines(parts.model),
            f"data    {data}, {counted(len(samples), 'sample')}"
            + (f", {len(parts.held_out)} held out" if parts.held_out else ""),
            f"tokens  {trained} of {read} are trained{looked_at} ({trained / read:.0%}), at most "
            f"{settings.max_tokens} a sample",
            f"work    {counted(run.total_steps, 'step')} of {counted(settings.minibatch_size, 'sample')} ({length})"
            + ("" if settings.packing else ", each in a forward of its own"),
            *([f"lora    {describe_adapter(parts.model)}"] if settings.lora.enabled else []),
            f"loss    {loss}, lr {settings.optim.rate:g}, seed {settings.seed}",
            *([f"policy  {type(parts.accuracy.policy).__name__}, greedy"] if parts.accuracy else []),
        ]
        notes = [
            *parts.notes,
            *(f"bad rows: {line}" for line in parts.bad_rows.lines()),
            *(f"bad rows among those looked at: {line}" for line in (lazy.bad.lines() if lazy else ())),
            *(f"bad rows held out: {line}" for line in parts.bad_held_out.lines()),
            narration.thinking_note(settings.env, parts.tokenizer) if parts.accuracy else None,
        ]
        if parts.accuracy:
            available = parts.accuracy.env.num_tasks
            divided, few = narration.held_out_told(settings.eval, settings.env, self._prompts_played(), available)
            lines, notes = [*lines, *divided], [*notes, few]
        elif rows := len(parts.held_out):
            is_limited = rows == (settings.eval.limit or settings.env.eval_limit)
            notes.append(narration.few_rows_note(settings.env, rows, is_limited=is_limited))
        if shared := parts.shared:
            notes.append(
                f"{shared} of {counted(len(parts.held_out), 'held-out row')} are trained on too, so a loss called "
                "held-out is not: take them out of one of the two"
            )
        narration.open_screen(run, numbers, lines, notes, f"{settings.model.path} · {data} · {loss}")

    def measure(self, when: str) -> dict[str, float]:
        """Loss per trained token of the held-out rows, and where asked for the accuracy of greedy replies."""
        screen, parts = self.screen, self.parts
        if not screen.is_live:
            screen.line(f"evaluating on {counted(len(parts.held_out), 'held-out row')}, {when} ...")
        screen.phase("evaluating", "the loss")
        rows = [row_of(sample) for sample in parts.held_out]
        read = self.ranks.read_log_probs(
            rows,
            progress=lambda done, total: screen.phase("evaluating", "the loss", done, total),
        )
        losses = [-log_probs.double().sum().item() for log_probs in read]
        counts = [row.num_trained for row in rows]
        metrics = {LOSS: sum(losses) / sum(counts), "eval/tokens": float(sum(counts)), "eval/rows": float(len(rows))}
        if (ends := ratio_interval(losses, counts)) is not None:
            metrics |= {f"{LOSS}_low": ends[0], f"{LOSS}_high": ends[1]}
        return metrics | self._accuracy()

    def _accuracy(self) -> dict[str, float]:
        """That of greedy replies; nothing where it is not measured."""
        if self.parts.accuracy is None:
            return {}
        env, policy, phase = self.parts.accuracy.env, self.parts.accuracy.policy, self.screen.phase
        self.parts.accuracy.updater.push(self.parts.model)
        before = policy.tokens_sampled
        played = play(
            env,
            policy,
            num_prompts=self._prompts_played(),
            samples=1,
            sampling=SamplingSettings(temperature=0.0),
            progress=lambda done, total: phase("evaluating", "replies", done, total, policy.tokens_sampled - before),
        )
        policy.rest()
        return held_out_metrics(played, k=[1], temperature=0.0, some_decide=bool(self.settings.eval.stops))

    def _prompts_played(self) -> int:
        """How many held-out prompts an evaluation plays; 0 where no reply is scored."""
        eval_, accuracy = self.settings.eval, self.parts.accuracy
        return min(eval_.limit or self.settings.env.eval_limit, accuracy.env.num_tasks) if accuracy else 0

    def stream(self) -> Iterator[Sample]:
        """The samples from the saved position on, without end.

        Of many rows, which are encoded here, those that cannot be trained on are skipped, and the next take their
        place. Raises DataError where more than `max_bad_share` of the rows met so far are bad.
        """
        samples, rows = self.parts.samples, self.parts.samples.rows
        if not isinstance(rows, LazySamples):
            yield from samples.iter_from(self.progress.position)
            return
        noted: set[tuple[str, str]] = set()
        for drawn in itertools.count(self._drawn):
            sample, is_news = rows.meet(samples.row_at(drawn), first_pass=drawn < len(rows))
            fault = sample.fault.value if sample.fault else ""
            done = "the rest is trained on" if sample.num_trained else "skipped"
            if is_news and (fault, done) not in noted:  # the end of the run counts them all
                noted.add((fault, done))
                self.screen.note(f"bad row: {sample.where}: {fault}: {sample.reason}: {done}")
            if sample.num_trained:
                yield sample

    @property
    def _drawn(self) -> int:
        """Rows that have been drawn: the samples, and those skipped."""
        rows = self.parts.samples.rows
        return self.progress.position + (rows.skipped if isinstance(rows, LazySamples) else 0)

    def _fingerprint(self) -> str:
        """What the saved position rests on, in words; of many rows the first that were drawn are encoded for it."""
        samples, rows = self.parts.samples, self.parts.samples.rows
        said = samples.fingerprint(self._drawn)
        if not isinstance(rows, LazySamples):
            return said
        return f"{said}, tokens {rows.fingerprint(map(samples.row_at, range(min(self._drawn, FIRST))))}"

    def state(self) -> dict[str, Any]:
        """See `Session.state`."""
        rows = self.parts.samples.rows
        return {"samples": self._fingerprint(), "met": rows.state() if isinstance(rows, LazySamples) else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Session.restore`. Raises DataError where the samples are not those the run began with."""
        rows = self.parts.samples.rows
        if isinstance(rows, LazySamples) and state.get("met"):
            rows.restore(state["met"])
        these = self._fingerprint()
        if state["samples"] != these:
            raise DataError(
                f"--resume: the run has {state['samples']}, and this data gives {these}: resume with the data, the "
                "tokenizer and the env settings it began with; only rows that were not drawn yet may go"
            )

    def keep_batch(self, folder: Path, batch: Iterable[Sample]) -> None:
        """See `Session.keep_batch`: one JSON object a line."""
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"where": s.where, "ids": s.ids, "mask": [int(m) for m in s.mask]} for s in batch]
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def why_nothing(self) -> str:
        """See `Session.why_nothing`."""
        return "no token's loss moves a weight; look at the rows with rlpost data preview"

    def remaining(self) -> str:
        """See `Session.remaining`."""
        return "give more steps or epochs"

    def conclude(self) -> None:
        """See `Session.conclude`."""
        run, screen, progress = self.run, self.screen, self.progress
        narration.say_before_and_after(run, progress)
        if isinstance(rows := self.parts.samples.rows, LazySamples) and rows.met:
            screen.line(f"bad rows met in training: {rows.met:,}, {rows.skipped:,} of all drawn were skipped")
        narration.say_best(run, progress)
        screen.line("talk to it:   " + shlex.join(["rlpost", "chat", str(run.folder)]))
        if (more := self._words_for_rewards()) is not None:
            narration.say_evaluate(run, self.settings, *more)
            narration.say_train_on(run, *more)

    def _words_for_rewards(self) -> list[str] | None:
        """What to add to the run's settings so that replies can be scored; None where the rows have no answers."""
        env = self.settings.env
        if all(not isinstance(each, DatasetSettings) or each.reward for each in environments_of(env)):
            return []
        if not isinstance(env, DatasetSettings):
            return None
        try:
            columns = look_at_rows(replace(env, reward=["exact"]), ["test"], demonstrated=False)
        except RlpostError:
            return None
        return ["env.reward=exact"] if "answer" in (columns or []) else None
