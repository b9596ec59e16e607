"""`rlpost train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlpost.cli.run_folder import choose_folder, slug
from rlpost.cli.usage import OVERRIDES_HELP, Verbs
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
"""

app = typer.Typer(cls=Verbs, no_args_is_help=True, rich_markup_mode=None, help="Train a model.")


@app.command("grpo", epilog=EXAMPLES, short_help="Train with GRPO.")
def grpo(
    context: typer.Context,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help=OVERRIDES_HELP)] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run folder itself.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="The run folder is runs/NAME.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The same as seed=N.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|latest|PATH",
            help="Go on with a run: from its latest checkpoint (auto begins one if there is none), or from PATH.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would run, stop.")] = False,
    cfg: Annotated[bool, typer.Option("--cfg", help="Print the resolved configuration as YAML, stop.")] = False,
) -> None:
    """Train with GRPO: sample groups of completions, reward them, learn from the differences."""
    from rlpost.config.compose import compose
    from rlpost.config.registry import TRAIN_GRPO
    from rlpost.tracking.choice import chosen_tracker

    words = [*(overrides or []), *([f"seed={seed}"] if seed is not None else [])]
    composed = compose(TRAIN_GRPO, words)
    if cfg:
        print(composed.yaml, end="")
        return
    folder = choose_folder(out, name, resume, f"grpo-{composed.choices['env']}-{_model_name(composed)}")
    chosen_tracker(composed.settings.tracking)  # one that is not installed is named before anything is loaded
    if dry_run:
        print("\n".join(plan_lines(composed, folder, resume)))
        return
    from rlpost.train.grpo import train

    request = RunRequest(folder, resume, composed.overrides, ["rlpost", *context.obj], composed.yaml)
    raise typer.Exit(train(composed.settings, request))


def plan_lines(composed: Composed[GRPOSettings], folder: Path, resume: str | None) -> list[str]:
    """What would run, as `--dry-run` prints it."""
    settings, choices = composed.settings, composed.choices
    model, env = settings.model, settings.env
    completions = settings.prompts_per_step * settings.group_size
    source = f" from {path}" if isinstance(path := getattr(env, "path", None), str) else ""
    lines = [
        f"model   {_model_name(composed)} ({model.path}), {model.dtype.value} weights, device {model.device}",
        f"data    {choices['env']}{source}, {env.split} split",
        f"policy  {choices['policy']}, temperature {settings.sampling.temperature:g}",
        f"step    {settings.prompts_per_step} prompts x {settings.group_size} completions = {completions}, "
        f"at most {env.max_completion_tokens} tokens each",
        f"steps   {settings.steps}, seed {settings.seed}",
        f"writes  {folder}" + (f", resuming ({resume})" if resume is not None else ""),
    ]
    return [printable(line) for line in lines]


def _model_name(composed: Composed[GRPOSettings]) -> str:
    """The chosen option, or the end of a path that replaced it."""
    if any(word.startswith("model.path=") for word in composed.overrides):
        return slug(composed.settings.model.path)
    return composed.choices["model"]
