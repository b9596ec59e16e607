"""Settings to the parts of `rlpost train sft`, joined in one visible place."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rlpost.assemble_policy import build_trained_policy
from rlpost.data import row_store
from rlpost.data.demonstrations import BadRows, Sample
from rlpost.data.encoding import Encoder, LazySamples, encode_all
from rlpost.envs.build import build_env
from rlpost.envs.checks import look_at_lengths
from rlpost.envs.dataset_chat import DatasetChatEnv
from rlpost.envs.ordered_rows import OrderedRows
from rlpost.errors import DataError
from rlpost.evaluation.pass_rates import RateFilter, choose_demonstrations
from rlpost.model.load import context_length
from rlpost.model.shards import device_of
from rlpost.model.trainable import Reference, Trainable, load_trainable, starting_tokenizer
from rlpost.objectives.sft_objective import SFTObjective
from rlpost.policies.base import Policy
from rlpost.settings import SamplingSettings, SFTSettings
from rlpost.weight_sync.base import WeightUpdater, default_updater

if TYPE_CHECKING:
    from rlpost.data.row_store import Digests


@dataclass
class AccuracyParts:
    """What answers held-out prompts during fine-tuning."""

    env: DatasetChatEnv
    policy: Policy
    updater: WeightUpdater

    def close(self) -> None:
        """Stop the policy and what the environment holds."""
        self.policy.close()
        self.env.close()


@dataclass
class SFTParts:
    """Everything the fine-tuning loop works with."""

    model_folder: Path
    tokenizer: Any
    model: PreTrainedModel
    reference: Reference | None  # None unless the loss compares with it
    samples: OrderedRows[Sample]
    bad_rows: BadRows  # where `samples` are lazy, the malformed ones: the samples themselves count the others
    bad_held_out: BadRows
    held_out: list[Sample]  # none where evaluation is off
    shared: int  # of them, how many are trained on too
    accuracy: AccuracyParts | None  # None unless eval.accuracy
    notes: list[str]  # what a user should know of the data before training begins
    objective: SFTObjective
    optimizer: torch.optim.Optimizer

    @property
    def device(self) -> torch.device:
        """Where the model is trained."""
        return device_of(self.model)

    def start(self) -> None:
        """Start the policy, where there is one."""
        if self.accuracy:
            self.accuracy.policy.start()

    def close(self) -> None:
        """Close what measures the accuracy, where something does."""
        if self.accuracy:
            self.accuracy.close()


def assemble_sft(settings: SFTSettings, checkpoint: Path | None = None) -> SFTParts:
    """The parts of `rlpost train sft`, with the weights of a checkpoint's folder where one is given.

    The policy, where there is one, is not started yet. Raises DataError where more than
    `max_bad_share` of the rows cannot be trained on.
    """
    env = build_env(settings.env, num_prompts=1, group_size=1, seed=settings.seed)
    eval_env = build_env(settings.env.held_out_for(settings.eval.limit), num_prompts=1, group_size=1, seed=0)
    if settings.eval.accuracy:
        eval_env.start()  # a bad path or row is found here, before a model is loaded
    objective = SFTObjective(settings.loss)
    tokenizer, folder = starting_tokenizer(settings, checkpoint)
    notes: list[str | None] = []
    if settings.eval.accuracy:
        notes.append(look_at_lengths(eval_env, settings.env, tokenizer, context_length(folder)))
    encoder = Encoder(tokenizer, settings.max_tokens)
    samples, bad_rows, told = _read_samples(env, settings, encoder)
    notes.append(told)
    held_out: list[Sample] = []
    bad_held_out, shared = BadRows(), 0
    if settings.eval.enabled:
        shown, most = eval_env.demonstrated(), settings.eval.limit or settings.env.eval_limit
        first = islice(eval_env.demonstrations() if shown is None else shown.in_turn(), most)
        held_out, bad_held_out = encode_all(first, encoder, max_bad_share=settings.max_bad_share)
        if isinstance(samples, LazySamples) and shown is not None:  # those with the same row
            shared = int(np.isin(shown.digests[:most], samples.digests).sum())
        else:
            shared = _shared(samples, held_out)
        if not held_out:
            raise DataError("no rows are held out to measure the loss on: keep some back, or add eval.enabled=false")
    if not samples:
        raise DataError("there are no rows to train on: give some")
    trainable = load_trainable(settings, checkpoint, with_reference=objective.needs_reference)
    return SFTParts(
        model_folder=trainable.folder,
        tokenizer=tokenizer,
        model=trainable.model,
        reference=trainable.reference,
        samples=OrderedRows(
            samples,
            shuffle=env.shuffle,
            seed=env.seed,
            digests=samples.digests if isinstance(samples, LazySamples) else _digests_of(samples),
        ),
        shared=shared,
        bad_rows=bad_rows,
        bad_held_out=bad_held_out,
        held_out=held_out,
        accuracy=build_accuracy(settings, eval_env, tokenizer, trainable) if settings.eval.accuracy else None,
        notes=[told for told in notes if told],
        objective=objective,
        optimizer=trainable.optimizer,
    )


def build_accuracy(settings: SFTSettings, env: DatasetChatEnv, tokenizer: Any, trainable: Trainable) -> AccuracyParts:
    """What samples greedy replies during fine-tuning and scores them."""
    policy = build_trained_policy(settings, tokenizer, trainable, SamplingSettings(temperature=0.0))
    return AccuracyParts(env, policy, default_updater(policy))


def _read_samples(
    env: DatasetChatEnv, settings: SFTSettings, encoder: Encoder
) -> tuple[Sequence[Sample], BadRows, str | None]:
    """What `env` shows, the bad rows among it, and what to say of how rows were chosen.

    Beyond `row_store.ALL_UP_TO` rows are encoded when they are asked for, unless they are chosen by pass rates.
    """
    shown = env.demonstrated() if RateFilter.of(settings.env) is None else None
    if shown is None:
        demonstrations, told = choose_demonstrations(env, settings.env)
        return *encode_all(demonstrations, encoder, max_bad_share=settings.max_bad_share), told
    if len(shown) <= row_store.ALL_UP_TO:
        return *encode_all(shown.in_turn(), encoder, max_bad_share=settings.max_bad_share), None
    lazy = LazySamples(shown, encoder, max_bad_share=settings.max_bad_share)
    return lazy, lazy.malformed, None


def _shared(samples: Sequence[Sample], held_out: Sequence[Sample]) -> int:
    trained = {tuple(sample.ids) for sample in samples} if held_out else set()
    return sum(tuple(sample.ids) in trained for sample in held_out)


def _digests_of(samples: Sequence[Sample]) -> Digests:
    """One number a sample: of its ids, and of which are trained."""
    digests = (hashlib.blake2b(repr((each.ids, each.mask)).encode(), digest_size=8).digest() for each in samples)
    return np.frombuffer(b"".join(digests), np.uint64)
