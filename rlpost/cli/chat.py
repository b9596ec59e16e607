"""`rlpost chat`: which model is meant, before anything heavy is loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlpost.cli.completion import complete_model
from rlpost.cli.terminal import saying_stopped
from rlpost.errors import ConfigError, DataError
from rlpost.text import printable

if TYPE_CHECKING:
    from rlpost.settings import ModelSettings

EXAMPLES = """\b
Examples:
  rlpost chat smollm2
  rlpost chat my-run --system "Answer with a number." --temperature 0
  rlpost chat my-run model.chat_template_kwargs={enable_thinking:false}
  echo "2 + 2?" | rlpost chat runs/my-run/checkpoints/step-000030 --json
"""


def chat(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A run, checkpoint, HF folder, hub id, or an option of model (smollm2).",
            autocompletion=complete_model,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[model.KEY=VALUE]...", help="Settings of the model."),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")] = None,
    temperature: Annotated[float, typer.Option(metavar="T", min=0, help="0 takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(metavar="P", min=0, max=1, help="Share of the likeliest tokens.")] = 0.9,
    top_k: Annotated[int, typer.Option(metavar="N", min=0, help="So many of the likeliest tokens; 0: all.")] = 0,
    min_p: Annotated[
        float, typer.Option(metavar="P", min=0, max=1, help="Tokens this share as likely as the likeliest.")
    ] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A text that ends a reply; may be given again.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest reply.")] = 512,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The same words get the same replies.")] = 0,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of a pipe is a message of its own.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each reply to a pipe as a JSON object.")] = False,
) -> None:
    """Talk to a model. From a pipe: its text is the message, and only the reply goes to stdout.

    /help lists what can be typed. Ctrl-C stops a reply, and leaves at the prompt; Ctrl-D leaves.
    """
    from rlpost.settings import SamplingSettings

    settings = model_settings(path, overrides or [])
    sampling = SamplingSettings(temperature, top_p=top_p, top_k=top_k, min_p=min_p, stop=stop or [])
    piped = not sys.stdin.isatty()
    if (as_json or lines) and not piped:
        raise ConfigError(
            "--json and --lines are for what comes through a pipe: echo '2 + 2' | rlpost chat PATH --json"
        )
    messages = piped_messages(lines=lines) if piped else []
    print(f"loading {printable(what_is_loaded(path, settings))} ...", file=sys.stderr, flush=True)
    with saying_stopped("stopped while the model was loading"):
        from rlpost.cli.talk import answer, load, talk

        session = load(settings, sampling, system=system, max_tokens=max_tokens, seed=seed)
    if piped:
        answer(session, messages, as_json=as_json)
    else:
        talk(session)


def model_settings(path: str, words: Sequence[str] = ()) -> ModelSettings:
    """The model that an option of `model`, a run's name or anything `model.path` takes means, under `words`.

    Raises ConfigError, with the nearest name, where it is none of them, and for what it cannot be
    loaded under.
    """
    from rlpost.catalog import EVAL
    from rlpost.config.compose import compose
    from rlpost.config.device import check_device
    from rlpost.config.paths import RUNS, is_run_folder, resolve_model_path
    from rlpost.config.registry import options
    from rlpost.data.template_choice import named_template
    from rlpost.nearest import did_you_mean, nearest
    from rlpost.runs.reader import find_runs

    if other := next((word for word in words if not word.startswith("model.") or word.startswith("model.path=")), None):
        raise ConfigError(f"{other}: beside PATH stand settings of the model, as model.device=cpu; leave it out")
    known = options("model")
    run = RUNS / path
    chosen = f"model.path={path}"
    if path in known and not Path(path).is_dir():
        chosen = f"model={path}"
    elif not Path(path).is_absolute() and is_run_folder(run):
        chosen = f"model.path={run}"
    elif _is_bare(path) and not Path(path).exists():
        runs = [str(found.relative_to(RUNS)) for found in find_runs(RUNS)] if RUNS.is_dir() else []
        hint = did_you_mean(nearest(path, [*known, *runs]), "a hub id has the form OWNER/NAME")
        raise ConfigError(f"{path} is no model, run or folder{hint}")
    try:
        settings = compose(EVAL, [chosen, *words]).settings.model
    except ConfigError as error:  # it speaks of a setting, where the path was all that was typed
        raise ConfigError(str(error).removeprefix("model.path=")) from None
    check_device(settings.device)
    if settings.chat_template is not None:
        named_template(settings.chat_template)
    return replace(settings, path=resolve_model_path(settings.path))  # now: a run may go on


def _is_bare(path: str) -> bool:
    """Whether this is one word, a name rather than a path."""
    return "/" not in path and ":" not in path and not path.startswith((".", "~"))


def what_is_loaded(path: str, settings: ModelSettings) -> str:
    """What was asked for and, where this is something else, what it stands for."""
    folder = Path(settings.path)
    if folder.is_file():
        return path
    if not folder.is_dir():
        found = settings.path if settings.path == path else f"{path} ({settings.path})"
        return found if ":" in settings.path else f"{found}, from the hub unless it is cached"
    checkpoint = folder.resolve().parent
    return f"{path} ({checkpoint.name})" if checkpoint.parent.name == "checkpoints" else str(path)


def piped_messages(*, lines: bool) -> list[str]:
    """What came through the pipe: one message, or one a line. Raises DataError for no text."""
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"stdin is no text: byte {error.start} is not UTF-8") from None
    messages = [line for line in text.splitlines() if line.strip()] if lines else [text.rstrip("\n")]
    if not any(message.strip() for message in messages):
        raise DataError("stdin is empty: echo 'a question' | rlpost chat PATH, or start it in a terminal to talk")
    return messages
