"""`rlpost`: the verbs, and the one place where an error becomes a message and an exit code."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, NoReturn

import typer

from rlpost import __version__
from rlpost.cli import chat as chat_verb
from rlpost.cli import cluster, completion, config, data, env, info, reward, rollouts, runs, train
from rlpost.cli import doctor as doctor_verb
from rlpost.cli import eval as eval_verb
from rlpost.cli.complaint import explain_long_path, explain_usage
from rlpost.cli.terminal import print_error
from rlpost.cli.usage import LOOK, PREPARE, TRAIN, App
from rlpost.errors import ConfigError, RlpostError
from rlpost.output import is_closed, lead_nowhere, leave_dead_terminals
from rlpost.text import PrintableFormatter

BEGIN = """\b
Begin with:
  rlpost train grpo            a small model learns sums on this machine
  rlpost train grpo --help     what else it can do
  rlpost config list           models, environments, recipes
  rlpost --install-completion  then Tab completes verbs, settings and values
"""

INTERRUPTED = 130
OUTPUT_CLOSED = 141

app = App(
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=BEGIN,
)
app.add_typer(train.app, name="train", rich_help_panel=TRAIN)
app.command(
    "eval",
    cls=eval_verb.EvalVerb,
    epilog=eval_verb.EXAMPLES,
    short_help="Score a model on held-out prompts, compare two.",
    rich_help_panel=TRAIN,
)(eval_verb.evaluate)
app.command("chat", epilog=chat_verb.EXAMPLES, short_help="Talk to a model or a checkpoint.", rich_help_panel=TRAIN)(
    chat_verb.chat
)
app.command(
    "doctor",
    epilog=doctor_verb.EXAMPLES,
    short_help="Try a training on a few rows, say what is wrong.",
    rich_help_panel=TRAIN,
)(doctor_verb.doctor)
app.add_typer(config.app, name="config", rich_help_panel=PREPARE)
app.add_typer(data.app, name="data", rich_help_panel=PREPARE)
app.add_typer(env.app, name="env", rich_help_panel=PREPARE)
app.add_typer(reward.app, name="reward", rich_help_panel=PREPARE)
app.add_typer(runs.app, name="runs", rich_help_panel=LOOK)
app.add_typer(rollouts.app, name="rollouts", rich_help_panel=LOOK)
app.add_typer(cluster.app, name="cluster", rich_help_panel=LOOK)
app.command("info", short_help="Print versions, devices and memory.", rich_help_panel=PREPARE)(info.info)


def _print_version(asked: bool) -> None:
    if asked:
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
    try:
        command = typer.main.get_command(app)
        with command.make_context("rlpost", list(arguments), obj=list(arguments)) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as done:
        return done.exit_code
    except typer.TyperException as error:
        return _report_usage(error, arguments)
    except RlpostError as error:
        print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        if not is_closed(1):  # some other pipe broke, a worker's for one: that is no reader leaving
            raise
        lead_nowhere(1)  # what is still buffered, so that the interpreter does not complain when it ends
        return OUTPUT_CLOSED
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print_error(explain_long_path(error, arguments))
        elif isinstance(error, PermissionError) and error.filename:
            print_error(f"{error.filename}: permission denied; give a path that you may use, or change its permissions")
        else:
            raise
        return ConfigError.exit_code
    return 0


def main() -> NoReturn:
    """The `rlpost` program."""
    if completion.asked():
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
    """Have OpenMP's threads spin for microseconds, then sleep, while they wait for each other.

    They spin for milliseconds by default: with one other busy program on two cores a training step
    then takes ten times as long, since the waiting thread keeps the core from the one it waits for.
    Read when torch is imported; on an idle machine this costs nothing.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")


def _quiet_libraries() -> None:
    """Keep remarks that libraries address to their own developers off the user's screen."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def _report_usage(error: typer.TyperException, arguments: Sequence[str]) -> int:
    message = explain_usage(error, typer.main.get_command(app), arguments)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
    else:
        print_error(message)
    return error.exit_code
