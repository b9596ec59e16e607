"""Export a checkpoint for other programs, and check the export against it before it gets its name.

The folder is written beside its place, read back by transformers (an adapter by peft), and compared on greedy replies
of the checkpoint. Both sides compute in float32, so the figures are those of the written numbers, not of a machine's
arithmetic. What reads it back shares nothing with rlpost: transformers' own tokenizer and model. A folder that does not
agree is removed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpost.config import paths
from rlpost.data.chat import stop_ids
from rlpost.data.rendering import render
from rlpost.errors import DataError
from rlpost.export.card import TOKENIZER, Made, base_of, write_card
from rlpost.export.gguf import STORED, check_covered, read_back, write_gguf
from rlpost.files import bytes_of, give_mode_of, json_in
from rlpost.imports import require_peft
from rlpost.model.load import ends_of, load_model, save_model
from rlpost.model.locate import locate_model, verify_model
from rlpost.model.lora import adapted_with
from rlpost.model.tokenizer import load_tokenizer, save_tokenizer, tokenizer_facts
from rlpost.policies.base import Request
from rlpost.policies.transformers import TransformersWrapper
from rlpost.runs.reader import read_run
from rlpost.runs.rollouts import read_rollouts
from rlpost.settings import SamplingSettings
from rlpost.text import one_line

PROMPTS = 16
LONGEST_PROMPT = 512  # tokens; longer ones are left out of the comparison
REPLY = 48  # most tokens of a greedy reply
MOST_GAP = 0.02  # mean distance of log-probs in nats, of 16-bit weights
LEAST_SAME = 0.97  # share of positions with the same likeliest token, of q8_0

QUESTIONS = (
    *(f"What is {n} + {n + 8}?" for n in range(2, 10)),
    "Name three colours.",
    "Write a sentence about the sea.",
    "What is the capital of France?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "Finish the sentence: The early bird",
    "Write a line of Python that prints hello.",
    "Say something kind to a friend.",
)
TEXTS = (  # tokenized by both sides, besides the prompts
    "Hello, world! It's 3.14159, isn't it?  Two  spaces\n\n\ttab, and 12345 or 1,000,000.",
    "naïve café, Größe, Привет, 日本語, 🙂🙃 x² ≤ y; def f(a): return a[0]\r\n<b>&amp;</b>",
)


class DisagreementError(DataError):
    """An export that does not agree with its checkpoint, and has been removed."""


@dataclass(frozen=True)
class Agreement:
    """How an export answers beside its checkpoint, on the checkpoint's greedy replies."""

    prompts: int
    tokens: int  # of the replies
    log_prob_gap: float  # mean distance in nats, over the tokens
    same_top: float  # share of positions at which both find the same token likeliest
    equal_replies: int  # replies that are the same throughout
    criterion: str
    agrees: bool

    def __str__(self) -> str:
        return (
            f"{self.equal_replies} of {self.prompts} greedy replies equal, log-probs of {self.tokens} tokens "
            f"{self.log_prob_gap:.5f} apart on average, the likeliest token the same at {self.same_top:.2%} "
            f"(needed: {self.criterion})"
        )


@dataclass(frozen=True)
class Readings:
    """A model's view of some replies: each token's log-prob, and the likeliest token in its place."""

    log_probs: list[torch.Tensor]  # a reply each, (T,)
    top: list[torch.Tensor]


def export_in_turn(
    run: Path,
    checkpoint: Path,
    to: str,
    targets: Sequence[tuple[str | None, Path]],
    doing: Callable[[str], None],
    note: Callable[[str], None],
) -> tuple[dict[str, Any], Path]:
    """`export` in the first of `targets`, dtypes with their folders, that agrees with the checkpoint; and its folder.

    Raises DisagreementError if none does.
    """
    for number, (dtype, target) in enumerate(targets, start=1):
        try:
            return export(run, checkpoint, to, dtype, target, doing), target
        except DisagreementError as error:
            if number == len(targets):
                raise
            note(f"{error}; trying {targets[number][0]}")
    raise AssertionError("no target")


