"""`rlpost data`: demonstrations to look at before a model is trained on them."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlpost.cli.completion import complete_eval, complete_sft
from rlpost.cli.terminal import StatusLine, print_json, saying_stopped, stdout_on_stderr, takes_colour
from rlpost.cli.usage import OVERRIDES_HELP, App, AsJson
from rlpost.errors import ConfigError
from rlpost.text import counted, printable

if TYPE_CHECKING:
    from rlpost.data.demonstrations import Demonstration
    from rlpost.data.encoding import Encoder
    from rlpost.settings import SFTSettings

ROWS_READ = 200

PREVIEW_EXAMPLES = """\b
Examples:
  rlpost data preview
  rlpost data preview model=smollm2 env=gsm8k
  rlpost data preview env=dataset env.path=mine.jsonl --row 17
"""

app = App(help="Look at rows before a model is trained on them.")


@app.command("preview", epilog=PREVIEW_EXAMPLES, short_help="Show a demonstration and what of it is trained.")
def preview(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help=OVERRIDES_HELP, autocompletion=complete_sft),
    ] = None,
    row: Annotated[int | None, typer.Option(metavar="K", min=1, help="Show row K, as its file counts.")] = None,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Sum up the first N rows.")] = ROWS_READ,
    as_json: AsJson = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Mark what is trained with » and « in place of colours.")
    ] = False,
) -> None:
    """Show a demonstration as the model reads it, what of it is trained, and a summary of the first rows.

    Takes what rlpost train sft takes, and loads the tokenizer only.
    """
    from rlpost.catalog import TRAIN_SFT
    from rlpost.config.compose import compose

    settings = compose(TRAIN_SFT, overrides or []).settings
    with StatusLine("reading rows and tokenizer"), stdout_on_stderr() if as_json else nullcontext():
        demonstrations, shown, encoder = opened(settings, rows, row)
    from rlpost.cli.data_view import preview_as_dict, preview_lines

    if as_json:
        print_json(preview_as_dict(demonstrations, shown, encoder))
        return
    coloured = takes_colour(sys.stdout) and not plain
    print("\n".join(preview_lines(demonstrations, shown, encoder, settings.max_bad_share, coloured=coloured)))


REPORT_EXAMPLES = """\b
Examples:
  rlpost data report mine.jsonl
  rlpost data report data/gsm8k model=qwen --json
"""


@app.command("report", epilog=REPORT_EXAMPLES, short_help="Say what a file of rows holds.")
def report(
    path: Annotated[str, typer.Argument(metavar="FILE", help="File, folder or hub id, as env.path takes it.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help=OVERRIDES_HELP)] = None,
    as_json: AsJson = False,
) -> None:
    """Say what form rows have, how long they are, which are bad or repeated, and what train and test share.

    Takes what rlpost train sft takes, and loads the tokenizer only.
    """
    from rlpost.catalog import TRAIN_SFT
    from rlpost.config.compose import compose

    path = path.removeprefix("env.path=")  # as the other verbs are told
    settings = compose(TRAIN_SFT, ["env=dataset", f"env.path={path}", *(overrides or [])]).settings
    with StatusLine("reading rows and tokenizer"), stdout_on_stderr() if as_json else nullcontext():
        from rlpost.envs.row_report import report_rows
        from rlpost.model.load import load_tokenizer, locate_tokenizer
        from rlpost.settings import DatasetSettings

        assert isinstance(settings.env, DatasetSettings)
        folder = locate_tokenizer(settings.model.path, settings.model.revision)
        found = report_rows(settings.env, load_tokenizer(folder, settings.model))
    if as_json:
        print_json(found.as_dict())
    else:
        print("\n".join(printable(line) for line in found.lines()))


MEASURE_EXAMPLES = """\b
Examples:
  rlpost data measure env=gsm8k model=qwen --out rates.jsonl
  rlpost train grpo env=gsm8k model=qwen env.pass_rates=rates.jsonl
"""
MEASURED_SAMPLES = 8


@app.command("measure", epilog=MEASURE_EXAMPLES, short_help="Measure how often a model answers each prompt right.")
def measure(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help=OVERRIDES_HELP, autocompletion=complete_eval)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the rates go; pass_rates-MODEL.jsonl unless said.")
    ] = None,
) -> None:
    """Answer every prompt of the split train several times and keep each one's pass rate, for env.pass_rates.

    Takes what rlpost eval takes; eval.samples=8 and env.split=train unless said.
    """
    from rlpost.catalog import EVAL
    from rlpost.cli.checks import compose_and_check
    from rlpost.cli.plan import model_name
    from rlpost.cli.resume import settings_of_run

    words = ["env.split=train", f"eval.samples={MEASURED_SAMPLES}", *(overrides or [])]
    composed = compose_and_check(EVAL, words, settings_of_run(words, ["rlpost", *context.obj]), as_json=False)
    file = out or Path(f"pass_rates-{model_name(composed)}.jsonl")
    if file.exists():
        raise ConfigError(f"{file} exists: give another --out, or remove it")
    abandoned = saying_stopped("stopping: the measurement is abandoned, nothing is written")
    with abandoned, StatusLine(f"loading {composed.settings.model.path}") as status:
        from rlpost.assemble import evaluate_command
        from rlpost.evaluation.pass_rates import rates_of, write_rates

        played = evaluate_command(
            composed.settings, partial(status.now, "measuring"), status.numbers, status.note
        ).played
    rates = rates_of(played)
    write_rates(file, rates, {"command": ["rlpost", *context.obj], "overrides": composed.overrides})
    between = sum(0 < each["pass_rate"] < 1 for each in rates)
    never, always = (sum(each["pass_rate"] == share for each in rates) for share in (0, 1))
    print(f"{counted(len(rates), 'prompt')}: {never:,} never right, {between:,} sometimes, {always:,} always")
    print(f"written to {file}; train on those in between with env.pass_rates={file} env.min_pass_rate=0.1")


def opened(settings: SFTSettings, count: int, row: int | None) -> tuple[list[Demonstration], Demonstration, Encoder]:
    """The first `count` demonstrations of the environment, that of `row`, and what encodes them for the model.

    Raises ConfigError where no row has that number.
    """
    from rlpost.cli.data_view import row_number
    from rlpost.data.encoding import Encoder
    from rlpost.envs.build import build_env
    from rlpost.model.load import load_tokenizer, locate_tokenizer

    env = build_env(settings.env, num_prompts=1, group_size=1, seed=settings.seed)
    stream = env.demonstrations()
    demonstrations = list(islice(stream, count))  # a bad path or row is found first
    everything = chain(demonstrations, stream)
    shown = next((d for d in everything if (not d.wrong if row is None else row_number(d.where) == str(row))), None)
    if shown is None and row is None and demonstrations:
        shown = demonstrations[0]
    if shown is None:
        also = "; it may be held out: add env.split=test eval.enabled=false" if settings.env.split == "train" else ""
        raise ConfigError(f"--row {row}: the split {settings.env.split} has no such row{also}")
    tokenizer: Any = load_tokenizer(locate_tokenizer(settings.model.path, settings.model.revision), settings.model)
    return demonstrations, shown, Encoder(tokenizer, settings.max_tokens)
