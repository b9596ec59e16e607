"""The model card of an export, and its upload to the Hugging Face hub.

What a card says comes from the run folder, whose texts may be anybody's: they stand in code spans and code blocks that
they cannot end.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData, try_to_load_from_cache

from rlpost import __version__
from rlpost.config import paths
from rlpost.config.packaged import PACKAGED
from rlpost.errors import ConfigError, DataError
from rlpost.export.gguf import licence_of
from rlpost.record import OF_ROWS, main_figures
from rlpost.runs.reader import RunRecord, read_run, run_of_model, step_of
from rlpost.text import first_line, inline, printable, without_passwords

TOKENIZER = "tokenizer"  # folder of a tokenizer that AutoTokenizer would build anew beside the config.json of its model
LONGEST_CHAIN = 10  # runs that began with each other's models
ALGORITHMS = {
    "train grpo": "GRPO",
    "train sft": "supervised fine-tuning",
    "train expert-iteration": "expert iteration",
    "train distill": "on-policy distillation",
}
NOT_IN_CARD = ("model", "data", "writes", "memory", "disk", "push", "time", "fits")  # the first two are worded there
LIBRARIES = {"hf": "transformers", "adapter": "peft", "gguf": "gguf"}
MADE_BY = {"hf": "finetune", "adapter": "adapter", "gguf": "quantized"}


@dataclass(frozen=True)
class Base:
    """The model that training began with, across runs that began with each other's checkpoints."""

    path: str  # as the first of the runs was given it
    hub_id: str | None
    licence: str | None  # None: unknown
    via: list[str]  # runs between it and this one, the latest first
    note: str = ""


@dataclass(frozen=True)
class Made:
    """An export, and how it compares with the checkpoint."""

    run: Path
    checkpoint: Path
    to: str
    dtype: str | None
    agreement: str
    prompts: int
    base: Base
    ends: list[int]  # every id that ends a reply, to be given to the reader of the export; empty if it knows them all


def base_of(run: Path) -> Base:
    """The base model of a run, with its licence where this machine has its card."""
    via: list[str] = []
    path = _model_path(run)
    while len(via) < LONGEST_CHAIN and (earlier := run_of_model(path)) is not None:
        via.append(earlier.resolve().name)
        path = _model_path(earlier)
    if (packaged := PACKAGED.get(path)) is not None:
        brought = f"its 4-bit weights as {packaged.packages[0]} brings them, so not bit for bit those of the hub"
        note = "; ".join(filter(None, [brought if packaged.parts() else "", packaged.terms]))
        return Base(path, packaged.hub_id, packaged.licence, via, note)
    if ":" in path:
        return Base(path, None, None, via, "a random model that rlpost makes for trying out commands")
    local = Path(path)
    if local.suffix == paths.GGUF and local.is_file():
        return Base(path, None, licence_of(local), via)
    if local.exists() or paths.looks_local(path):
        return Base(path, None, _licence_in(local / "README.md"), via)
    card = try_to_load_from_cache(path, "README.md") if paths.HUB_ID.fullmatch(path) else None
    return Base(path, path, _licence_in(Path(card)) if isinstance(card, str) else None, via)


def write_card(folder: Path, made: Made) -> None:
    """Write the model card of `folder`, README.md."""
    record, base = read_run(made.run), made.base
    verb = record.verb or "train"
    dataset = _dataset(record)
    of_a_run = made.to == "adapter" and base.via  # it belongs to a checkpoint of another run
    hub_id = None if of_a_run else base.hub_id
    data = ModelCardData(
        base_model=hub_id,
        base_model_relation=MADE_BY[made.to] if hub_id else None,
        license=base.licence,
        datasets=[dataset] if dataset else None,
        library_name=LIBRARIES[made.to],
        pipeline_tag="text-generation",
        tags=["rlpost", *verb.split()[1:], *(["gguf"] if made.to == "gguf" else [])],
    )
    parts = [
        f"# {inline(_name(made))}",
        _summary(made, verb),
        f"## Model and data\n\n{_table(_facts(made, record, verb))}",
        f"## Held-out figures\n\n{_figures(record, made.checkpoint)}",
        f"## Settings\n\n{_settings(record, verb)}",
        f"## Agreement with the checkpoint\n\n{_agreement(made)}",
        f"## How to run it\n\n{_usage(folder, made)}",
    ]
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")
    (folder / "README.md").write_text(str(card), encoding="utf-8")


