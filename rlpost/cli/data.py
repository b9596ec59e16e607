"""`rlpost data`: shows demonstrations with their masks, reports on rows, measures pass rates, and makes pairs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rlpost.catalog import EVAL, TRAIN_SFT
from rlpost.cli.completion import complete_eval, complete_sft
from rlpost.cli.terminal import (
    BOLD,
    DIM,
    GREEN,
    RED,
    RESET,
    StatusLine,
    output_width,
    painted,
    print_json,
    saying_stopped,
    stdout_on_stderr,
    takes_colour,
)
from rlpost.cli.usage import OVERRIDES_HELP, App, AsJson
from rlpost.errors import ConfigError, DataError
from rlpost.files import expanded
from rlpost.text import counted, paragraph, printable

if TYPE_CHECKING:
    from rlpost.envs.row_report import Piece, Preview
    from rlpost.settings import DatasetSettings

PREVIEW_EXAMPLES = """\
  rlpost data preview
  rlpost data preview model=smollm2 env=gsm8k
  rlpost data preview env=dataset env.path=mine.jsonl --row 17
"""
REPORT_EXAMPLES = """\
  rlpost data report mine.jsonl
  rlpost data report data/gsm8k model=qwen --json
"""
MEASURE_EXAMPLES = """\
  rlpost data measure env=gsm8k model=qwen --out rates.jsonl
  rlpost train grpo env=gsm8k model=qwen env.pass_rates=rates.jsonl
"""
PAIRS_EXAMPLES = """\
  rlpost data pairs my-run -o pairs.jsonl                 right against wrong
  rlpost data pairs my-run -o pairs.jsonl --margin 0.5    best against worst
  rlpost data pairs evals/mine/samples.parquet -o pairs.jsonl
  rlpost train dpo model=runs/my-run env.path=pairs.jsonl
