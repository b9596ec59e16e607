"""Text as token ids, and ids as text."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from rlpost.data.ragged import Key, column, padded, padding_id, ragged, strings
from rlpost.envs.transforms.base import Transform
from rlpost.errors import ConfigError, DataError


class Tokenizer(Transform):
    """Writes the text under `in_key` as ids under `out_key`, an attention mask beside them; `inverse` reads them back.

    `tokenizer` is one of transformers or the folder or hub id of one, which is read when it is first
    needed. Ids and mask are int64, ragged (B, *), or with `padding` (B, T), padded on the left with the
    tokenizer's pad token, else its end of turn, else 0. The mask, 1 on ids and 0 on pads, is
    `attention_mask` in the same group. Special tokens are those that stand in the text, and with
    `add_special_tokens` those that the tokenizer puts around it; `skip_special_tokens` leaves them out of
    the text again.

    Raises ConfigError without a tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        in_key: Key = ("text", "prompt"),
        out_key: Key = ("tokens", "prompt"),
        padding: bool = False,
        add_special_tokens: bool = False,
        skip_special_tokens: bool = False,
    ) -> None:
        if tokenizer is None:
            raise ConfigError(
                "Tokenizer has no tokenizer, and none is downloaded unasked: give one of transformers, or the path of "
                "a model's folder"
            )
        self._tokenizer = tokenizer
        self.in_key = in_key
        self.out_key = out_key
        self.mask_key: Key = "attention_mask" if isinstance(out_key, str) else (*out_key[:-1], "attention_mask")
        self.padding = padding
        self.add_special_tokens = add_special_tokens
        self.skip_special_tokens = skip_special_tokens

    @property
    def tokenizer(self) -> Any:
        """The tokenizer itself, read first where a path was given. Raises DataError where it cannot be read."""
        if isinstance(self._tokenizer, str):
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._tokenizer, trust_remote_code=False)
            except (OSError, ValueError) as error:
                reason = str(error).partition("\n")[0]
                raise DataError(f"no tokenizer could be read from {self._tokenizer!r}: {reason}") from error
        return self._tokenizer

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ids and mask. Raises DataError without the text."""
        self._require(tensordict, self.in_key)
        texts = column(tensordict, self.in_key)
        encoded = [self.tokenizer(text, add_special_tokens=self.add_special_tokens)["input_ids"] for text in texts]
        rows = [torch.tensor(ids, dtype=torch.int64) for ids in encoded]
        masks = [torch.ones_like(row) for row in rows]
        tensordict.set(self.out_key, self._together(rows, padding_id(self.tokenizer)))
        return tensordict.set(self.mask_key, self._together(masks, 0))

    def inverse(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the text of the ids, those of a padded tensor that the mask says. Raises DataError without either."""
        self._require(tensordict, self.out_key)
        rows = column(tensordict, self.out_key)
        if not tensordict.get(self.out_key).is_nested:
            self._require(tensordict, self.mask_key)
            rows = [row[mask.bool()] for row, mask in zip(rows, column(tensordict, self.mask_key), strict=True)]
        texts = [self.tokenizer.decode(row.tolist(), skip_special_tokens=self.skip_special_tokens) for row in rows]
        return tensordict.set(self.in_key, strings(texts))

    def _require(self, tensordict: TensorDictBase, key: Key) -> None:
        if key not in tensordict.keys(include_nested=True):
            there = ", ".join(sorted(str(name) for name in tensordict.keys(include_nested=True)))
            raise DataError(f"there is no {key!r}, only {there or 'nothing'}: set in_key and out_key to what there is")

    def _together(self, rows: list[torch.Tensor], pad: int) -> torch.Tensor:
        if not self.padding:
            return ragged(rows)
        return padded(rows, pad, left=True)