def check_hub_name(name: str) -> None:
    """Raise ConfigError for an invalid name of a repository, and where no token of the hub is found."""
    from huggingface_hub import get_token

    if not paths.HUB_ID.fullmatch(name):
        raise ConfigError(f"--hub {name} is not a name of the hub: give OWNER/NAME")
    if get_token() is None:
        raise ConfigError(f"--hub {name}: no Hugging Face token found: set HF_TOKEN, or type hf auth login")


def upload(folder: Path, name: str) -> str:
    """Upload `folder` to the repository `name`, made private if it is new; returns its address.

    Raises DataError, leaving the folder, if the hub cannot be reached or refuses.
    """
    api = HfApi()
    try:
        repository = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repository.repo_id, commit_message="Upload by rlpost export")
    except Exception as error:
        raise DataError(
            f"{folder} is written, but uploading it to {name} failed ({first_line(error)}): type "
            f"{shlex.join(['hf', 'upload', name, str(folder)])}"
        ) from error
    return str(repository)


# The parts of a card


def _summary(made: Made, verb: str) -> str:
    what = {
        "hf": f"The whole model in {made.dtype}, as transformers and vLLM load it.",
        "adapter": "A LoRA adapter, as peft and vLLM load it beside its base model.",
        "gguf": f"The whole model as a GGUF file in {made.dtype}, as llama.cpp and Ollama load it.",
    }[made.to]
    algorithm = ALGORITHMS.get(verb, inline(verb.removeprefix("train ")))
    step = step_of(made.checkpoint)
    return f"{what} Trained with {algorithm} by rlpost {__version__}: step {step} of the run {inline(_name(made))}."


def _facts(made: Made, record: RunRecord, verb: str) -> list[tuple[str, str]]:
    base = made.base
    shown = base.hub_id if base.path in PACKAGED else base.path
    rows = [
        ("base model", inline(str(shown)) + (f" ({base.note})" if base.note else "")),
        ("its licence", inline(base.licence) if base.licence else "unknown: ask those who published the base model"),
    ]
    if base.via:
        rows.append(("trained before in", ", ".join(map(inline, base.via))))
    rows += [
        ("data", inline(record.data)),
        ("algorithm", ALGORITHMS.get(verb, inline(verb))),
        ("step", f"{step_of(made.checkpoint)} of {record.total_steps or 'an unknown number'}"),
    ]
    return [*rows, *((fact.name, inline(fact.text)) for fact in record.facts if fact.name not in NOT_IN_CARD)]


def _figures(record: RunRecord, checkpoint: Path) -> str:
    """Figures before training, and of the last evaluation that the checkpoint has seen."""
    step = step_of(checkpoint)
    rows = [record.evaluation(before=True) or {}, record.evaluation(before=False, until=step) or {}]
    if not any(rows):
        return "Not measured."
    after = f"after step {rows[1]['step']}" if rows[1] else "after"
    lines = [f"| figure | before | {after} |", "|---|---|---|"]
    for each in record.held_out(step):
        unit = "row" if each.key in OF_ROWS else "prompt"
        cells = [figure.as_text(unit) if figure else "not measured" for figure in (each.before, each.after)]
        lines.append(f"| {each.name} | {' | '.join(cells)} |")
    lead = main_figures(rows)
    summary = "Means over held-out prompts (loss: rows) with 95% intervals."
    if all(lead):
        summary = f"{str(lead[0]).strip()} before training, {str(lead[1]).strip()} {after}. {summary}"
    several = sum(row["step"] > 0 for row in record.evaluations) > 1
    if several and (checkpoint.parent / paths.BEST).resolve() == checkpoint.resolve():
        summary += " This checkpoint was chosen as the best by these figures, which flatters them."
    return f"{summary}\n\n" + "\n".join(lines)


