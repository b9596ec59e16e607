"""Messages as text, and such text as messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase

from rlpost.data.history import History
from rlpost.data.ragged import Key, column, strings
from rlpost.envs.transforms.base import Transform
from rlpost.errors import ConfigError, DataError


class TemplateTransform(Transform):
    """Writes the `History` under `in_key` as text under `out_key`; `inverse` reads such text back.

    The template is `chat_template` (jinja), else the one named `chat_template_name`, else that of
    `tokenizer`; `template_kwargs` are variables for it. Reading back needs a format that
    `History.from_text` knows. Raises ConfigError without a tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        in_key: Key = "history",
        out_key: Key = ("text", "prompt"),
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if tokenizer is None:
            raise ConfigError("TemplateTransform has no tokenizer to write messages with: give the model's")
        self.tokenizer = tokenizer
        self.in_key = in_key
        self.out_key = out_key
        self.chat_template_name = chat_template_name
        self.chat_template = chat_template
        self.add_generation_prompt = add_generation_prompt
        self.template_kwargs = dict(template_kwargs or {})

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the text, a str a row. Raises DataError without a History (B, M), or where the template refuses one."""
        history = tensordict.get(self.in_key, None)
        if not isinstance(history, History):
            raise DataError(f"there is no History under {self.in_key!r} to write: set in_key to where it is")
        texts = history.apply_chat_template(
            self.tokenizer,
            add_generation_prompt=self.add_generation_prompt,
            chat_template=self.chat_template,
            chat_template_name=self.chat_template_name,
            template_kwargs=self.template_kwargs,
        )
        return tensordict.set(self.out_key, strings(texts))

    def inverse(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the messages, a History (B, M), that the text under `out_key` says.

        Raises DataError without that text, UnparsedTextError for one that is no conversation.
        """
        if self.out_key not in tensordict.keys(include_nested=True):
            raise DataError(f"there is no text under {self.out_key!r} to read: set out_key to where it is")
        texts = column(tensordict, self.out_key)
        messages: Any = History.from_text(texts, chat_template_name=self.chat_template_name, tokenizer=self.tokenizer)
        return tensordict.set(self.in_key, messages)
