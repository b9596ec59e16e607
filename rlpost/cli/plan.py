"""The plan that `--dry-run` prints, and every check that loads nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.catalog import Command, S
from rlpost.cli.run_folder import environment_of_runs, point_of, slug
from rlpost.cli.terminal import stdout_on_stderr
from rlpost.errors import ConfigError, DataError
from rlpost.imports import require_bitsandbytes, require_peft, require_vllm
from rlpost.runs.reader import read_run
from rlpost.settings import DatasetSettings, DType, EnvSettings, FineTuningSettings, MixSettings, VLLMSettings
from rlpost.settings.base import opened
from rlpost.settings.commands import samples_per_prompt
from rlpost.text import counted, printable

if TYPE_CHECKING:
    from rlpost.config.compose import Composed
    from rlpost.config.overrides import Override
    from rlpost.envs.row_checks import Look
    from rlpost.rewards.functions import Rewards


def plan_dict(composed: Composed[Any], folder: Path, resume: str | None) -> dict[str, Any]:
    """The plan of a training, for `--dry-run --json`."""
    return {
        "command": composed.command.verb,
        "folder": str(folder),
        "resume": resume,
        "choices": composed.choices,
        "overrides": composed.overrides,
        "settings": composed.as_dict(),
        "chosen": composed.chosen,
        **_needs_dict(composed.settings, folder),
        "notes": [*composed.not_used, *_notes(composed)],
    }


def plan_lines(composed: Composed[Any], folder: Path, resume: str | None) -> list[str]:
    """The plan of a training, as `--dry-run` prints it."""
    model = composed.settings.model
    data, *others = opened(composed.command.plan)(composed)
    lines = [
        f"model   {model_name(composed)} ({model.path}), {model.dtype.value} weights, device {model.device}",
        f"precision {_precision(composed, going_on=resume is not None)}",
        *composed.settings.cluster.rank_lines(composed.settings.cluster.trainer_ranks or 1),
        data,
        *_rows(composed),
        *others,
        *_learning(composed),
        f"eval    {_evaluation(composed)}",
        *(f"chosen  {each}" for each in composed.chosen),
        f"writes  {folder}" + (f", {point_of(folder, resume)}" if resume is not None else ""),
        *_needs_lines(composed.settings, folder),
    ]
    lines += [f"note    {note}" for note in [*composed.not_used, *_notes(composed)]]
    return [printable(line) for line in lines]


def sampling_lines(composed: Composed[Any]) -> list[str]:
    """The plan's lines on sampling groups of completions."""
    settings = composed.settings
    completions = settings.prompts_per_step * settings.group_size
    return [
        *data_lines(composed),
        _policy(composed),
        *_one_of_several_gpus(settings),
        f"step    {settings.prompts_per_step} prompts x {settings.group_size} completions = {completions}, "
        f"at most {settings.env.max_completion_tokens} tokens each",
        *settings.tools.lines(settings.env),
        *settings.lag_lines(),
        *settings.learning_lines(),
        f"steps   {settings.steps}, seed {settings.seed}",
    ]


def _policy(composed: Composed[Any]) -> str:
    from rlpost.policies.drawing import training_sampling

    beside = ", beside training" if composed.choices["collector"] == "async" else ""
    sampling = training_sampling(composed.settings.sampling, composed.settings.env)
    return f"policy  {composed.choices['policy']}{beside}, {sampling}"


def _one_of_several_gpus(settings: Any) -> list[str]:
    """A hint if several GPUs train and only one of them samples."""
    ranks = settings.cluster.trainer_ranks or 1
    if ranks == 1 or settings.samples_elsewhere or _gpu(settings) is None:
        return []
    gpus = ",".join(map(str, range(ranks)))
    return [
        "samples on the GPU of rank 0 alone; on all: collector=async collector.players="
        f"{ranks} collector.gpus=[{gpus}] max_policy_lag=0 policy.sleep=true"
    ]


def tuning_lines(composed: Composed[FineTuningSettings]) -> list[str]:
    """The plan's lines on training on rows."""
    settings = composed.settings
    rows, unit = ("pairs", "pair") if settings.learns_from_pairs else ("demonstrations", "sample")
    length = f"steps   {settings.steps}" if settings.steps else f"epochs  {settings.epochs or 1}"
    return [
        *data_lines(composed, f", {rows} of at most {settings.max_tokens} tokens"),
        f"step    {counted(settings.minibatch_size, unit)}" + ("" if settings.packing else ", one a forward"),
        f"{length}, seed {settings.seed}",
    ]


