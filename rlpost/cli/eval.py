"""`rlpost eval`: scores a model on held-out prompts, and compares two evaluations."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from rlpost.catalog import EVAL
from rlpost.cli.completion import complete_eval, complete_evaluation
from rlpost.cli.plan import compose_and_check, data_lines, model_name
from rlpost.cli.run_folder import NOT_PLAYED, asked_folder, first_free, settings_of_run
from rlpost.cli.terminal import StatusLine, print_json, saying_stopped, stdout_on_stderr
from rlpost.cli.usage import MULTIRUN_HELP, OVERRIDES_HELP, App, AsJson, VerbWithVerbs
from rlpost.config.paths import EVALS, RESULT, SAMPLES, SWEEP_FILE, resolve_model_path, run_of_model
from rlpost.config.schema import as_text
from rlpost.errors import CheckpointError, ConfigError
from rlpost.runs.reader import read_run
from rlpost.text import printable

if TYPE_CHECKING:
    from rlpost.config.compose import Composed
    from rlpost.evaluation.play import EvalResult
    from rlpost.settings import EvalSettings

EXAMPLES = """\b
Examples:
  rlpost eval
  rlpost eval model=runs/my-run
  rlpost eval model=my-run env=gsm8k env.limit=64
  rlpost eval model=runs/my-run 'eval.k=[1,8]' --name my-run
  rlpost eval compare before my-run
  rlpost eval -m model=smollm2,runs/my-run
"""
COMPARE_SHORT = "Say whether one evaluation is better than another."
COMPARE_EXAMPLES = """\b
Examples:
  rlpost eval compare before my-run
  rlpost eval compare evals/gsm8k-qwen-1 evals/gsm8k-my-run-1 --json
"""

Side = typer.Argument(
    help="An evaluation: its name in evals/, its folder, or its samples.parquet.",
    autocompletion=complete_evaluation,
    show_default=False,
)


class EvalVerb(VerbWithVerbs):
    """`rlpost eval KEY=VALUE...` and `rlpost eval compare A B`."""

    @cached_property
    def below(self) -> dict[str, TyperCommand]:
        """See `VerbWithVerbs.below`."""
        app = App(add_completion=False)
        app.command("compare", epilog=COMPARE_EXAMPLES, short_help=COMPARE_SHORT)(compare)
        verb: Any = typer.main.get_command(app)
        return {"compare": verb}


def evaluate(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help=OVERRIDES_HELP, autocompletion=complete_eval),
    ] = None,
    multirun: Annotated[bool, typer.Option("--multirun", "-m", help=MULTIRUN_HELP)] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder of the evaluation itself.")] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the evaluation; its folder is evals/NAME.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="auto", help="With -m: leave out the jobs that are done there already.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With -m: check and list the jobs, stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Score a model on an environment's held-out prompts: one greedy completion each, or several for pass@k.

    A run's model plays the run's own environment, unless another one is named. The figures and every completion are
    kept in evals/.
    """
    words = overrides or []
    typed = ["rlpost", *context.obj]
    if multirun:
        from rlpost.cli.sweep import SweepOptions, sweep

        options = SweepOptions(out, name, resume, dry_run=dry_run, as_json=as_json)
        raise typer.Exit(sweep(EVAL, words, typed, options))
    for flag, given in (("--resume", resume), ("--dry-run", dry_run or None)):
        if given is not None:
            raise ConfigError(f"{flag} belongs to a sweep of several evaluations: add -m, or leave it out")
    with saying_stopped("stopping: the evaluation is abandoned, nothing is written"):
        evaluate_once(words, typed, out, name, as_json=as_json)


def evaluate_once(words: list[str], typed: list[str], out: Path | None, name: str | None, *, as_json: bool) -> None:
    """One evaluation from its settings to its figures on stdout."""
    composed = compose_and_check(EVAL, words, settings_of_run(words, typed), as_json=as_json)
    folder = choose_evaluation_folder(out, name, f"{composed.choices['env']}-{model_name(composed)}")
    print("\n".join(map(printable, played_lines(composed))), file=sys.stderr, flush=True)
    if as_json:
        with stdout_on_stderr():
            record, _ = score(composed, folder, typed)
        print_json(record)
        return
    _, result = score(composed, folder, typed)
    print("\n".join(printable(line) for line in [*result.lines(), f"written to {folder}"]))


