"""The conversation of `rlpost chat`, on a terminal or through a pipe."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlpost.cli.columns import WordWrap
from rlpost.cli.terminal import DIM, StatusLine, painted, print_error, stdout_on_stderr, table
from rlpost.errors import DataError
from rlpost.nearest import did_you_mean, nearest
from rlpost.text import counted, printable

if TYPE_CHECKING:
    from rlpost.chat import Chat, Reply
    from rlpost.settings import ModelSettings, SamplingSettings

PROMPT = "> "
COMMANDS = {
    "/reset": ("", "begin anew"),
    "/system": ("TEXT", "set the system prompt, or without TEXT none, and begin anew"),
    "/help": ("", "this list"),
    "/quit": ("", "leave, as Ctrl-D does"),
}


def load(
    settings: ModelSettings, sampling: SamplingSettings, *, system: str | None, max_tokens: int, seed: int
) -> Chat:
    """A conversation with the model of `settings`; says on stderr what was loaded."""
    started = time.perf_counter()
    with StatusLine("loading") as status, stdout_on_stderr():
        from rlpost.chat import Chat, load_policy
        from rlpost.data.template_choice import thinking_cut_short
        from rlpost.model.load import describe

        policy, folder = load_policy(settings, status.numbers)
    facts = [describe(folder), str(policy.model.device)]
    if policy.max_model_len is not None:
        facts.append(f"context {policy.max_model_len} tokens")
    said = f"{', '.join(facts)}, loaded in {time.perf_counter() - started:.1f} s"
    print(painted(printable(said), DIM, sys.stderr), file=sys.stderr)
    if told := thinking_cut_short(policy.tokenizer, max_tokens, "--max-tokens"):
        print(printable(f"note: {told}"), file=sys.stderr)
    return Chat(policy, sampling=sampling, max_tokens=max_tokens, system=system, seed=seed)


def answer(chat: Chat, messages: Sequence[str], *, as_json: bool) -> None:
    """Answer messages of one conversation that came through a pipe: on stdout the replies only."""
    for message in messages:
        reply = chat.reply(message, _ignore if as_json else _show)
        if reply.finish_reason == "interrupted":
            print(flush=True)
            raise KeyboardInterrupt
        if as_json:
            print(json.dumps(as_dict(message, reply)), flush=True)
        else:
            print("" if reply.text.endswith("\n") else "\n", end="", flush=True)
            if reply.finish_reason != "stop":
                print(ending(reply, chat), file=sys.stderr)


def talk(chat: Chat) -> None:
    """Read messages and commands from the terminal until the user leaves."""
    if os.environ.get("TERM") != "dumb":
        import readline  # noqa: F401  line editing and history for input()

    print(painted("/help lists the commands, Ctrl-D leaves", DIM, sys.stderr), file=sys.stderr)
    while True:
        try:
            line = _read_line()
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
        wrap = WordWrap()
        try:
            reply = chat.reply(line, lambda piece, wrap=wrap: print(wrap.add(piece), end="", flush=True))
        except DataError as error:
            print_error(str(error))
            continue
        print(wrap.rest() + ("" if reply.text.endswith("\n") else "\n"), end="")
        print(painted(ending(reply, chat), DIM, sys.stdout), end="\n\n", flush=True)


def command(chat: Chat, line: str) -> bool:
    """Do what a line beginning with / says; returns whether the conversation goes on."""
    word, _, text = line.strip().partition(" ")
    if word == "/quit":
        return False
    if word == "/help":
        said = "\n".join(
            table([(f"{name} {text}".rstrip(), meaning) for name, (text, meaning) in COMMANDS.items()], "")
        )
        said += f"\nsystem prompt: {printable(chat.system)}" if chat.system else "\nno system prompt is set"
    elif word == "/reset":
        chat.reset()
        said = "a new conversation"
    elif word == "/system":
        chat.system = text.strip() or None
        chat.reset()
        said = "a new conversation, under this system prompt" if chat.system else "a new one, without a system prompt"
    else:
        said = f"there is no command {printable(word)}{did_you_mean(nearest(word, COMMANDS), 'see /help')}"
    print(painted(said, DIM, sys.stdout), end="\n\n", flush=True)
    return True


def ending(reply: Reply, chat: Chat) -> str:
    """The line under a reply: tokens, their speed, and why it ended."""
    reasons = {
        "stop": "stopped",
        "length": f"cut at --max-tokens {chat.max_tokens}",
        "context": f"cut at the end of the context, {chat.policy.max_model_len} tokens: /reset begins anew",
        "interrupted": "stopped by Ctrl-C",
    }
    speed = reply.tokens / reply.seconds if reply.seconds > 0 else 0.0
    return f"{counted(reply.tokens, 'token')}, {speed:.1f} tokens/s, {reasons[reply.finish_reason]}"


def as_dict(message: str, reply: Reply) -> dict[str, object]:
    """A reply as one JSON object."""
    return {
        "prompt": message,
        "reply": reply.text,
        "tokens": reply.tokens,
        "seconds": round(reply.seconds, 3),
        "finish_reason": reply.finish_reason,
    }


def _read_line() -> str:
    """A line that the user typed; the prompt is not part of a stdout that goes elsewhere."""
    if sys.stdout.isatty():
        line = input(PROMPT)
    else:
        print(PROMPT, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
    return line.rstrip("\n")


def _show(piece: str) -> None:
    print(printable(piece), end="", flush=True)


def _ignore(piece: str) -> None:
    """A reply that is printed when it is whole."""
