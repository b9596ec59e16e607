"""A batch of prompts and replies in the flat names of TorchRL's first LLM interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorStack, TensorClass, TensorDict, TensorDictBase

from rlpost.data.columns import fields_of, settle
from rlpost.data.ragged import padded, ragged, ragged_rows, strings
from rlpost.errors import DataError


class LLMData(TensorClass["nocast"]):
    """B prompts and the replies to them; what is not given is None.

    `tokens` are the prompts' ids (B, P), padded on the left, and `attention_mask` is 1 on those that
    are not padding; `tokens_response` the replies' (B, R), padded on the right, as are their
    `log_probs` (0.0) and `logits` (B, R, V). `token_list` and `tokens_response_list` are the same ids
    as lists, without padding. `text` is the prompts as they were rendered, `text_response` what the
    model said.
    """

    tokens: torch.Tensor | None = None
    tokens_response: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    token_list: Any = None
    tokens_response_list: Any = None
    logits: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    text: Any = None
    text_response: Any = None

    def __post_init__(self) -> None:
        fields = fields_of(self)
        settle(fields, (*_LISTS, *_TEXTS))
        for name in _LISTS:
            rows = fields.get(name, None)
            values = rows.tolist() if isinstance(rows, NonTensorStack) else []
            if any(isinstance(row, torch.Tensor) for row in values):  # tensordict made tensors of uneven lists
                fields.set(name, _lists([torch.as_tensor(row) for row in values]))

    @classmethod
    def from_batch(cls, batch: TensorDictBase, pad_id: int = 0) -> LLMData:
        """What a batch of rlpost (`rlpost.data.batch`), or a part of its keys, says under these names.

        Padding is `pad_id`. Of a reply of several turns the ids are all that follows the first
        prompt, and the text is the last turn. Raises DataError for a batch with neither ids nor text.
        """
        keys = set(batch.keys(include_nested=True))
        prompts = _rows(batch, ("tokens", "prompt"))
        responses = _rows(batch, ("tokens", "response"))
        log_probs = _rows(batch, ("log_probs", "response"))
        texts = {name: batch.get(key) for name, key in _TEXTS.items() if key in keys}
        if prompts is None and responses is None and not texts:
            raise DataError(
                "the batch has no ('tokens', 'prompt'), ('tokens', 'response') or ('text', ...) to read: it is none "
                "that a collector delivered"
            )
        fields: dict[str, Any] = dict(texts)
        if prompts is not None:
            masks = [torch.ones_like(row) for row in prompts]
            fields |= {"tokens": padded(prompts, pad_id, left=True), "token_list": _lists(prompts)}
            fields["attention_mask"] = padded(masks, 0, left=True)
        if responses is not None:
            fields["tokens_response"] = padded(responses, pad_id)
            fields["tokens_response_list"] = _lists(responses)
        if log_probs is not None:
            fields["log_probs"] = padded(log_probs, 0.0)
        return cls(**fields, logits=batch.get("logits", None), batch_size=batch.batch_size)

    def to_batch(self) -> TensorDict:
        """The same under rlpost's nested keys, ids and log-probs ragged again.

        What these names do not tell is left out: which ids of a reply the model sampled, versions,
        rewards. (`to_tensordict` gives a TensorDict of the flat names.) Raises DataError where nothing
        says how long a row is without its padding.
        """
        prompts = self._unpadded("token_list", self.tokens, "tokens")
        responses = self._unpadded("tokens_response_list", self.tokens_response, "tokens_response")
        tokens = {name: rows for name, rows in (("prompt", prompts), ("response", responses)) if rows is not None}
        batch: dict[str, Any] = {}
        if prompts is not None and responses is not None:
            tokens["full"] = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
            seen = [torch.ones_like(row, dtype=torch.bool) for row in tokens["full"]]
            batch["masks"] = {"all_attention_mask": ragged(seen)}
        if tokens:
            batch["tokens"] = {name: ragged(rows) for name, rows in tokens.items()}
        if self.log_probs is not None:
            if responses is None:
                raise DataError("log_probs without tokens_response_list do not say how long each reply is: give it")
            lengths = [row.numel() for row in responses]
            batch["log_probs"] = {
                "response": ragged([row[:length] for row, length in zip(self.log_probs, lengths, strict=True)])
            }
        texts = {key[1]: getattr(self, name) for name, key in _TEXTS.items() if getattr(self, name) is not None}
        if texts:
            batch["text"] = {name: strings(list(values)) for name, values in texts.items()}
        if self.logits is not None:
            batch["logits"] = self.logits
        return TensorDict(batch, batch_size=self.batch_size)

    def _unpadded(self, list_name: str, padded: torch.Tensor | None, name: str) -> list[torch.Tensor] | None:
        """The ids of each row without padding; None where there are none."""
        given = getattr(self, list_name)
        if given is not None:
            return [torch.as_tensor(row, dtype=torch.int64) for row in given]
        if padded is None:
            return None
        if name == "tokens" and self.attention_mask is not None:
            return [row[mask.bool()] for row, mask in zip(padded, self.attention_mask, strict=True)]
        needed = "attention_mask or token_list" if name == "tokens" else list_name
        raise DataError(f"{name} does not say which of its ids are padding: give {needed}")


_LISTS = ("token_list", "tokens_response_list")
_TEXTS = {"text": ("text", "prompt"), "text_response": ("text", "response")}


def _rows(batch: TensorDictBase, key: tuple[str, str]) -> list[torch.Tensor] | None:
    """The ragged field `key` as one tensor a row; None where the batch has none."""
    values = batch.get(key, None)
    return None if values is None else ragged_rows(values)


def _lists(rows: Sequence[torch.Tensor]) -> NonTensorStack:
    return strings([row.tolist() for row in rows])
