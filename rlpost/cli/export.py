"""`rlpost export`: finds the checkpoint, checks the options, and writes the model as others read it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from rlpost.cli.completion import complete_run
from rlpost.cli.terminal import StatusLine, print_json, saying_stopped, stdout_on_stderr
from rlpost.cli.usage import App, AsJson
from rlpost.errors import ConfigError
from rlpost.files import expanded
from rlpost.runs.reader import checkpoints, find_checkpoint
from rlpost.text import printable, readable

EXAMPLES = """\
  rlpost export my-run                        makes exports/my-run-hf-bfloat16
  rlpost export my-run --checkpoint best --dtype float32
  rlpost export my-run --to gguf --dtype q8_0
  rlpost export my-lora-run --to adapter --hub me/my-adapter
"""
EXPORTS = Path("exports")


Format = Literal["hf", "adapter", "gguf"]
Dtype = Literal["float32", "bfloat16", "float16", "q8_0"]
DTYPES: dict[Format, tuple[Dtype | None, ...]] = {
    "hf": ("bfloat16", "float16", "float32"),
    "adapter": (None,),
    "gguf": ("float16", "float32", "q8_0"),
}

app = App()


@app.command("export", examples=EXAMPLES)
def export(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run's name or folder, or a checkpoint's.", autocompletion=complete_run),
    ],
    to: Annotated[Format, typer.Option(metavar="hf|adapter|gguf", help="What to write.", show_default=True)] = "hf",
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            metavar="float32|bfloat16|float16|q8_0",
            help="Numbers of the weights; default: bfloat16 for hf, float16 for gguf, more if those are too coarse.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to make; default: exports/RUN-FORMAT-DTYPE.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="latest|best|step-N", help="Which checkpoint; default: latest.")
    ] = None,
    hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to the hub too; a new repository is private.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a trained model as others read it: a Hugging Face folder, a peft adapter, or GGUF for llama.cpp and Ollama.

    The result is read back and must agree with the checkpoint, or it is refused. It comes with a model card.
    """
    folder, found = find_checkpoint(run, checkpoint)
    tried = dtypes(to, dtype)
    if not (found / "adapter").is_dir() and to == "adapter":
        raise ConfigError(f"{folder} has no adapter, since it was trained without lora.enabled=true: use --to hf")
    targets = [
        (candidate, target_of(folder, found, to, candidate) if out is None else expanded(out)) for candidate in tried
    ]
    for _, target in targets:
        if target.exists():
            raise ConfigError(f"{target} exists already: remove it, or give another --out")
    with (
        saying_stopped("stopped: nothing was exported"),
        StatusLine("loading torch") as status,
        stdout_on_stderr(),
    ):
        from rlpost.export.card import check_hub_name, upload
        from rlpost.export.export import export_in_turn

        if hub is not None:
            check_hub_name(hub)
        made, target = export_in_turn(folder, found, to, targets, status.now, status.note)
    address = None
    if hub is not None:
        with StatusLine(f"uploading to {hub}"), stdout_on_stderr():
            address = upload(target, hub)
    if as_json:
        print_json({**made, "hub": address})
        return
    print(printable(f"wrote    {target}, {readable(made['bytes'])}, with a model card in README.md"))
    print(f"agrees   {made['agreement']['text']}")
    if address is not None:
        print(printable(f"hub      {address}"))
    shown = str(target) if "/" in str(target) else f"./{target}"  # a word that cannot be taken for a name
    print(printable(f"try it   rlpost chat {shlex.quote(made['file'] or shown)}"))


def dtypes(to: Format, requested: Dtype | None) -> list[Dtype | None]:
    """The dtypes to try, one after the other, until one agrees with the checkpoint; None for an adapter's own.

    Raises ConfigError for a dtype that the format does not have.
    """
    known = DTYPES[to]
    if requested is None:
        return [each for each in known if each != "q8_0"]
    if requested not in known:
        choice = "leave it out" if to == "adapter" else f"it is one of {', '.join(map(str, known))}"
        raise ConfigError(f"--dtype {requested} is not for --to {to}: {choice}")
    return [requested]


def target_of(run: Path, checkpoint: Path, to: Format, dtype: Dtype | None) -> Path:
    """The folder of an export by default: exports/RUN-FORMAT-DTYPE, with the step of a checkpoint before the latest."""
    which = [] if checkpoint == checkpoints(run / "checkpoints")[-1] else [checkpoint.name]
    return EXPORTS / "-".join([run.resolve().name, *which, to, *([dtype] if dtype else [])])