"""
ROWS_READ = 200
PAIRS_A_PROMPT = 4
MEASURED_SAMPLES = 8
OPENING, CLOSING = "»", "«"  # around trained tokens, without colours
LINE_BREAK = "↵"  # before a trained line break, to make it visible
app = App(help="Look at rows before you train on them.")


@app.command("preview", examples=PREVIEW_EXAMPLES, short_help="Show demonstrations and their trained tokens.")
def preview(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help=OVERRIDES_HELP, autocompletion=complete_sft),
    ] = None,
    row: Annotated[int | None, typer.Option(metavar="K", min=1, help="Show row K, as its file counts.")] = None,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Report on the first N rows.")] = ROWS_READ,
    as_json: AsJson = False,
) -> None:
    """Show a demonstration as the model reads it, what of it is trained, and a summary of the first rows.

    Takes what rlpost train sft takes, and loads the tokenizer only. Without colours, as with NO_COLOR=1, » and « stand
    around what is trained.
    """
    from rlpost.config.compose import compose

    settings = compose(TRAIN_SFT, overrides or []).settings
    with StatusLine("reading rows and tokenizer"), stdout_on_stderr() if as_json else nullcontext():
        from rlpost.envs.row_report import preview_rows, tokenizer_of

        found = preview_rows(settings, tokenizer_of(settings.model), rows, row)
    if as_json:
        print_json(found.as_dict())
    else:
        print("\n".join(preview_lines(found, settings.max_bad_share)))


@app.command("report", examples=REPORT_EXAMPLES, short_help="Report on a file of rows.")
def report(
    path: Annotated[str, typer.Argument(metavar="FILE", help="File, folder or hub id, as env.path takes it.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help=OVERRIDES_HELP)] = None,
    as_json: AsJson = False,
) -> None:
    """Say what form rows have, how long they are, which are bad or repeated, and what train and test share.

    Exits with 3 if no row can be used. Takes what rlpost train sft takes, and loads the tokenizer only.
    """
    from rlpost.config.compose import compose

    path = path.removeprefix("env.path=")  # as one types it for other verbs
    settings = compose(TRAIN_SFT, ["env=dataset", f"env.path={path}", *(overrides or [])]).settings
    with StatusLine("reading rows and tokenizer"), stdout_on_stderr() if as_json else nullcontext():
        from rlpost.envs.row_report import report_rows, tokenizer_of

        found = report_rows(cast("DatasetSettings", settings.env), tokenizer_of(settings.model))
    if as_json:
        print_json(found.as_dict())
    else:
        print("\n".join(printable(line) for line in found.lines()))
    if found.bad.count == found.bad.total:
        raise typer.Exit(DataError.exit_code)


@app.command("measure", examples=MEASURE_EXAMPLES, short_help="Measure how often a model answers each prompt right.")
def measure(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help=OVERRIDES_HELP, autocompletion=complete_eval)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the rates; default: pass_rates-MODEL.jsonl.")
    ] = None,
) -> None:
    """Answer every prompt of the split train several times and keep each one's pass rate, for env.pass_rates.

    Takes what rlpost eval takes; eval.samples=8 and env.split=train unless said.
    """
    from rlpost.cli.plan import compose_and_check
    from rlpost.config.compose import check_scored

    words = ["env.split=train", f"eval.samples={MEASURED_SAMPLES}", *(overrides or [])]
    composed = compose_and_check(EVAL, words, as_json=False, typed=["rlpost", *context.obj])
    check_scored(composed.settings.env)
    file = out or Path(f"pass_rates-{composed.model_name}.jsonl")
    if file.exists():
        raise ConfigError(f"{file} exists: give another --out, or remove it")
    abandoned = saying_stopped("stopping: the measurement is abandoned, nothing is written")
    with abandoned, StatusLine(f"loading {composed.settings.model.path}") as status:
        from rlpost.evaluation.pass_rates import rates_of, summary_of, write_rates
        from rlpost.train.assemble import evaluate_command

        played = evaluate_command(
            composed.settings, partial(status.now, "measuring"), status.precision, status.note
        ).played
    rates = rates_of(played)
    write_rates(file, rates, {"command": ["rlpost", *context.obj], "overrides": composed.overrides})
    print(summary_of(rates))
    print(f"written to {file}; train on those in between with env.pass_rates={file} env.min_pass_rate=0.1")


@app.command("pairs", examples=PAIRS_EXAMPLES, short_help="Make pairs for rlpost train dpo from own completions.")
def pairs(
    source: Annotated[
        str, typer.Argument(metavar="RUN|FILE", help="A run or evaluation, or a table of completions (.parquet).")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The .jsonl file to write.")],
    margin: Annotated[
        float | None,
        typer.Option(metavar="M", min=0.0, help="Pair the best with the worst, if rewards differ by M or more."),
    ] = None,
    most: Annotated[
        int, typer.Option("--per-prompt", metavar="N", min=1, help="At most N pairs of each prompt.")
    ] = PAIRS_A_PROMPT,
    step: Annotated[str, typer.Option(metavar="A:B", help="Steps A to B, both included; each optional.")] = "",
    as_json: AsJson = False,
) -> None:
    """Pair completions of one prompt: a right with a wrong one, or with --margin the best with the worst.

    Truncated and repeated completions are left out, and those whose reward failed. A pair holds the ids that were
    sampled, which rlpost train dpo trains on as they are.
    """
    from rlpost.cli.rollouts import steps_in, steps_of
    from rlpost.config.paths import EVALS, RUNS, is_evaluation_folder, is_run_folder

    file = expanded(str(out))
    if file.suffix != ".jsonl":
        raise ConfigError(f"-o {file}: pairs are written as .jsonl")
    if file.exists():
        raise ConfigError(f"{file} exists already: remove it, or give another name")
    table = expanded(source)
    is_table, is_run = table.is_file(), any(map(is_run_folder, (table, RUNS / source)))
    is_evaluation = not is_run and any(map(is_evaluation_folder, (table, EVALS / source)))
    if step and (is_table or is_evaluation):
        raise ConfigError(f"--step {step}: only a run has steps to choose from; leave it out")
    with StatusLine("reading completions"), stdout_on_stderr() if as_json else nullcontext():
        from rlpost.evaluation.pairs import groups_of_run, groups_of_table, write_pairs
        from rlpost.evaluation.saved import find_evaluation
        from rlpost.runs.reader import find_run

        if is_table or is_evaluation:
            groups = groups_of_table(table if is_table else find_evaluation(source))
        else:
            run = find_run(source)
            groups = groups_of_run(run, steps_in(step, steps_of(run)))
        found = write_pairs(file, groups, margin=margin, most=most)
    if as_json:
        print_json({"file": str(file), **found.as_dict()})
    else:
        print("\n".join(printable(line) for line in [*found.lines(), f"written to {file}"]))


def preview_lines(preview: Preview, max_bad_share: float) -> list[str]:
    """The demonstration that is shown, then a summary of all; with colours, or marked with » and «."""
    sample, bad = preview.sample, preview.bad
    heading = f"{sample.where}: {len(sample.ids):,} tokens, {sample.num_trained:,} trained"
    lines = [painted(printable(heading), BOLD, sys.stdout)]
    if sample.fault is not None:
        lines += _in_red(f"bad, {sample.fault.value}: {sample.reason}")
    lines += ["", *(_marked(preview.pieces) if sample.ids else _wrapped(preview.text)), ""]
    share = preview.trained / max(1, preview.tokens)
    lines += _wrapped(
        f"first {counted(bad.total, 'row')}: {share:.1%} of {preview.tokens:,} tokens trained, longest "
        f"{preview.longest:,}, {bad.count or 'none'} bad"
    )
    for line in bad.lines():
        lines += _in_red(f"  {line}")
    if bad.count:
        lines += _wrapped(f"--row {bad.found[0].where.rpartition(' ')[2]} shows the first of them")
    if bad.share > max_bad_share:
        lines += _wrapped(f"more than max_bad_share={max_bad_share:g} are bad: rlpost train sft would refuse them")
    return lines + (_wrapped(preview.not_used) if preview.not_used else [])


def _marked(pieces: Sequence[Piece]) -> list[str]:
    """The pieces as lines of printable characters, and a legend below."""
    colours, written = takes_colour(sys.stdout), ""
    for trained, group in groupby(pieces, key=lambda piece: piece.trained):
        run = "".join(map(_styled, group))
        written += run if colours or not trained else f"{OPENING}{run}{CLOSING}"
    legend = f"{OPENING}trained{CLOSING}  {LINE_BREAK} a line break that is trained"
    if colours:
        legend = f"{GREEN}trained{RESET}  {BOLD}{GREEN}trained, a special token{RESET}  {DIM}not trained{RESET}"
    return [*written.removesuffix("\n").split("\n"), "", legend]


def _styled(piece: Piece) -> str:
    text = printable(piece.text)
    if piece.trained:
        text = text.replace("\n", f"{LINE_BREAK}\n")
    style = (GREEN if piece.trained else DIM) + (BOLD if piece.special and piece.trained else "")
    # style each line on its own: a pager or a scrolled terminal forgets a style of an earlier line
    return "\n".join(painted(line, style, sys.stdout) for line in text.split("\n"))


def _wrapped(text: str) -> list[str]:
    return paragraph(text, output_width())


def _in_red(text: str) -> list[str]:
    return [painted(line, RED, sys.stdout) for line in _wrapped(text)]
