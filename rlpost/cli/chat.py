"""`rlpost chat`: finds the model before anything heavy is loaded, and talks to it on a terminal or through a pipe."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlpost.catalog import EVAL
from rlpost.cli.completion import complete_model
from rlpost.cli.terminal import DIM, StatusLine, painted, print_error, saying_stopped, stdout_on_stderr, table
from rlpost.cli.usage import App
from rlpost.config.paths import RUNS, is_run_folder, resolve_model_path
from rlpost.config.schema import options
from rlpost.errors import ConfigError, DataError
from rlpost.runs.reader import find_runs
from rlpost.text import did_you_mean, nearest, printable

if TYPE_CHECKING:
    from rlpost.chat import Chat
    from rlpost.settings import EvalSamplingSettings, ModelSettings

EXAMPLES = """\
  rlpost chat smollm2
  rlpost chat my-run --system "Answer with a number." --temperature 0
  rlpost chat my-run model.chat_template_kwargs={enable_thinking:false}
  rlpost chat my-run sampling.top_k=40 sampling.top_p=1
  echo "2 + 2?" | rlpost chat runs/my-run/checkpoints/step-000030 --json
"""
PROMPT = "> "
TOP_P = 0.9  # by default
COMMANDS = {
    "/reset": ("", "begin anew"),
    "/system": ("TEXT", "set the system prompt, or without TEXT none, and begin anew"),
    "/help": ("", "this list"),
    "/quit": ("", "leave, as Ctrl-D does"),
}

app = App()


@app.command("chat", examples=EXAMPLES)
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
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings: model.KEY and sampling.KEY."),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")] = None,
    temperature: Annotated[float, typer.Option(metavar="T", min=0, help="0: take the likeliest token.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Most tokens per reply.")] = 512,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed.")] = 0,
    lines: Annotated[bool, typer.Option("--lines", help="Answer each line of a pipe separately.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each reply to a pipe as a JSON object.")] = False,
) -> None:
    """Talk to a model. From a pipe: its text is the message, and only the reply goes to stdout.

    /help lists what can be typed. Ctrl-C stops a reply, and leaves at the prompt; Ctrl-D leaves.
    """
    model, sampling = chat_settings(path, [f"sampling.temperature={temperature}", *(overrides or [])])
    piped = not sys.stdin.isatty()
    messages = piped_messages(lines=lines) if piped else []
    found = str(Path(model.path).resolve()) if Path(model.path).is_dir() else model.path
    print(f"loading {printable(found)} ...", file=sys.stderr, flush=True)
    with saying_stopped("stopped while the model was loading"):
        session = load(model, sampling, system=system, max_tokens=max_tokens, seed=seed)
    if piped:
        answer(session, messages, as_json=as_json)
    else:
        talk(session)


def chat_settings(path: str, words: Sequence[str] = ()) -> tuple[ModelSettings, EvalSamplingSettings]:
    """The settings of a model and of its sampling, under `words`.

    `path` is an option of `model`, a run's name or a value of `model.path`. Raises ConfigError for any other name,
    with the nearest one, and for settings that do not work.
    """
    from rlpost.config.compose import compose
    from rlpost.data.template_choice import named_template

    known = options("model")
    chosen = f"model.path={path}"
    if path in known and not Path(path).is_dir():
        chosen = f"model={path}"
    elif not ({"/", ":"} & {*path} or Path(path).exists() or is_run_folder(RUNS / path)):  # a name that nothing has
        runs = [str(found.relative_to(RUNS)) for found in find_runs(RUNS)] if RUNS.is_dir() else []
        hint = did_you_mean(nearest(path, [*known, *runs]), "a hub id has the form OWNER/NAME")
        raise ConfigError(f"{path} is not a model, run or folder{hint}")
    try:
        settings = compose(EVAL, [f"sampling.top_p={TOP_P}", chosen, *words]).settings
    except ConfigError as error:  # the message names a setting, but the user typed only the path
        raise ConfigError(str(error).removeprefix("model.path=")) from None
    model = settings.model
    if model.chat_template is not None:
        named_template(model.chat_template)
    model = replace(model, path=resolve_model_path(model.path))  # now: a run may save another checkpoint
    return model, settings.sampling


def piped_messages(*, lines: bool) -> list[str]:
    """The messages from stdin: one, or one a line. Raises DataError if there is no text."""
    text = sys.stdin.buffer.read().decode(errors="replace")
    messages = [line for line in text.splitlines() if line.strip()] if lines else [text.rstrip("\n")]
    if not any(message.strip() for message in messages):
        raise DataError("stdin is empty: echo 'a question' | rlpost chat PATH, or start it in a terminal to talk")
    return messages


def load(
    settings: ModelSettings, sampling: EvalSamplingSettings, *, system: str | None, max_tokens: int, seed: int
) -> Chat:
    """A conversation with the model of `settings`; prints on stderr which model was loaded."""
    started = time.perf_counter()
    with StatusLine("loading") as status, stdout_on_stderr():
        from rlpost.chat import Chat, load_policy
        from rlpost.data.template_choice import thinking_cut_short
        from rlpost.model.load import describe
        from rlpost.policies.drawing import evaluation_sampling
        from rlpost.train.facts import measured_precision

        policy, folder = load_policy(settings, lambda found: status.precision(measured_precision(found)))
    facts = [describe(folder), str(policy.model.device)]
    if policy.max_model_len is not None:
        facts.append(f"context {policy.max_model_len} tokens")
    loaded = f"{', '.join(facts)}, loaded in {time.perf_counter() - started:.1f} s"
    print(painted(printable(loaded), DIM, sys.stderr), file=sys.stderr)
    if note := thinking_cut_short(policy.tokenizer, max_tokens, "--max-tokens"):
        print(printable(f"note: {note}"), file=sys.stderr)
    return Chat(policy, sampling=evaluation_sampling(sampling, 1), max_tokens=max_tokens, system=system, seed=seed)


def answer(chat: Chat, messages: Sequence[str], *, as_json: bool) -> None:
    """Answer the messages of one conversation from a pipe: only the replies go to stdout."""
    for message in messages:
        reply = chat.reply(message, (lambda _: None) if as_json else _show)
        if reply.finish_reason == "interrupted":
            print(flush=True)
            raise KeyboardInterrupt
        if as_json:
            seconds = round(reply.seconds, 3)
            given = {"prompt": message, "reply": reply.text, "tokens": reply.tokens, "seconds": seconds}
            print(json.dumps({**given, "finish_reason": reply.finish_reason}), flush=True)
        else:
            print("" if reply.text.endswith("\n") else "\n", end="", flush=True)
            if reply.finish_reason != "stop":
                print(chat.ending(reply), file=sys.stderr)


def talk(chat: Chat) -> None:
    """Read messages and commands from the terminal until the user leaves."""
    if os.environ.get("TERM") != "dumb":
        import readline  # noqa: F401  line editing and history for input()

    print(painted("/help lists the commands, Ctrl-D leaves", DIM, sys.stderr), file=sys.stderr)
    while True:
        try:
            line = input(PROMPT)
        except (EOFError, KeyboardInterrupt) as left:
            print(file=sys.stderr)
            if isinstance(left, KeyboardInterrupt):
                raise
            return
        if not line.strip():
            continue
        if line.startswith("/"):
            if not command(chat, line):
                return
            continue
        try:
            reply = chat.reply(line, _show)
        except DataError as error:
            print_error(str(error))
            continue
        print("" if reply.text.endswith("\n") else "\n", end="")
        print(painted(chat.ending(reply), DIM, sys.stdout), end="\n\n", flush=True)


def command(chat: Chat, line: str) -> bool:
    """Run a command, a line beginning with /; returns whether the conversation goes on."""
    word, _, text = line.strip().partition(" ")
    if word == "/quit":
        return False
    if word == "/help":
        answer = "\n".join(table([(f"{name} {text}".rstrip(), meaning) for name, (text, meaning) in COMMANDS.items()]))
        answer += f"\nsystem prompt: {printable(chat.system)}" if chat.system else "\nno system prompt is set"
    elif word == "/reset":
        chat.reset()
        answer = "a new conversation"
    elif word == "/system":
        chat.system = text.strip() or None
        chat.reset()
        answer = "a new conversation, under this system prompt" if chat.system else "a new one, without a system prompt"
    else:
        answer = f"there is no command {printable(word)}{did_you_mean(nearest(word, COMMANDS), 'see /help')}"
    print(painted(answer, DIM, sys.stdout), end="\n\n", flush=True)
    return True


def _show(piece: str) -> None:
    print(printable(piece), end="", flush=True)