def _learning(composed: Composed[Any]) -> list[str]:
    """The loss and its baseline, the learning rate, and the adapter if one is trained."""
    settings, loss = composed.settings, composed.choices["loss"]
    if any(key.name == "advantage.estimator" for key in composed.keys):
        loss += f", advantage.estimator={settings.advantage.estimator}"
    if coef := getattr(settings.loss, "kl_coef", 0.0):
        loss += f", KL penalty {coef:g}"
    optim, lora = settings.optim, settings.lora
    rate = f"{optim.lr or 'by the size of the model'}, {optim.schedule.value}"
    if optim.warmup_steps:
        rate += f" after {counted(optim.warmup_steps, 'step')} of warm-up"
    adapter = [f"lora    rank {lora.rank}, alpha {lora.alpha}"] if lora.enabled else []
    return [*adapter, f"loss    {loss}", f"lr      {rate}"]


def _evaluation(composed: Composed[Any]) -> str:
    """The measures on held-out prompts or rows, and when they are taken."""
    settings, known = composed.settings, _held_out(composed)
    held_out = settings.eval
    if not held_out.enabled:
        return "none, by eval.enabled=false"
    size = known if known is not None else held_out.limit or settings.env.eval_limit
    up_to = "" if known is not None else "up to "
    if settings.learns_from_own:
        samples = samples_per_prompt(held_out.k, held_out.samples)
        how = "greedy" if samples == 1 else f"{samples} completions each, k={held_out.k}"
        what = f"{up_to}{counted(size, 'held-out prompt')}, {how}"
    else:
        accuracy = " and accuracy of greedy replies" if held_out.accuracy else ""
        figures = "loss, margin and accuracy" if settings.learns_from_pairs else "loss"
        what = f"{figures} on {up_to}{counted(size, 'held-out row')}{accuracy}"
    often = f", and every {counted(held_out.every, 'step')}" if held_out.every else ""
    return f"{what}; before and after training{often}"


def _precision(composed: Composed[Any], *, going_on: bool) -> str:
    """The precisions, as far as they are known before torch is imported."""
    model, policy = composed.settings.model, composed.settings.policy
    sampler = policy.dtype if policy.needs_vllm else DType.auto
    dtypes = {"model.autocast": model.autocast.value, "policy.dtype": sampler.value}
    fixed = [f"{key}={value}" for key, value in dtypes.items() if value != "auto"]
    kept = ", or as the run began" if going_on else ""
    return ", ".join(fixed) if fixed else f"auto: float32 or bfloat16, chosen at the start{kept}"


def stem_of(composed: Composed[Any]) -> str:
    """The default name of a run, without its number."""
    return f"{composed.command.name}-{composed.choices['env']}-{model_name(composed)}"


def model_name(composed: Composed[Any]) -> str:
    """The chosen option, or the end of a path that replaced it."""
    if any(word.startswith("model.path=") for word in composed.overrides):
        return slug(composed.settings.model.path)
    return composed.choices["model"]


def data_lines(composed: Composed[Any], more: str = "", label: str = "data") -> list[str]:
    """The environment and its rows, and each source of a mix on its own line; `more` goes behind the first line."""
    env = composed.settings.env
    path = getattr(env, "path", None)
    of_rows = f" from {path}" if isinstance(path, str) else ""
    lines = [f"{label:<7} {composed.choices['env']}{of_rows}, {env.split} split{more}{_rewards_of(env)}"]
    if isinstance(env, MixSettings):
        from rlpost.config.compose import sources_of

        sources = sources_of(env)
        whole = sum(source.weight for source in sources)
        for source in sources:
            own = source.settings
            lines.append(
                f"source  {source.name}, {source.weight / whole:.1%} of the prompts: {source.text}{_rewards_of(own)}, "
                f"at most {own.max_completion_tokens} tokens each"
            )
    return lines


def _rewards_of(env: EnvSettings) -> str:
    return f", reward {' + '.join(env.reward)}" if isinstance(env, DatasetSettings) and env.reward else ""


