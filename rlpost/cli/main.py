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
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from rlpost import __version__
from rlpost.catalog import COMMANDS, TRAIN_GRPO
from rlpost.cli import again, compare, completion, config, data, env, reward, rollouts, train
from rlpost.cli import chat as chat_verb
from rlpost.cli import doctor as doctor_verb
from rlpost.cli import eval as eval_verb
from rlpost.cli import export as export_verb
from rlpost.cli import report as report_verb
from rlpost.cli.terminal import print_error
from rlpost.cli.usage import LOOK, PREPARE, TRAIN, App, as_typed, command_of, is_argument
from rlpost.config.other_words import NOT_HERE, answers
from rlpost.errors import ConfigError, RlpostError
from rlpost.output import is_closed, lead_nowhere, leave_dead_terminals
from rlpost.text import PrintableFormatter, did_you_mean, nearest, shortened

if TYPE_CHECKING:
    from rlpost.config.overrides import Override
    from rlpost.config.unknown import Vocabulary

WANTED = {"int_parsing": "a whole number", "float_parsing": "a number"}  # by the name of Pydantic's complaint


def explain_usage(error: typer.TyperException, root: Any, arguments: Sequence[str]) -> str:
    """Typer's complaint about the command line `arguments` of `root` as one line.

    Where a verb is missing it is the help, of many lines.
    """
    context: Any = getattr(error, "ctx", None)
    kind = type(error).__name__
    if kind == "BadOptionUsage":
        return _without_value(getattr(error, "option_name", ""), command_of(root, arguments)) or error.format_message()
    if context is None:
        return error.format_message()
    if kind == "NoSuchOption":
        return _unknown_flag(getattr(error, "option_name", ""), context, arguments)
    parameter: Any = getattr(error, "param", None)
    if kind == "MissingParameter" and parameter is not None:
        return _missing(parameter, context)
    if kind == "BadParameter" and parameter is not None:
        return _unfit(parameter, error) or error.format_message()
    if extra := getattr(error, "message", "").partition("unexpected extra argument(s) ")[2]:
        return f"{_line(context)} does not take {extra.strip('()')}; see {context.command_path} --help"
    return error.format_message()


def _unknown_flag(flag: str, context: Any, arguments: Sequence[str]) -> str:
    """The message for an unknown flag, together with all other unknown words of the command."""
    from rlpost.config.unknown import NOT_KNOWN, Vocabulary, several

    path = context.command_path
    named = [name for parameter in context.command.params for name in parameter.opts]
    flags = ["--help", *(name for name in named if name.startswith("-"))]
    command = next((command for command in COMMANDS if path == f"rlpost {command.verb}"), None)
    takes_any = path == "rlpost doctor" or path.startswith("rlpost config ")
    if takes_any and any(parameter.name == "words" for parameter in context.command.params):
        command = next((each for each in COMMANDS if each.verb.split()[-1] in arguments), TRAIN_GRPO)
    if command is None:
        other = answers("flags").get(flag)
        meant = other if other in flags else nearest(flag, flags) if flag.startswith("--") else None
    else:
        words = Vocabulary.by_default(command)
        rows = list(_unknown_words(words, flags, arguments))
        if len(rows) > 1:
            return several(rows, command)
        meant = _in_place_of(flag, _behind(flag, arguments), flags, words)
    if meant is not None and meant.startswith(NOT_HERE):
        return f"{path} has no option {flag}: {meant.removeprefix(NOT_HERE)}"
    if meant in (None, NOT_KNOWN, *flags, *answers("flags").values()):
        return f"{path} has no option {flag}{did_you_mean(None if meant == NOT_KNOWN else meant, f'see {path} --help')}"
    return f"{flag}: settings are written without dashes; write {meant}"


def _unknown_words(words: Vocabulary, flags: Sequence[str], arguments: Sequence[str]) -> Iterator[tuple[Override, str]]:
    """The flags and settings of a command line that are unknown, each with what to write instead."""
    from rlpost.config.overrides import Override

    for word in arguments:
        name, equals, text = word.partition("=")
        if word.startswith("--") and name not in flags:
            yield Override(name, text), _in_place_of(name, _behind(name, arguments), flags, words)
        elif equals and not word.startswith("-") and name not in (*words.names, "recipe"):
            yield Override(name, text), words.instead_of(Override(name, text))


def _in_place_of(flag: str, text: str, flags: Sequence[str], words: Vocabulary) -> str:
    """The flag or setting to write in place of an unknown flag, or why there is none.

    A setting, by its own or another tool's name, comes before a flag that looks alike.
    """
    from rlpost.config.overrides import Override, shown
    from rlpost.config.schema import all_keys, groups_of
    from rlpost.config.unknown import NOT_KNOWN

    other = answers("flags").get(flag, "")
    if other in flags or other.startswith("recipe="):
        return other
    given = Override(flag.lstrip("-").replace("-", "_"), text)
    near = nearest(flag, flags) if flag.startswith("--") else None
    meant = given.key
    if meant not in words.names:
        is_known = any(meant in (*all_keys(each), *groups_of(each.settings)) for each in COMMANDS)
        if near and not is_known and not words.equivalent_setting(given):
            return near
        _, reason, other = words.unknown(given)
        meant = words.written(other, given) if other else f"{NOT_HERE}{reason.removeprefix(NOT_HERE)}" if reason else ""
    return f"{meant}={shown(text) or 'VALUE'}" if meant in words.names else meant or NOT_KNOWN


