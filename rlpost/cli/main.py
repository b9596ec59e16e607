"""`rlpost`: the verbs, and the one place where an error becomes a message and an exit code.

A command line that Typer refuses is answered in one line: what, where, and what to write instead.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from itertools import takewhile
from types import FrameType
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from rlpost import __version__
from rlpost.cli import completion
from rlpost.cli.terminal import print_error
from rlpost.cli.usage import App, Verbs
from rlpost.errors import ConfigError, RlpostError
from rlpost.output import is_closed, lead_nowhere, leave_dead_terminals
from rlpost.text import PrintableFormatter, did_you_mean, nearest, shortened

INTERRUPTED = 130
OUTPUT_CLOSED = 141
CONFIGURED = ("rlpost train ", "rlpost eval", "rlpost doctor", "rlpost config ")  # verbs that take settings
SECTIONS = TRAIN, LOOK, PREPARE = "Train and try", "Look at runs", "Choose and prepare"


class Row(NamedTuple):
    """A verb or a group of verbs in the help of rlpost."""

    section: str
    help: str
    modules: tuple[str, ...] = ()  # of rlpost.cli, whose `app` has the verbs; by default one of the verb's name


VERBS = {
    "train": Row(TRAIN, "Train a model."),
    "eval": Row(TRAIN, "Score a model on held-out prompts, look at the results."),
    "chat": Row(TRAIN, "Talk to a model or a checkpoint."),
    "doctor": Row(TRAIN, "Try a training on a few rows and report problems."),
    "runs": Row(LOOK, "List, show, compare and clean up runs.", ("runs", "rollouts", "compare", "again")),
    "report": Row(LOOK, "Write a run, or several, as one HTML page."),
    "export": Row(LOOK, "Write a trained model as others read it."),
    "config": Row(PREPARE, "List, show and explain settings."),
    "data": Row(PREPARE, "Look at rows before you train on them."),
    "env": Row(PREPARE, "Test and write environments."),
    "reward": Row(PREPARE, "Write and attack rewards."),
}
BEGIN = """\b
Begin with:
  rlpost train grpo            a small model learns sums on this machine
  rlpost train grpo --help     what else it can do
  rlpost config list           models, environments, recipes
  rlpost --install-completion  then Tab completes verbs, settings and values
"""


class AllVerbs(Verbs):
    """The verbs of `VERBS`, each loaded when it is named; the help lists them by section."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in VERBS and cmd_name not in self.commands:
            first, *more = VERBS[cmd_name].modules or (cmd_name,)
            verb: Any = typer.main.get_command(import_module(f"rlpost.cli.{first}").app)
            verb.short_help = VERBS[cmd_name].help
            if more:
                verb.more = more
            self.commands[cmd_name] = verb
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, VERBS))
        for section in SECTIONS:
            with formatter.section(section):
                rows = [(name.ljust(width), row.help) for name, row in VERBS.items() if row.section == section]
                formatter.write_dl(rows)


app = App(
    cls=AllVerbs,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=BEGIN,
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"rlpost {__version__}")
        raise typer.Exit


@app.callback()
def rlpost(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Post-train language models with reinforcement learning."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code.

    Only deliberate errors are turned into messages: everything else is a bug and keeps its traceback.
    """
    command = typer.main.get_command(app)
    try:
        if "train" in arguments:
            from rlpost.cli import train

            train.offer_verbs(arguments)
        with command.make_context("rlpost", list(arguments), obj=list(arguments)) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as done:
        return done.exit_code
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
        else:
            print_error(explain_usage(error, arguments))
        return error.exit_code
    except RlpostError as error:
        print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        if not is_closed(1):  # some other pipe broke, a worker's for one: that is not a reader leaving
            raise
        lead_nowhere(1)  # what is still buffered, so that the interpreter does not complain when it ends
        return OUTPUT_CLOSED
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM) or not error.filename:
            raise
        print_error(f"{shortened(str(error.filename), 200)}: {str(error.strerror).lower()}; give another path")
        return ConfigError.exit_code
    return 0


def explain_usage(error: typer.TyperException, arguments: Sequence[str]) -> str:
    """Typer's complaint about a command line as one line with what to do."""
    context: Any = getattr(error, "ctx", None)
    kind, message = type(error).__name__, error.format_message().rstrip(".")
    if kind == "NoSuchOption":
        return _unknown_flag(getattr(error, "option_name", ""), context, arguments)
    if context is None:  # an option without its value
        verb = takewhile(lambda word: not word.startswith("-") and "=" not in word, arguments)
        return f"{message}; see {' '.join(['rlpost', *verb])} --help"
    path = context.command_path
    if kind == "MissingParameter":
        return f"{message}: write {' '.join([path, *context.command.collect_usage_pieces(context)])}"
    return f"{message}; see {path} --help"


def _unknown_flag(flag: str, context: Any, arguments: Sequence[str]) -> str:
    """The message for an unknown flag, together with all other unknown words of a verb that takes settings."""
    from rlpost.config.other_words import answers

    path, parameters = context.command_path, context.command.params
    flags = ["--help", *(name for parameter in parameters for name in parameter.opts if name.startswith("-"))]
    if path.startswith(CONFIGURED) and any(parameter.name in ("overrides", "words") for parameter in parameters):
        return _unknown_words(flags, arguments)
    other = answers("flags").get(flag)
    meant = other if other in flags else nearest(flag, flags)
    return f"{path} has no option {flag}{did_you_mean(meant, f'see {path} --help')}"


def _unknown_words(flags: Sequence[str], arguments: Sequence[str]) -> str:
    """The message for the unknown flags and settings of a command line whose verb has `flags`."""
    from rlpost.catalog import COMMANDS, TRAIN_GRPO
    from rlpost.config.overrides import Override
    from rlpost.config.schema import default_choices
    from rlpost.config.unknown import Vocabulary

    command = next((each for each in COMMANDS if each.verb.split()[-1] in arguments), TRAIN_GRPO)
    words = Vocabulary(command, default_choices(command), flags)
    unknown: list[Override] = []
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        is_flag = word.startswith("-") and not word[1:2].isdigit()
        if is_flag and not equals and not following.startswith("-") and "=" not in following:
            value = following
        if (is_flag or equals) and name not in (*words.names, *flags, "recipe"):
            unknown.append(Override(name, value))
    return str(words.refusal(unknown))


def main() -> NoReturn:
    """The `rlpost` program."""
    if completion.VARIABLE in os.environ:  # a shell asks for completions
        completion.answer(typer.main.get_command(app))
    _quiet_libraries()
    if logging.lastResort is not None:  # what writes to stderr where no run has a log
        logging.lastResort.setFormatter(PrintableFormatter())
    _wait_briefly()
    _leave_on_signals()
    sys.exit(run(sys.argv[1:]))


def _leave_on_signals() -> None:
    """Let SIGTERM and SIGHUP end the program as Ctrl-C does, so that all is closed that was started; twice: at once.

    A training has more to do then, and catches them itself. SIGHUP stays ignored where it is, as under nohup.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if number == signal.SIGHUP:
            leave_dead_terminals()
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, leave)


def _wait_briefly() -> None:
    """Have OpenMP's threads spin for some 30 microseconds, then sleep, while they wait for each other.

    They spin for milliseconds by default: with other busy programs on the cores a waiting thread then keeps the core
    from the thread it waits for. On a quiet machine as many spins cost nothing, and none at all cost 15% of a step.
    Read when torch is imported, here and in the processes that are started; scripts/dev/shared_cores.py measures it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def _quiet_libraries() -> None:
    """Keep remarks that libraries address to their own developers off the user's screen."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