def export(
    run: Path,
    checkpoint: Path,
    to: str,
    dtype: str | None,
    target: Path,
    show: Callable[..., None] = lambda *_: None,
) -> dict[str, Any]:
    """Write `checkpoint` of `run` to the folder `target`, which must not exist, and return the facts about it.

    `to` is hf, adapter or gguf; `dtype` is None for an adapter. `show` is called with the work in progress, and
    where that can be counted with how much of it is done. Raises ConfigError for what cannot be written so,
    CheckpointError for a damaged checkpoint, and DataError, leaving nothing behind, for a folder that does not agree
    with the checkpoint.
    """
    source = checkpoint / "model"
    verify_model(source)
    if to == "adapter":
        require_peft("--to adapter")
    elif to == "gguf":
        check_covered(source)
    tokenizer = load_tokenizer(source)
    show("reading the checkpoint")
    model = load_model(source)
    device = model.device
    prompts = prompts_of(run, tokenizer)
    policy = TransformersWrapper(model, tokenizer)
    greedy = SamplingSettings(temperature=0)
    policy.on_ended = lambda ended: show("greedy replies", ended, len(prompts))
    policy.on_ended(0)
    replies = [reply.token_ids for reply in policy.generate([Request(ids, REPLY, 0) for ids in prompts], greedy)]
    expected = readings(model, prompts, replies, show)
    base = base_of(run)
    with beside(target) as making:
        show("writing")
        if to == "hf":
            save_model(model.to(getattr(torch, str(dtype))), tokenizer, making)
            if tokenizer_facts(making).rebuilt:  # AutoTokenizer gives other ids beside this config.json, not apart
                save_tokenizer(tokenizer, making / TOKENIZER)
        del model, policy
        if to == "adapter":
            _copy_adapter(checkpoint / "adapter", tokenizer, making, None if base.via else base.hub_id)
        elif to == "gguf":
            stored = STORED[str(dtype)]
            file = making / f"{run.resolve().name}-{stored.name}.gguf"
            # a file that is named just "mistral" is another model to transformers
            write_gguf(source, tokenizer, file, stored, f"{run.resolve().name}, {checkpoint.name}", base.licence, show)
        show("reading it back")
        written, its_tokenizer = _read_back(to, making, source, checkpoint)
        _check_tokenizer(tokenizer, its_tokenizer, prompts, target)
        ends, known = stop_ids(tokenizer), ends_of(written.generation_config)
        all_ends = [] if {*ends} <= {*known} else list(dict.fromkeys([*ends, *known]))
        its_readings = readings(written.to(device), prompts, replies, show)
        found = compared(expected, its_readings, criterion=dtype or _stored_dtype(source))
        del written
        if not found.agrees:
            raise DisagreementError(
                f"{target} was not written, because it does not agree with {checkpoint}: {found}; {_advice(to, dtype)}"
            )
        made = Made(run, checkpoint, to, dtype, str(found), PROMPTS, base, all_ends)
        write_card(making, made)
        give_mode_of(making / "README.md", making)
    file = next(iter(sorted(target.glob("*.gguf"))), None)
    return {
        "run": str(run),
        "checkpoint": str(checkpoint),
        "to": to,
        "dtype": dtype,
        "folder": str(target),
        "file": None if file is None else str(file),
        "bytes": bytes_of(target),
        "agreement": {**asdict(found), "text": str(found)},
    }


@contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A folder to write to that becomes `target` when the block ends, and is removed if it raises."""
    making = target.with_name(f".{target.name}.incomplete")
    try:
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        yield making
        making.rename(target)
    except OSError as error:
        raise DataError(f"cannot write {target}: {error}; free some space or give another --out") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)


def prompts_of(run: Path, tokenizer: Any) -> list[list[int]]:
    """The ids of prompts to compare on: of the run's latest rollouts, and questions of our own where they are few."""
    texts: list[str] = []
    for step in reversed(read_run(run).rollout_steps):
        texts += [row["prompt"] for row in read_rollouts(run, step)]
        if len({*texts}) >= PROMPTS:
            break
    texts += [
        render(tokenizer, [{"role": "user", "content": question}], add_generation_prompt=True) for question in QUESTIONS
    ]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in dict.fromkeys(texts)]
    return [ids for ids in prompts if len(ids) <= LONGEST_PROMPT][:PROMPTS]


