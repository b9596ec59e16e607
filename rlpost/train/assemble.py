"""Settings become the parts of a training, or of an evaluation, joined in one visible place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
import yaml
from transformers import PreTrainedModel

from rlpost.catalog import row_of
from rlpost.collectors.llm import LLMCollector
from rlpost.data import rows
from rlpost.data.demonstrations import BadRows, Sample
from rlpost.data.encoding import Encoder, LazySamples, encode_all
from rlpost.data.replay_buffer import ReplayBuffer
from rlpost.data.template_choice import thinking_cut_short
from rlpost.envs.build import build_env, build_training_env, longest_conversation, longest_sampled
from rlpost.envs.chat import DatasetChatEnv, OrderedRows
from rlpost.envs.checks import check_rewards, check_template, look_at_lengths
from rlpost.errors import ConfigError, DataError
from rlpost.estimate.machine import chosen_policy
from rlpost.evaluation.pass_rates import RateFilter, choose_by_pass_rate, choose_demonstrations
from rlpost.evaluation.play import Evaluation, play, summarise
from rlpost.model.device import pick_device
from rlpost.model.load import context_length, load_tokenizer, locate_model
from rlpost.model.precision import Numbers, choose_numbers
from rlpost.model.trainable import Reference, Trainable, load_trainable, starting_tokenizer
from rlpost.model.weights import device_of
from rlpost.objectives.advantage import has_spread
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.objectives.supervised import SFTObjective
from rlpost.output import output_aside
from rlpost.policies.base import Policy, evaluation_sampling, training_sampling
from rlpost.runs.checkpoint import kept_numbers
from rlpost.settings import (
    EnvSettings,
    EvalSettings,
    ExpertIterationSettings,
    GRPOSettings,
    ModelPolicySettings,
    ModelSettings,
    NoTrackingSettings,
    PolicySettings,
    SamplingSettings,
    SFTSettings,
    TrackingSettings,
    VLLMSettings,
)
from rlpost.settings.commands import RunRequest, SampledSettings, samples_per_prompt
from rlpost.train.update import Objective
from rlpost.weight_sync.base import WeightUpdater, default_updater

if TYPE_CHECKING:
    from rlpost.collectors.driver import GroupDriver
    from rlpost.data.rows import Digests
    from rlpost.tracking.trackers import TrackerProcess


S = TypeVar("S", bound=SampledSettings | SFTSettings | EvalSettings)
O = TypeVar("O", bound=Objective[Any])  # noqa: E741


@dataclass
class SamplingParts(Generic[O]):
    """What every loop works with that learns from what its own policy samples."""

    objective: O
    model_folder: Path
    tokenizer: Any
    model: PreTrainedModel
    reference: Reference | None  # None where the loss compares with none
    policy: Policy
    env: DatasetChatEnv
    eval_env: DatasetChatEnv
    collector: LLMCollector | GroupDriver
    buffer: ReplayBuffer
    optimizer: torch.optim.Optimizer
    notes: list[str]  # what a user should know of the data before training begins

    @property
    def device(self) -> torch.device:
        """Where the model is trained."""
        return device_of(self.model)

    def start(self) -> None:
        """Start the policy."""
        self.policy.start()

    def close(self) -> None:
        """Stop the policy and what the environments hold, such as tools."""
        self.policy.close()
        self.env.close()
        self.eval_env.close()


GRPOParts = SamplingParts[PolicyObjective]
ExpertIterationParts = SamplingParts[SFTObjective]


def assemble_grpo(settings: GRPOSettings, checkpoint: Path | None = None) -> GRPOParts:
    """The parts of `rlpost train grpo`, with the weights of a checkpoint's folder where one is given.

    The policy is not started yet.
    """
    objective = PolicyObjective(
        settings.corrected_loss,
        temperature=training_sampling(settings).temperature,
        max_completion_tokens=longest_sampled(settings.env),
    )
    dynamic = settings.dynamic
    return assemble_sampling(
        settings,
        checkpoint,
        objective,
        accept=has_spread if dynamic.enabled else None,
        draw_limit=dynamic.draw_limit,
    )


def assemble_expert_iteration(
    settings: ExpertIterationSettings, checkpoint: Path | None = None
) -> ExpertIterationParts:
    """The parts of `rlpost train expert-iteration`; see `assemble_grpo`."""
    return assemble_sampling(settings, checkpoint, SFTObjective(settings.loss))


def assemble_sampling(
    settings: SampledSettings,
    checkpoint: Path | None,
    objective: O,
    **options: Any,
) -> SamplingParts[O]:
    """The parts of any loop that samples, to minimise `objective`; `options` are the replay buffer's.

    The policy is not started yet.
    """
    buffer = ReplayBuffer(group_size=settings.group_size, oldest_first=settings.samples_elsewhere, **options)
    env = build_training_env(settings)
    check_rewards(env)
    held_out = settings.env.held_out_for(settings.eval.limit)
    eval_env = build_env(held_out, num_prompts=1, group_size=1, seed=0, tools=settings.tools)
    with ExitStack() as opened:  # what has been started does not outlive what fails behind it
        for each in (env, eval_env) if settings.eval.enabled else (env,):
            opened.callback(each.close)
            each.start()  # a bad path or row is found here, before a model is loaded
        tokenizer, folder = starting_tokenizer(settings, checkpoint)
        check_template(env, tokenizer)
        context = context_length(folder)
        looked_at = (env, eval_env) if settings.eval.enabled else (env,)
        told = [choose_by_pass_rate(env, settings.env)]
        told += [look_at_lengths(each, settings.env, tokenizer, context) for each in looked_at]
        trainable = load_trainable(settings, checkpoint, with_reference=settings.needs_reference)
        policy, collector = _build_collector(settings, env, tokenizer, trainable, buffer)
        opened.pop_all()
        return SamplingParts(
            objective=objective,
            model_folder=trainable.folder,
            tokenizer=tokenizer,
            model=trainable.model,
            reference=trainable.reference,
            policy=policy,
            env=env,
            eval_env=eval_env,
            collector=collector,
            buffer=buffer,
            optimizer=trainable.optimizer,
            notes=[line for line in told if line],
        )


def _build_collector(
    settings: SampledSettings, env: DatasetChatEnv, tokenizer: Any, trainable: Trainable, buffer: ReplayBuffer
) -> tuple[Policy, LLMCollector | GroupDriver]:
    """What samples, and what fills `buffer` with it: in turn with training, or beside it in a process of its own."""
    if settings.samples_elsewhere:
        from rlpost.train.assemble_players import assemble_driver

        driver = assemble_driver(settings, env, tokenizer, trainable, buffer)
        return driver.policy, driver
    policy = build_trained_policy(settings, tokenizer, trainable, training_sampling(settings))
    return policy, LLMCollector(
        env,
        policy=policy,
        dialog_turns_per_batch=settings.prompts_per_step * settings.group_size,
        yield_only_last_steps=True,
        replay_buffer=buffer,
        begin_ahead=bool(settings.max_policy_lag),
    )


def build_trained_policy(
    settings: SampledSettings | SFTSettings,
    tokenizer: Any,
    trainable: Trainable,
    sampling: SamplingSettings,
) -> Policy:
    """What samples from the model that is trained."""
    return build_policy(
        settings.policy,
        trainable.folder,
        tokenizer,
        model=trainable.model,
        model_settings=settings.model,
        env_settings=settings.env,
        sampling=sampling,
        seed=settings.seed,
        adapter_rank=trainable.adapter_rank,
        adapter=trainable.adapter,
    )


def build_policy(
    settings: PolicySettings,
    folder: Path,
    tokenizer: Any,
    *,
    model: PreTrainedModel | None,
    model_settings: ModelSettings,
    env_settings: EnvSettings,
    sampling: SamplingSettings,
    seed: int,
    adapter_rank: int | None = None,
    adapter: Path | None = None,
) -> Policy:
    """The policy that `settings` asks for; `model` is the trainer's, which transformers samples from.

    With an `adapter_rank` vLLM keeps the weights of `folder` and takes pushes of an adapter beside them,
    the one of the folder `adapter` to begin with.
    """
    settings = chosen_policy(settings)
    asked = longest_conversation(env_settings)
    longest = min(asked, context_length(folder) or asked)
    if adapter_rank is not None and not isinstance(settings, VLLMSettings):
        raise ConfigError("lora.push=adapter is a way into vLLM, which is not installed: install it, or leave it out")
    policy: Policy = row_of("policy", type(settings)).build(
        settings,
        folder,
        tokenizer,
        model=model,
        model_settings=model_settings,
        sampling=sampling,
        seed=seed,
        **({} if adapter_rank is None else {"adapter_rank": adapter_rank, "adapter": adapter}),
    )
    policy.max_model_len = longest  # so that a conversation has the same room whatever samples it
    return policy


def resolve_numbers(settings: S, checkpoint: Path | None = None) -> tuple[S, Numbers]:
    """`settings` with no `auto` left in model.autocast and policy.dtype, and why they are what they are; the lag too.

    Every command calls this once, before it assembles anything. A run keeps the formats that its
    `checkpoint` was trained in.
    """
    policy = chosen_policy(settings.policy)
    numbers = choose_numbers(
        settings.model,
        policy,
        pick_device(settings.model.device),
        kept=kept_numbers(checkpoint) if checkpoint is not None else None,
        trains=not isinstance(settings, EvalSettings),
        samples=settings.uses_policy and isinstance(policy, ModelPolicySettings),
    )
    if isinstance(settings, SampledSettings):
        settings = replace(settings, max_policy_lag=settings.lag)
    if isinstance(policy, VLLMSettings):
        settings = replace(settings, policy=replace(policy, dtype=numbers.sampler))
    return replace(settings, model=replace(settings.model, autocast=numbers.autocast)), numbers


def build_tracker(settings: TrackingSettings, request: RunRequest) -> TrackerProcess | None:
    """What follows the run beside its own metrics.jsonl, not started yet; None for nothing.

    Raises MissingExtraError where the tracker is not installed.
    """
    if isinstance(settings, NoTrackingSettings):
        return None
    from rlpost.tracking.trackers import TrackerProcess, chosen_tracker

    choice = chosen_tracker(settings)
    return None if choice is None else TrackerProcess(choice, request.folder, yaml.safe_load(request.config_yaml))


def evaluate_command(
    settings: EvalSettings,
    progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
    tell: Callable[[Numbers], None] = lambda numbers: None,
    note: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """`rlpost eval`: every task of the split, or the first `env.limit`, each `eval.samples` times.

    `progress` is told the completions done, their total and the tokens sampled, `tell` the formats before
    anything is loaded, `note` what else should be known before. What engines write while they load is seen
    only where loading fails.
    """
    samples = samples_per_prompt(settings.eval.k, settings.eval.samples)
    sampling = evaluation_sampling(settings.sampling, samples)
    if sampling.temperature == 0 and sampling.filters:
        unused = " and ".join(f"sampling.{key}" for key in sampling.filters)
        note(f"a greedy completion has no use for {unused}: add sampling.temperature=1 to draw")
    # the same prompts whatever the seed
    env = build_env(settings.env, num_prompts=1, group_size=1, seed=0, tools=settings.tools)
    with ExitStack() as opened:
        opened.callback(env.close)
        env.start()  # a bad path or row is found here, before a model is loaded
        settings, numbers = resolve_numbers(settings)
        tell(numbers)
        with output_aside():
            folder = locate_model(settings.model.path, settings.model.revision)
            tokenizer = load_tokenizer(folder, settings.model)
            check_template(env, tokenizer)
            told = [choose_by_pass_rate(env, settings.env)]
            told.append(look_at_lengths(env, settings.env, tokenizer, context_length(folder)))
            policy = build_policy(
                settings.policy,
                folder,
                tokenizer,
                model=None,
                model_settings=settings.model,
                env_settings=settings.env,
                sampling=sampling,
                seed=settings.seed,
            )
            opened.callback(policy.close)
            policy.start()
        for line in filter(None, told):
            note(line)
        longest = settings.env.max_completion_tokens
        if cut_short := thinking_cut_short(tokenizer, longest, "env.max_completion_tokens"):
            note(cut_short)

        def tell_progress(done: int, total: int) -> None:
            progress(done, total, policy.tokens_sampled)

        played = play(
            env, policy, num_prompts=env.num_tasks, samples=samples, sampling=sampling, progress=tell_progress
        )
    return Evaluation(summarise(played, k=settings.eval.k, temperature=sampling.temperature), played, numbers.record())


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

    Beyond `rows.ALL_UP_TO` rows are encoded when they are asked for, unless they are chosen by pass rates.
    """
    shown = env.demonstrated() if RateFilter.of(settings.env) is None else None
    if shown is None:
        demonstrations, told = choose_demonstrations(env, settings.env)
        return *encode_all(demonstrations, encoder, max_bad_share=settings.max_bad_share), told
    if len(shown) <= rows.ALL_UP_TO:
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