def compare(a: Annotated[str, Side], b: Annotated[str, Side], as_json: AsJson = False) -> None:
    """Say whether B is better than A, prompt by prompt: better, worse, within noise, or how many prompts would tell."""
    from rlpost.evaluation.saved import compare as compared
    from rlpost.evaluation.saved import find_evaluation, read_evaluation

    tables = find_evaluation(a), find_evaluation(b)  # both names are looked up before either is read
    found = compared(*(read_evaluation(table) for table in tables))
    if as_json:
        print_json(found.as_dict())
    else:
        print("\n".join(printable(line) for line in found.lines()))


def played_lines(composed: Composed[EvalSettings]) -> list[str]:
    """The plan: the environment, the model, and for a run's model what the run was trained on."""
    path, env = composed.settings.model.path, composed.settings.env
    first, *sources = data_lines(composed, label="plays")
    lines = [f"{first}, at most {env.max_completion_tokens} tokens each", *sources]
    run = run_of_model(path)
    if run is None:
        return [*lines, f"model   {model_name(composed)} ({path})"]
    record = read_run(run)
    trained, played = record.part("env"), composed.as_dict()["env"]
    unlike = NOT_PLAYED.union(EVAL.without, [] if trained.get("reward") else ["env.reward"])  # fine-tuning takes none
    other = [key for key in played if f"env.{key}" not in unlike and trained.get(key, played[key]) != played[key]]
    if not trained:
        said = f"{run} does not say what it was trained on"
    elif (name := record.choice("env")) != composed.choices["env"]:
        rows = f" from {trained['path']}" if "path" in trained else ""
        said = f"trained on another environment, {name}{rows}"
    elif other:
        said = f"trained on the same, but with {' '.join(f'env.{key}={as_text(trained[key])}' for key in other)}"
    else:
        said = "trained on the same"
    return [*lines, f"model   {path}, {said}"]


def choose_evaluation_folder(out: Path | None, name: str | None, stem: str) -> Path:
    """The folder that `--out` and `--name` ask for; `evals/STEM-N` if they leave it open.

    Creates nothing. Raises ConfigError for a name that is taken or invalid.
    """
    asked = asked_folder(out, name, root=EVALS, kind="an evaluation")
    if asked is None:
        return first_free(stem, EVALS)
    for file, held in ((RESULT, "an evaluation"), (SAMPLES, "an evaluation"), (SWEEP_FILE, "a sweep")):
        if (asked / file).exists():
            raise ConfigError(f"{asked} already holds {held}: give another --name")
    return asked


@contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """Make the folder before any long work, and remove it again if nothing was written into it.

    Raises CheckpointError if it cannot be made.
    """
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error}; give another --out") from error
    try:
        yield
    finally:
        for each in new:
            if each.is_dir() and not any(each.iterdir()):  # another evaluation may have removed a parent
                each.rmdir()


def score(composed: Composed[EvalSettings], folder: Path, typed: list[str]) -> tuple[dict[str, Any], EvalResult]:
    """Evaluate, with progress on stderr, and write `folder`; returns the content of `result.json`, and its figures."""
    settings = composed.settings
    began = time.monotonic()
    with reserved(folder):
        with StatusLine(f"loading {settings.model.path}") as status:
            from rlpost.evaluation.saved import write_evaluation
            from rlpost.record import NUMBERS
            from rlpost.runs.writer import environment
            from rlpost.train.assemble import evaluate_command

            model = resolve_model_path(settings.model.path)  # now: a run may save a later checkpoint meanwhile
            evaluation = evaluate_command(settings, partial(status.now, "evaluating"), status.numbers, status.note)
        record = {
            "folder": str(folder),
            "command": typed,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - began, 1),
            "model": str(Path(model).resolve()) if Path(model).exists() else model,
            "choices": composed.choices,
            "overrides": composed.overrides,
            "settings": composed.as_dict(),
            "environment": environment(settings.seed) | {NUMBERS: evaluation.numbers},
            "result": evaluation.result.as_dict(),
        }
        write_evaluation(folder, record, evaluation.played)
    return record, evaluation.result