def _settings(record: RunRecord, verb: str) -> str:
    """The command that repeats the run, from the settings that were set; the others are rlpost's defaults."""
    words = [without_passwords(word) for word in record.overrides]
    command = shlex.join(["rlpost", *verb.split(), *words])
    used = f" (versions: {inline(record.versions)})" if record.versions else ""
    intro = f"These were set, all others are the defaults of rlpost{used}"
    return f"{intro}. The same run again:\n\n{_block(command)}"


def _agreement(made: Made) -> str:
    by = {"hf": "transformers", "adapter": "peft", "gguf": "transformers"}[made.to]
    return (
        f"The files were read back by {by} and compared with the checkpoint in float32, on its greedy replies to "
        f"{made.prompts} prompts, before they got their name: {made.agreement}. The tokenizers gave the same ids."
    )


def _usage(folder: Path, made: Made) -> str:
    model = "(replace MODEL by OWNER/NAME or the path of this folder)"
    ends = f", eos_token_id={made.ends}" if made.ends else ""
    python = partial(_PYTHON.format, model="AutoModelForCausalLM", options="", ends=ends)
    if made.to == "adapter":
        code = python(imports=_PEFT, model="AutoPeftModelForCausalLM", tokenizer='"MODEL"')
        serve = f"vllm serve {shlex.quote(paths.adapter_base(folder))} --enable-lora --max-lora-rank 64"
        override = f" --override-generation-config '{{\"eos_token_id\": {made.ends}}}'" if made.ends else ""
        ways = [
            (f"With peft {model}", "python", code),
            ("With vLLM", "sh", f"{serve} --lora-modules trained=MODEL{override}"),
        ]
    elif made.to == "gguf":
        file = next(folder.glob("*.gguf")).name
        make = f"echo {shlex.quote(f'FROM ./{file}')} > Modelfile\nollama create trained -f Modelfile"
        ways = [
            (
                "With llama.cpp, whose `llama-cli` takes the chat template from the file",
                "sh",
                f"llama-cli -m {shlex.quote(file)} -cnv",
            ),
            ("With Ollama", "sh", f"{make}\nollama run trained"),
        ]
    else:
        place = f"MODEL/{TOKENIZER}" if (folder / TOKENIZER).is_dir() else "MODEL"
        code = python(imports=_TRANSFORMERS, options=', dtype="auto"', tokenizer=f'"{place}"')
        serve = "vllm serve MODEL" + (f" --tokenizer {place}" if place != "MODEL" else "")
        ways = [(f"With transformers {model}", "python", code), ("With vLLM", "sh", serve)]
    return "\n\n".join(f"{how}:\n\n{_block(code, language)}" for how, language, code in ways)


_TRANSFORMERS = "from transformers import AutoModelForCausalLM, AutoTokenizer"
_PEFT = "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer"
_PYTHON = """\
{imports}

model = {model}.from_pretrained("MODEL"{options})
tokenizer = AutoTokenizer.from_pretrained({tokenizer})
chat = [{{"role": "user", "content": "What is 17 + 25?"}}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
reply = model.generate(**inputs, max_new_tokens=64{ends})[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(reply, skip_special_tokens=True))"""


def _table(rows: list[tuple[str, str]]) -> str:
    escaped = "\\|"
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text.replace('|', escaped)} |" for name, text in rows)])


def _block(text: str, language: str = "") -> str:
    """`text` as a code block that it cannot end."""
    shown = printable(text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence}{language}\n{shown}\n{fence}"


def _name(made: Made) -> str:
    return made.run.resolve().name


def _model_path(run: Path) -> str:
    path = read_run(run).part("model").get("path")
    return path if isinstance(path, str) else "unknown"


def _dataset(record: RunRecord) -> str | None:
    """The hub id of the data, if it is one."""
    path = record.part("env").get("path")
    is_id = isinstance(path, str) and path.count("/") == 1 and paths.HUB_ID.fullmatch(path) and not Path(path).exists()
    return path if is_id else None


def _licence_in(card: Path) -> str | None:
    """The licence that a model card on this machine names."""
    try:
        licence = ModelCard.load(card).data.get("license")
    except (OSError, ValueError):  # no such file, or malformed
        return None
    return licence if isinstance(licence, str) else None