def _needs_lines(settings: Any, folder: Path) -> list[str]:
    """Downloads, and whether memory and disk suffice, by estimate."""
    from rlpost.config.paths import GGUF, resolve_model_path
    from rlpost.estimate.shape import fetches

    lines = [fetch.line() for fetch in fetches(settings.model, getattr(settings, "reference_path", None), settings.env)]
    needs = _needs(settings, folder)
    if needs is None:
        path = settings.model.path
        converts = resolve_model_path(path).endswith(GGUF)
        until = f"{path} is converted" if converts else f"the configuration of {path} is downloaded"
        return [*lines, f"memory  unknown until {until}"]
    reason = needs.impossible()
    return [*lines, *needs.lines(), *([f"fits    no: {reason}"] if reason else [])]


def _needs_dict(settings: Any, folder: Path) -> dict[str, Any]:
    """Downloads and the estimate, for `--json`."""
    from rlpost.estimate.shape import fetches

    needs = _needs(settings, folder)
    found = [
        {"id": fetch.id, "bytes": fetch.bytes, "cached": str(fetch.cached) if fetch.cached else None}
        for fetch in fetches(settings.model, getattr(settings, "reference_path", None), settings.env)
    ]
    return {"fetches": found, "estimate": needs.as_dict() if needs is not None else None}


def _needs(settings: Any, folder: Path) -> Any:
    from rlpost.estimate.needs import Machine, needs_of
    from rlpost.estimate.shape import shape_of_model

    shape = shape_of_model(settings.model.path, settings.model.revision)
    return None if shape is None else needs_of(settings, shape, Machine.here(folder, _gpu(settings)))


def _gpu(settings: Any) -> Any:
    """The room of the GPU that a training would take; None without one."""
    from rlpost.estimate.machine import gpu_memory

    device = settings.model.device
    return gpu_memory() if device == "auto" or device.startswith("cuda") else None


MOST_BAD = 0.999  # share of bad rows beyond which there is nothing to evaluate
_checked: list[Rewards | None] = []  # their processes stay warm for the environments that this command makes


def compose_and_check(
    command: Command[S],
    words: Sequence[str],
    kept: Sequence[Override] | None = None,
    *,
    as_json: bool,
    run: Path | None = None,
    typed: Sequence[str] = (),
) -> Composed[S]:
    """The configuration, its files of rewards imported, its engine and tracker looked for, open values chosen.

    `kept` are the overrides of the resumed `run`; the values that were chosen for it are kept too. Without them the
    environment may be that of another run, see `environment_of_runs`; `typed` is the command line for its errors.
    What the user's files print while they are imported goes to stderr where stdout is for JSON.
    Raises what `compose` raises, and MissingExtraError for what is not installed.
    """
    from rlpost.config.compose import compose, environments_of
    from rlpost.data.template_choice import named_template
    from rlpost.estimate.machine import check_device, chosen_policy
    from rlpost.rewards.functions import load_rewards
    from rlpost.tracking.trackers import chosen_tracker

    with stdout_on_stderr() if as_json else nullcontext():
        from_runs = environment_of_runs(command, words, typed or ["rlpost", *command.verb.split(), *words])
        composed = compose(command, from_runs.words, from_runs.kept if kept is None else kept)
        settings: Any = composed.settings
        env = settings.env
        if "env.reward" not in command.optional or getattr(env, "reward", None):
            _checked[:] = [load_rewards(each) for each in environments_of(env)]
            looks, unused = _look_at_rows(settings, _checked)
        else:
            looks, unused = _look_at_rows(settings, [])
    check_device(settings.model.device, chosen_policy(settings.policy) if settings.uses_policy else None)
    if settings.model.chat_template is not None:
        named_template(settings.model.chat_template)
    if run is None:  # a run that goes on has its tokenizer in its checkpoint
        _check_model(settings)
    if settings.uses_policy and settings.policy.needs_vllm:
        require_vllm()
    if settings.trains:
        chosen_tracker(settings.tracking)
        if settings.lora.enabled:
            require_peft("lora.enabled=true")
        if settings.optim.eight_bit:
            require_bitsandbytes()
    return with_choices(
        replace(composed, not_used=unused, rows=looks, environment_note=from_runs.note if kept is None else ""), run
    )


def _check_model(settings: Any) -> None:
    """Raise ConfigError for what the files of the model on this machine already say against `settings`."""
    from rlpost.estimate.machine import chosen_policy
    from rlpost.estimate.shape import check_served, check_targets
    from rlpost.model.tokenizer import facts_of_model

    facts = facts_of_model(settings.model, settings.lora.path if settings.trains else None)
    if facts is not None and facts.problem:
        raise ConfigError(facts.problem)
    if settings.uses_policy and isinstance(chosen_policy(settings.policy), VLLMSettings):
        check_served(settings.model.path, settings.model.revision, on_gpu=_gpu(settings) is not None)
    if settings.trains:
        check_targets(settings.lora.target_modules or (), settings.model.path, settings.model.revision)


