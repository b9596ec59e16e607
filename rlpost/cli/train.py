"""`rlpost train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlpost.cli.checks import compose_and_check
from rlpost.cli.completion import complete_grpo
from rlpost.cli.results import load_training, plan_dict, train_and_print_json
from rlpost.cli.resume import check_kept, kept_settings, point_of
from rlpost.cli.run_folder import choose_folder, run_to_resume, slug
from rlpost.cli.sweep import sweep
from rlpost.cli.sweep_jobs import SweepOptions
from rlpost.cli.terminal import print_json
from rlpost.cli.usage import JSON_HELP, MULTIRUN_HELP, OVERRIDES_HELP, App
from rlpost.errors import ConfigError
from rlpost.settings import DatasetSettings, EnvSettings
from rlpost.settings.run import RunRequest
from rlpost.text import printable

if TYPE_CHECKING:
    from rlpost.config.compose import Composed
    from rlpost.settings import GRPOSettings

EXAMPLES = """\b
Examples:
  rlpost train grpo
  rlpost train grpo model=qwen env=gsm8k optim.lr=1e-6 --name first-try
  rlpost train grpo recipe=gsm8k-smollm2-cpu env.path=data/gsm8k --dry-run
  rlpost train grpo -m optim.lr=1e-5,3e-5 seed=0,1
"""

app = App(help="Train a model.", epilog="Begin with: rlpost train grpo")


@app.command("grpo", epilog=EXAMPLES, short_help="Train with GRPO.")
def grpo(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help=OVERRIDES_HELP, autocompletion=complete_grpo),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run folder itself.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="The run folder is runs/NAME.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The same as seed=N.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|latest|PATH",
            help="Go on with a run and its settings: from its latest checkpoint (auto begins a run where there is "
            "none), or from PATH.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the settings, say what would run, stop.")] = False,
    cfg: Annotated[bool, typer.Option("--cfg", help="Print the resolved configuration as YAML, stop.")] = False,
    multirun: Annotated[bool, typer.Option("--multirun", "-m", help=MULTIRUN_HELP)] = False,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print one line a step instead of a live screen.")] = False,
) -> None:
    """Train with GRPO: sample groups of completions, reward them, learn from the differences."""
    from rlpost.config.registry import TRAIN_GRPO

    words = [*(overrides or []), *([f"seed={seed}"] if seed is not None else [])]
    if seed is not None and any(word.startswith("seed=") for word in words[:-1]):
        raise ConfigError("--seed and seed= both set the seed: give one of them")
    if multirun:
        options = SweepOptions(out, name, resume, dry_run, cfg, as_json)
        raise typer.Exit(sweep(TRAIN_GRPO, words, ["rlpost", *context.obj], options))
    run = run_to_resume(out, name, resume) if resume is not None else None
    kept = kept_settings(run, resume, words) if run and resume else []
    composed = compose_and_check(TRAIN_GRPO, words, kept, as_json=as_json)
    if resume is not None and run is None:  # the settings given now say which run is meant
        run = out = choose_folder(None, None, resume, _stem(composed))
        kept = kept_settings(run, resume, words)
        composed = compose_and_check(TRAIN_GRPO, words, kept, as_json=as_json)
    check_kept(composed, kept)
    if cfg:
        print_configuration(composed, as_json=as_json)
        return
    folder = choose_folder(out, name, resume, _stem(composed))
    if dry_run and as_json:
        print_json(plan_dict(composed, folder, resume))
        return
    if dry_run:
        print("\n".join(plan_lines(composed, folder, resume)))
        return
    request = RunRequest(folder, resume, composed.overrides, ["rlpost", *context.obj], composed.yaml, plain)
    if as_json:
        raise typer.Exit(train_and_print_json(composed.settings, request))
    raise typer.Exit(load_training()(composed.settings, request))


def print_configuration(composed: Composed[Any], *, as_json: bool) -> None:
    """The resolved configuration, as `--cfg` prints it."""
    if as_json:
        print_json(composed.as_dict())
    else:
        print(composed.yaml, end="")


def plan_lines(composed: Composed[GRPOSettings], folder: Path, resume: str | None) -> list[str]:
    """What would run, as `--dry-run` prints it."""
    settings, choices = composed.settings, composed.choices
    model, env = settings.model, settings.env
    completions = settings.prompts_per_step * settings.group_size
    source = f" from {path}" if isinstance(path := getattr(env, "path", None), str) else ""
    lines = [
        f"model   {_model_name(composed)} ({model.path}), {model.dtype.value} weights, device {model.device}",
        f"data    {choices['env']}{source}, {env.split} split" + _rewards_of(env),
        f"policy  {choices['policy']}, temperature {settings.sampling.temperature:g}",
        f"step    {settings.prompts_per_step} prompts x {settings.group_size} completions = {completions}, "
        f"at most {env.max_completion_tokens} tokens each",
        f"steps   {settings.steps}, seed {settings.seed}",
        f"writes  {folder}" + (f", {point_of(folder, resume)}" if resume is not None else ""),
    ]
    return [printable(line) for line in lines]


def _rewards_of(env: EnvSettings) -> str:
    return f", reward {' + '.join(env.reward)}" if isinstance(env, DatasetSettings) else ""


def _stem(composed: Composed[GRPOSettings]) -> str:
    """What a run is called that nobody named, but for its number."""
    return f"grpo-{composed.choices['env']}-{_model_name(composed)}"


def _model_name(composed: Composed[GRPOSettings]) -> str:
    """The chosen option, or the end of a path that replaced it."""
    if any(word.startswith("model.path=") for word in composed.overrides):
        return slug(composed.settings.model.path)
    return composed.choices["model"]
