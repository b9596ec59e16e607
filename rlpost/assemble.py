"""Settings become components here; `assemble_sft.py` has those that fine-tuning alone needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import yaml
from transformers import PreTrainedModel

from rlpost.assemble_policy import build_policy, build_trained_policy
from rlpost.collectors.llm import LLMCollector
from rlpost.data.replay_buffer import ReplayBuffer
from rlpost.data.template_choice import thinking_cut_short
from rlpost.envs.build import build_env, build_training_env, longest_sampled
from rlpost.envs.checks import check_rewards, check_template, look_at_lengths
from rlpost.envs.dataset_chat import DatasetChatEnv
from rlpost.estimate.machine import chosen_policy
from rlpost.evaluation.pass_rates import choose_by_pass_rate
from rlpost.evaluation.play import Evaluation, play, summarise
from rlpost.model.load import context_length, load_tokenizer, locate_model, pick_device
from rlpost.model.precision import Numbers, choose_numbers
from rlpost.model.shards import device_of
from rlpost.model.trainable import Reference, Trainable, load_trainable, starting_tokenizer
from rlpost.objectives.advantage import has_spread
from rlpost.objectives.policy_objective import PolicyObjective
from rlpost.output import output_aside
from rlpost.policies.base import Policy
from rlpost.policies.sampling import evaluation_sampling, training_sampling
from rlpost.runs.checkpoint import kept_numbers
from rlpost.settings import (
    EvalSettings,
    ExpertIterationSettings,
    GRPOSettings,
    NoTrackingSettings,
    ScriptedSettings,
    SFTSettings,
    TrackingSettings,
    VLLMSettings,
)
from rlpost.settings.commands import SampledSettings
from rlpost.settings.evaluation import samples_per_prompt
from rlpost.settings.run import RunRequest

if TYPE_CHECKING:
    from rlpost.collectors.driver import GroupDriver
    from rlpost.objectives.sft_objective import SFTObjective
    from rlpost.tracking.process import TrackerProcess

S = TypeVar("S", bound=GRPOSettings | SFTSettings | ExpertIterationSettings | EvalSettings)


@dataclass
class SamplingParts:
    """What every loop works with that learns from what its own policy samples."""

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


@dataclass
class GRPOParts(SamplingParts):
    """Everything the GRPO loop works with."""

    objective: PolicyObjective


@dataclass
class ExpertIterationParts(SamplingParts):
    """Everything the loop of expert iteration works with."""

    objective: SFTObjective


def assemble_grpo(settings: GRPOSettings, checkpoint: Path | None = None) -> GRPOParts:
    """The parts of `rlpost train grpo`, with the weights of a checkpoint's folder where one is given.

    The policy is not started yet.
    """
    objective = PolicyObjective(
        settings.corrected_loss,
        temperature=training_sampling(settings).temperature,
        max_completion_tokens=longest_sampled(settings.env),
    )
    buffer = ReplayBuffer(
        group_size=settings.group_size,
        accept=has_spread if settings.dynamic.enabled else None,
        oldest_first=settings.samples_elsewhere,
        draw_limit=settings.dynamic.draw_limit,
    )
    with_reference = settings.loss.kl_coef > 0
    parts = assemble_sampling(settings, checkpoint, buffer, with_reference=with_reference)
    return GRPOParts(**vars(parts), objective=objective)


def assemble_expert_iteration(
    settings: ExpertIterationSettings, checkpoint: Path | None = None
) -> ExpertIterationParts:
    """The parts of `rlpost train expert-iteration`; see `assemble_grpo`."""
    from rlpost.objectives.sft_objective import SFTObjective

    objective = SFTObjective(settings.loss)
    buffer = ReplayBuffer(group_size=settings.group_size, oldest_first=settings.samples_elsewhere)
    parts = assemble_sampling(settings, checkpoint, buffer, with_reference=objective.needs_reference)
    return ExpertIterationParts(**vars(parts), objective=objective)


def assemble_sampling(
    settings: SampledSettings,
    checkpoint: Path | None,
    buffer: ReplayBuffer,
    *,
    with_reference: bool,
) -> SamplingParts:
    """What every loop needs that samples: see `SamplingParts`. The policy is not started yet."""
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
        trainable = load_trainable(settings, checkpoint, with_reference=with_reference)
        policy, collector = _build_collector(settings, env, tokenizer, trainable, buffer)
        opened.pop_all()
        return SamplingParts(
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
        from rlpost.assemble_async import assemble_driver

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
        samples=settings.uses_policy and not isinstance(policy, ScriptedSettings),
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
    from rlpost.tracking.choice import chosen_tracker
    from rlpost.tracking.process import TrackerProcess

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
