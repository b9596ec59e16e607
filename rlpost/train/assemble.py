"""Settings become the parts of a training, or of an evaluation, joined in one visible place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.collectors.sync import SyncCollector
from rlpost.data.replay_buffer import GroupBuffer
from rlpost.data.template_choice import thinking_cut_short
from rlpost.envs.build import build_env
from rlpost.envs.checks import check_rewards, check_template, look_at_lengths
from rlpost.estimate.shape import shape_of_model
from rlpost.evaluation.pass_rates import choose_by_pass_rate
from rlpost.model.load import context_length
from rlpost.model.locate import locate_model
from rlpost.model.precision import this_device
from rlpost.model.tokenizer import load_tokenizer
from rlpost.model.trainable import load_trainable, starting_tokenizer
from rlpost.objectives.advantage import has_spread
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.output import output_aside
from rlpost.policies.base import Policy
from rlpost.policies.build import build_policy
from rlpost.policies.drawing import evaluation_sampling, training_sampling
from rlpost.record import Fact
from rlpost.settings import EnvSettings, EvalSettings, GRPOSettings, PolicyLossSettings, TrainSamplingSettings
from rlpost.settings.commands import SampledSettings, samples_per_prompt
from rlpost.train.facts import precision_fact
from rlpost.train.parts import ObjectiveT
from rlpost.train.resolve import kept_of, resolve
from rlpost.train.sampling import SamplingParts

if TYPE_CHECKING:
    from rlpost.collectors.driver import GroupDriver
    from rlpost.envs.chat import DatasetChatEnv
    from rlpost.evaluation.play import Evaluation


GRPOParts = SamplingParts[PolicyObjective]


def assemble_grpo(settings: GRPOSettings, checkpoint: Path | None = None) -> GRPOParts:
    """The parts of `rlpost train grpo`, with the weights of a checkpoint's folder where one is given.

    The policy is not started yet.
    """
    dynamic, difficulty = settings.dynamic, settings.difficulty
    parts = assemble_sampling(
        settings,
        checkpoint,
        policy_objective(settings.loss, settings.sampling, settings.env),
        accept=has_spread if dynamic.enabled else None,
        draw_limit=dynamic.draw_limit,
    )
    if difficulty.enabled:
        parts.env.weigh_by_difficulty(difficulty.least_weight)
    return parts


def policy_objective(loss: PolicyLossSettings, sampling: TrainSamplingSettings, env: EnvSettings) -> PolicyObjective:
    """The loss that `rlpost train grpo` minimises."""
    temperature = training_sampling(sampling, env).temperature
    return PolicyObjective(loss, temperature=temperature, max_completion_tokens=env.longest_sampled)


def env_maker(settings: SampledSettings) -> Callable[[], DatasetChatEnv]:
    """A function that builds the environment of a training that samples; it can be pickled."""
    return partial(
        build_env,
        settings.env,
        num_prompts=settings.prompts_per_step,
        group_size=settings.group_size,
        seed=settings.seed,
        tools=settings.tools,
        hint=settings.reference_hint,
    )


def assemble_sampling(
    settings: SampledSettings,
    checkpoint: Path | None,
    objective: ObjectiveT,
    **options: Any,
) -> SamplingParts[ObjectiveT]:
    """The parts of any loop that samples, to minimise `objective`; `options` are the replay buffer's.

    The policy is not started yet.
    """
    elsewhere = settings.elsewhere != ""
    make_env = env_maker(settings)
    env = make_env()
    buffer = GroupBuffer(settings.group_size, env.build_batch, oldest_first=elsewhere, **options)
    check_rewards(env)
    if elsewhere:
        for part in env.parts:
            part.check_halves()
    held_out = settings.env.held_out_for(settings.eval.limit)
    eval_env = build_env(held_out, tools=settings.tools)
    with ExitStack() as opened:  # close the environments if loading fails
        for each in (env, eval_env) if settings.eval.enabled else (env,):
            opened.callback(each.close)
            each.start()  # a bad path or row is found here, before a model is loaded
        data = {"train": env.content(), **({"held out": eval_env.content()} if settings.eval.enabled else {})}
        tokenizer, folder = starting_tokenizer(settings.model, settings.lora.path, checkpoint)
        looked_at = (env, eval_env) if settings.eval.enabled else (env,)
        notes: list[str | None] = [part.not_used for part in env.parts]
        notes += [note for each in looked_at for note in check_template(each, tokenizer)]
        context = context_length(folder)
        notes.append(choose_by_pass_rate(env, settings.env))
        notes += [look_at_lengths(each, settings.env, tokenizer, context) for each in looked_at]
        trainable = load_trainable(settings, checkpoint)
        make_policy = partial(
            build_policy,
            tokenizer=tokenizer,
            model_settings=settings.model,
            env_settings=settings.env,
            sampling=training_sampling(settings.sampling, settings.env),
            seed=settings.seed,
            adapter_rank=trainable.adapter_rank,
            adapter=trainable.adapter,
        )
        collector: SyncCollector | GroupDriver
        if elsewhere:
            from rlpost.train.assemble_players import PlayerOrder, assemble_driver

            order = PlayerOrder(settings.plugin, make_env, make_policy, trainable.folder, tokenizer)
            collector = assemble_driver(settings, order, env, trainable, buffer)
            policy: Policy = collector.policy
        else:
            policy = make_policy(settings.policy, trainable.folder, model=trainable.model)
            rows = settings.prompts_per_step * settings.group_size
            collector = SyncCollector(env, policy, buffer, rows_per_round=rows, max_policy_lag=settings.max_policy_lag)
        opened.callback(policy.close)
        return SamplingParts(
            settings=settings,
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
            notes=list(dict.fromkeys(line for line in notes if line)),
            data=data,
            opened=opened.pop_all(),
        )


def evaluate_command(
    settings: EvalSettings,
    progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
    tell: Callable[[Fact], None] = lambda precision: None,
    note: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """`rlpost eval`: every task of the split, or the first `env.limit`, each `eval.samples` times.

    `progress` gets the completions done, their total and the tokens sampled, `tell` the formats before
    anything is loaded, `note` what else should be known before. What engines write while they load is seen
    only where loading fails.
    """
    from rlpost.evaluation.play import Evaluation, play, summarise

    samples = samples_per_prompt(settings.eval.k, settings.eval.samples)
    sampling = evaluation_sampling(settings.sampling, samples)
    if sampling.temperature == 0 and sampling.filters:
        unused = " and ".join(f"sampling.{key}" for key in sampling.filters)
        note(f"a greedy completion has no use for {unused}: add sampling.temperature=1 to draw")
    # the same prompts whatever the seed
    env = build_env(settings.env, tools=settings.tools)
    with ExitStack() as opened:
        opened.callback(env.close)
        env.start()  # a bad path or row is found here, before a model is loaded
        model = settings.model
        shape = shape_of_model(model.path, model.revision)
        settings, changes = resolve(settings, this_device(model.device), shape)
        tell(precision_fact(settings.model, settings.policy, changes, trains=False))
        with output_aside():
            folder = locate_model(settings.model.path, settings.model.revision)
            tokenizer = load_tokenizer(folder, settings.model)
            notes: list[str | None] = [*check_template(env, tokenizer), choose_by_pass_rate(env, settings.env)]
            notes.append(look_at_lengths(env, settings.env, tokenizer, context_length(folder)))
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
        for line in [*filter(None, notes), *(each for part in env.parts for each in part.notes)]:
            note(line)
        longest = settings.env.max_completion_tokens
        if cut_short := thinking_cut_short(tokenizer, longest, "env.max_completion_tokens"):
            note(cut_short)

        def tell_progress(done: int, total: int) -> None:
            progress(done, total, policy.tokens_sampled)

        played = play(
            env, policy, num_prompts=env.num_tasks, samples=samples, sampling=sampling, progress=tell_progress
        )
    found = summarise(played, k=settings.eval.k, temperature=sampling.temperature)
    return Evaluation(found, played, kept_of(settings.model, settings.policy, changes))