@torch.inference_mode()
def readings(
    model: Any, prompts: Sequence[list[int]], replies: Sequence[list[int]], show: Callable[..., None]
) -> Readings:
    """Read each of `replies` behind its prompt with `model`, one at a time."""
    found = Readings([], [])
    for number, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        show("reading replies", number, len(prompts))
        ids = torch.tensor([[*prompt, *reply]], device=model.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()  # (T, V)
        log_probs = logits.log_softmax(-1)
        found.log_probs.append(log_probs.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu())
        found.top.append(log_probs.argmax(-1).cpu())
    return found


def compared(expected: Readings, found: Readings, *, criterion: str) -> Agreement:
    """Compare two models' readings of the same replies; `criterion` is the dtype of the export."""
    gap = (torch.cat(expected.log_probs) - torch.cat(found.log_probs)).abs().mean().item()
    same = [left == right for left, right in zip(expected.top, found.top, strict=True)]
    share = torch.cat(same).float().mean().item()
    equal = sum(bool(each.all()) for each in same)
    if criterion == "q8_0":
        words, agrees = f"at least {LEAST_SAME:.0%} of likeliest tokens the same", share >= LEAST_SAME
    elif criterion == "float32":
        words, agrees = "all replies equal", equal == len(same)
    else:
        words, agrees = f"log-probs at most {MOST_GAP} apart", gap <= MOST_GAP
    tokens = sum(len(each) for each in same)
    return Agreement(len(same), tokens, gap, share, equal, words, agrees)


def _read_back(to: str, folder: Path, source: Path, checkpoint: Path) -> tuple[Any, Any]:
    """The written model in float32, and its tokenizer, as others open them."""
    if to == "gguf":
        model, tokenizer = read_back(next(folder.glob("*.gguf")), source)
        return model.eval(), tokenizer
    tokenizer = AutoTokenizer.from_pretrained(alone if (alone := folder / TOKENIZER).is_dir() else folder)
    if to == "adapter":
        base = locate_model(paths.adapter_base(checkpoint / "adapter"))
        return adapted_with(load_model(base), folder, len(tokenizer)).eval(), tokenizer
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def _check_tokenizer(own: Any, written: Any, prompts: Sequence[list[int]], target: Path) -> None:
    """Raise DataError unless both tokenizers give the same ids, and have the same chat template."""
    for text in [*TEXTS, *map(own.decode, prompts)]:
        left, right = (each(text, add_special_tokens=False)["input_ids"] for each in (own, written))
        if left != right:
            raise DataError(
                f"{target} was not written: its tokenizer reads {one_line(text, 60)!r} as other tokens than the "
                "checkpoint's; use --to hf"
            )
    if own.chat_template != written.chat_template:
        raise DataError(f"{target} was not written: its chat template is not the checkpoint's; use --to hf")


def _advice(to: str, dtype: str | None) -> str:
    """The dtype to type instead of one that keeps too little of the training."""
    more = {"bfloat16": "float16 or --dtype float32", "q8_0": "float16", "float16": "float32"}.get(str(dtype))
    return "report this as a bug" if more is None else f"{dtype} keeps too few digits: take --dtype {more}"


def _copy_adapter(adapter: Path, tokenizer: Any, folder: Path, base: str | None) -> None:
    """Copy the adapter and the run's tokenizer; `base` replaces the base model that the adapter names, if given."""
    save_tokenizer(tokenizer, folder)
    config = json_in(adapter / paths.ADAPTER_CONFIG)
    config["base_model_name_or_path"] = base or config["base_model_name_or_path"]
    (folder / paths.ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    shutil.copyfile(adapter / paths.ADAPTER_WEIGHTS, folder / paths.ADAPTER_WEIGHTS)


def _stored_dtype(source: Path) -> str:
    """The dtype of a checkpoint's first weight."""
    file = paths.weight_files(source)[0]
    with safe_open(file, framework="pt") as tensors:
        return str(tensors.get_tensor(next(iter(tensors.keys()))).dtype).removeprefix("torch.")
