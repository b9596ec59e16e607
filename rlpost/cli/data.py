"""`rlpost data`: demonstrations to look at before a model is trained on them."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlpost.cli.completion import complete_sft
from rlpost.cli.terminal import StatusLine, print_json, stdout_on_stderr, takes_colour
from rlpost.cli.usage import OVERRIDES_HELP, App, AsJson
from rlpost.errors import ConfigError

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

app = App(help="Look at what a model would be trained on.")


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
        held_out = "; it may be held out: add env.split=test" if settings.env.split == "train" else ""
        raise ConfigError(f"--row {row}: the split {settings.env.split} has no such row{held_out}")
    tokenizer: Any = load_tokenizer(locate_tokenizer(settings.model.path, settings.model.revision), settings.model)
    return demonstrations, shown, Encoder(tokenizer, settings.max_tokens)
