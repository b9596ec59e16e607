"""What vLLM's outputs say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlpost.data.conversation import Completion, PolicyVersionLabel
from rlpost.errors import PolicyError


def completion_of(
    output: Any, tokenizer: Any, labels: Mapping[str, PolicyVersionLabel], version: PolicyVersionLabel
) -> Completion:
    """A completion with the versions it was sampled under: `version`, and those that the engine's `labels` stand for.

    Raises PolicyError for one that was neither finished nor cut.
    """
    sample = output.outputs[0]
    if sample.finish_reason not in ("stop", "length"):
        raise PolicyError(f"vLLM ended a completion for the reason {sample.finish_reason!r}, not stop or length")
    ids = list(sample.token_ids)
    log_probs = [step[token].logprob for step, token in zip(sample.logprobs, ids, strict=True)]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    spans = [(span.start, labels.get(span.version, version)) for span in sample.weight_versions or []]
    (_, first), *changes = spans or [(0, version)]
    return Completion(ids, log_probs, text, sample.finish_reason, first, changes)


def log_probs_of(output: Any, ids: Sequence[int]) -> torch.Tensor:
    """log π of each of the `ids` that were read, (len(ids),) float32; 0 for the first, which nothing predicts."""
    known = zip(output.prompt_logprobs[1:], ids[1:], strict=True)
    return torch.tensor([0.0, *(step[token].logprob for step, token in known)])