def _behind(flag: str, arguments: Sequence[str]) -> str:
    """The value that was given to a flag, glued to it or behind it; empty where there is none."""
    place = next((i for i, word in enumerate(arguments) if word.partition("=")[0] == flag), len(arguments))
    _, equals, glued = "".join(arguments[place : place + 1]).partition("=")
    following = "".join(arguments[place + 1 : place + 2])
    return glued if equals else "" if following.startswith("-") or "=" in following else following


def _without_value(flag: str, command: Any) -> str:
    """For an option that stands last and wants a value; empty where `command` has no such option."""
    parameter = next((p for p in command.params if flag in p.opts), None)
    return f"{flag} needs a value: write {flag} {parameter.metavar}" if parameter is not None else ""


def _unfit(parameter: Any, error: typer.TyperException) -> str:
    """For a value of the wrong type or out of range; empty where what Typer says is all there is."""
    causes: Any = getattr(error.__cause__ or error.__context__, "errors", list)()
    if len(causes) != 1:
        return ""
    cause, flag = causes[0], parameter.opts[-1] if len(parameter.opts) == 1 else "/".join(parameter.opts)
    given, limits = f"{flag} {cause['input']}", cause.get("ctx", {})
    known = (parameter.metavar or "").split("|")
    if len(known) > 1:
        return f"{given} is unknown: it is one of {', '.join(known)}{did_you_mean(nearest(str(cause['input']), known))}"
    if cause["type"] in WANTED:
        return f"{given} is of the wrong type: it takes {WANTED[cause['type']]}"
    if "ge" in limits or "le" in limits:
        bound = f"at least {limits['ge']:g}" if "ge" in limits else f"at most {limits['le']:g}"
        return f"{given} is out of range: it must be {bound}"
    return ""


def _missing(parameter: Any, context: Any) -> str:
    path = context.command_path
    name = parameter.metavar or parameter.name.upper() if is_argument(parameter) else parameter.opts[0]
    return f"{path} needs {name}: write {_line(context)}; see {path} --help"


def _line(context: Any) -> str:
    """The verb with its arguments and required options, as they are typed."""
    parameters = context.command.params
    arguments = [as_typed(p) for p in parameters if is_argument(p)]
    options = [f"{p.opts[0]} {p.metavar}" for p in parameters if p.required and not is_argument(p)]
    return " ".join([context.command_path, *arguments, *options])


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
    examples=eval_verb.EXAMPLES,
    short_help="Score a model on held-out prompts, look at the results.",
    rich_help_panel=TRAIN,
)(eval_verb.evaluate)
app.command("chat", examples=chat_verb.EXAMPLES, short_help="Talk to a model or a checkpoint.", rich_help_panel=TRAIN)(
    chat_verb.chat
)
app.command(
    "doctor",
    examples=doctor_verb.EXAMPLES,
    short_help="Try a training on a few rows and report problems.",
    rich_help_panel=TRAIN,
)(doctor_verb.doctor)
app.add_typer(config.app, name="config", rich_help_panel=PREPARE)
app.add_typer(data.app, name="data", rich_help_panel=PREPARE)
app.add_typer(env.app, name="env", rich_help_panel=PREPARE)
app.add_typer(reward.app, name="reward", rich_help_panel=PREPARE)
compare.app.add_typer(again.app)
app.add_typer(compare.app, name="runs", rich_help_panel=LOOK)
app.command(
    "report",
    examples=report_verb.EXAMPLES,
    short_help="Write a run, or several, as one HTML page.",
    rich_help_panel=LOOK,
)(report_verb.report)
app.add_typer(rollouts.app, name="rollouts", rich_help_panel=LOOK)
app.command(
    "export", examples=export_verb.EXAMPLES, short_help="Write a trained model as others read it.", rich_help_panel=LOOK
)(export_verb.export)


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


@lru_cache(maxsize=1)
def _with_verbs(*commands: Any) -> Any:
    """All verbs of the command line, which takes 20 ms to make and is needed again to explain a mistake."""
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code.

    Only deliberate errors are turned into messages: everything else is a bug and keeps its traceback.
    """
    try:
        train.offer_verbs(arguments)
        command = _with_verbs(*COMMANDS)
        with command.make_context("rlpost", list(arguments), obj=list(arguments)) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as done:
        return done.exit_code
    except typer.TyperException as error:
        message = explain_usage(error, _with_verbs(*COMMANDS), arguments)
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message, file=sys.stderr)
        else:
            print_error(message)
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
        print_error(
            f"{shortened(str(error.filename), 200)}: {str(error.strerror).lower()}; give a path that you may use"
        )
        return ConfigError.exit_code
    return 0


def main() -> NoReturn:
    """The `rlpost` program."""
    if completion.is_requested():
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
