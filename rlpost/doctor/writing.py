"""What the model reads: the chat template, where a turn ends, what of a demonstration is trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rlpost.data.chat_mask import ChatMask
from rlpost.data.demonstrations import Demonstration, Fault, Sample
from rlpost.data.encoding import Encoder
from rlpost.doctor.findings import Findings
from rlpost.text import counted


def look_at_template(findings: Findings, tokenizer: Any, vocabulary: int | None) -> None:
    """Does the template end a turn, begin an answer, begin a text once, and use ids that the model has?"""
    chat = ChatMask(tokenizer)
    before = len(findings.all)
    if chat.end_of_turn is None:
        findings.fail(
            "template",
            f"{chat.template} ends an answer with no special token, so the model would never learn to stop",
            "let it write eos_token behind an answer, or take model.chat_template=plain",
        )
    if chat.header_left_out:
        findings.fail(
            "template",
            f"{chat.template} writes {chat.header_left_out!r} before an answer but not as its generation prompt",
            "let it do so under {% if add_generation_prompt %}",
        )
    ids, _ = (
        Encoder(tokenizer).chat.encode([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}])
        if not chat.header_left_out and chat.end_of_turn is not None
        else ([], [])
    )
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        findings.fail(
            "template", f"{chat.template} begins a text with {tokenizer.bos_token} twice", "let it write bos_token once"
        )
    if vocabulary is not None and max([*ids, *chat.special, 0]) >= vocabulary:
        findings.fail(
            "template",
            f"the tokenizer has ids up to {max([*ids, *chat.special])}, and the model {vocabulary} embeddings",
            "take the tokenizer that belongs to the model",
        )
    if len(findings.all) == before:
        end = tokenizer.convert_ids_to_tokens(chat.end_of_turn)
        findings.ok("template", f"{chat.template} ends an answer with {end}")


def look_at_masks(
    findings: Findings, tokenizer: Any, demonstrations: Iterable[Demonstration], max_tokens: int | None
) -> list[Sample]:
    """Is every answer trained, with its end, and nothing else? Returns the samples."""
    encoder = Encoder(tokenizer, max_tokens)
    samples = [encoder.encode(demonstration) for demonstration in demonstrations]
    faults: dict[Fault, list[Sample]] = {}
    for sample in samples:
        if sample.fault is not None:
            faults.setdefault(sample.fault, []).append(sample)
    for fault, bad in faults.items():
        text = f"{fault.value}: {len(bad)} of {counted(len(samples), 'row')}, such as {bad[0].where}: {bad[0].reason}"
        if fault is Fault.cut and len(bad) < len(samples):
            findings.warn("mask", text, "raise max_tokens")
        else:
            findings.fail("mask", text, "raise max_tokens" if fault is Fault.cut else "correct or remove them")
    good = [sample for sample in samples if sample.num_trained]
    if good and not faults:
        _tell_masks(findings, tokenizer, encoder, good)
    return good


def _tell_masks(findings: Findings, tokenizer: Any, encoder: Encoder, samples: Sequence[Sample]) -> None:
    trained, read = sum(sample.num_trained for sample in samples), sum(len(sample.ids) for sample in samples)
    ends = {sample.ids[max(i for i, kept in enumerate(sample.mask) if kept)] for sample in samples}
    stops = {encoder.chat.end_of_turn, tokenizer.eos_token_id}
    if not ends <= stops:
        odd = tokenizer.convert_ids_to_tokens(next(iter(ends - stops)))
        findings.fail("mask", f"an answer is trained up to {odd!r}, which ends no turn", "correct the chat template")
        return
    findings.ok(
        "mask",
        f"{trained:,} of {read:,} tokens of {counted(len(samples), 'row')} are trained, each answer with its end",
    )