def _notes(composed: Composed[Any]) -> list[str]:
    """Notes on settings, tokenizer and held-out prompts, before training begins."""
    from rlpost.evaluation.statistics import few_prompts, few_rows
    from rlpost.model.tokenizer import notes_of_model

    settings, held_out = composed.settings, _held_out(composed)
    few = ""
    if held_out is not None and settings.eval.enabled:
        few = few_prompts(held_out) if settings.learns_from_own else few_rows(held_out)
    return [*settings.doubts(), *notes_of_model(settings.model, settings.lora.path), *([few] if few else [])]


def _held_out(composed: Composed[Any]) -> int | None:
    """How many held-out rows an evaluation takes, where all rows were looked at."""
    settings = composed.settings
    if len(composed.rows) != 1 or "test" not in composed.rows[0].counts:
        return None
    return min(settings.eval.limit or settings.env.eval_limit, composed.rows[0].counts["test"])


def _rows(composed: Composed[Any]) -> list[str]:
    """The rows on this machine: how many are trained on and held out, and the longest prompt."""
    from rlpost.model.tokenizer import tokens_of

    env, model = composed.settings.env, composed.settings.model
    if len(composed.rows) != 1 or not (look := composed.rows[0]).counts:
        return []
    summary = f"{look.counts[env.split]} to train on"
    summary += f", {look.counts['test']} held out" if "test" in look.counts else ""
    summary += f", {counted(look.bad, 'bad one')} left out" if look.bad else ""
    lines = [f"rows    {summary}"]
    if composed.settings.learns_from_own and look.longest is not None:
        texts = [str(message["content"]) for message in look.longest.messages or []]
        if (count := tokens_of(texts, model)) is not None:
            beside = "the chat template's and the tools'" if composed.settings.tools.use else "the chat template's"
            lines.append(
                f"prompts the longest has {count:,} tokens, without {beside}; at most {env.max_prompt_tokens:,}"
            )
    return lines


def with_choices(composed: Composed[S], run: Path | None) -> Composed[S]:
    """`composed` with values for the settings that follow from the device and the model's size; `run` keeps its own."""
    from rlpost.config.schema import flat
    from rlpost.estimate.defaults import choose, in_yaml
    from rlpost.estimate.shape import shape_of_model

    settings: Any = composed.settings
    kept = flat(read_run(run).config) if run is not None else None
    shape = shape_of_model(settings.model.path, settings.model.revision)
    settings, chosen = choose(settings, shape, _gpu(settings), kept)
    return replace(
        composed, settings=settings, yaml=in_yaml(composed.yaml, chosen), chosen=[str(each) for each in chosen]
    )


def _look_at_rows(settings: Any, rewards: Sequence[Rewards | None]) -> tuple[list[Look], list[str]]:
    """A look at the rows of each environment on this machine; the columns and entries that nothing reads, in words.

    Raises DataError for rows that cannot be used, or lack a column that a reward takes.

    `rewards` are those of each environment, where they matter.
    """
    from rlpost.config.compose import environments_of
    from rlpost.data.formats import not_used
    from rlpost.envs.row_checks import look_at_rows

    looks, unread = [], []
    measures = settings.trains and settings.eval.enabled
    shown = not settings.learns_from_own and (settings.trains or not settings.env.scores)
    share = (settings.max_bad_share if settings.trains else MOST_BAD) if shown else None
    for env, own in zip_longest(environments_of(settings.env), rewards):
        splits: list[str] = [env.split, *(["test"] if measures and env.split != "test" else [])]
        try:
            found = look_at_rows(
                env, splits, demonstrated=shown, paired=shown and settings.learns_from_pairs, max_bad_share=share
            )
        except DataError as error:
            if settings.trains or not shown:
                raise
            raise DataError(
                f"{error}; without env.reward an evaluation measures the loss of demonstrated replies: add "
                "env.reward=FILE.py:FUNCTION to score sampled ones"
            ) from None
        looks.append(found)
        if found.columns is not None and own is not None and isinstance(env, DatasetSettings):
            own.offer_columns(found.columns, env.path)
        unread.append(not_used({n: count for n, count in found.unused.items() if own is None or not own.reads(n)}))
    return looks, list(filter(None, unread))
