"""How a policy is called on a TensorDict: what it reads, what it writes, and how it samples then."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch

from rlpost.data.input_mode import InputMode
from rlpost.data.ragged import Key
from rlpost.errors import ConfigError
from rlpost.nearest import did_you_mean, nearest
from rlpost.settings import SamplingSettings

# words of `generate_kwargs`, under the name that both spellings of one thing share
SPELLINGS = {
    "max_new_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "num_return_sequences": "num_samples",
    "n": "num_samples",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "stop": "stop",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "do_sample": "do_sample",
}
SAMPLING = tuple(field.name for field in fields(SamplingSettings))  # those that say how a completion is drawn
# what other samplers know and this one has not: the trained log-probs would be of another distribution
NOT_SAMPLED_WITH = ("repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(frozen=True)
class Face:
    """The TensorDict face of a policy, `policy(tensordict)`.

    With `generate` it takes the model's turn: it reads the prompts as `input_mode` says, and writes
    text, tokens, masks, log-probs and, in the mode history, messages, each with `prompt`,
    `response` and `full`; `rlpost.torchrl.writing` says how. Without, it gives the log-probs of
    whole sequences, `("log_probs", "full")`, where the first token, which nothing predicts, has 0.

    Where ids are there they are read, whatever the mode: a conversation under way goes on from
    those that were sampled, and text is never tokenised a second time. `input_key` names an entry
    that is to be read in their stead.

    `generate_kwargs`: `max_new_tokens`, `num_return_sequences` (or `num_samples` of its own),
    `do_sample`, and `temperature`, `top_p`, `top_k`, `min_p` and `stop` as in `SamplingSettings`;
    `max_tokens` and `n` are other words for the first two, `stop_strings` and `stop_sequences` for the last.
    `num_samples=n` turns a batch (B,) into (B, n). `pad_output` writes dense tensors, prompts
    padded on the left and responses on the right, for ragged ones. `inplace`: the TensorDict itself
    is written into and returned; False: a copy of it; "empty": a new one with what is written
    alone; None: itself where the batch keeps its shape, which has to be one row or one dimension.
    What is written goes to `device`. A group whose `..._key` is None is not written.
    `chat_template_name` names a template of `rlpost.data.chat_templates`, for the tokenizer's own.

    Raises ConfigError for what contradicts itself or is unknown.
    """

    input_mode: InputMode | str = InputMode.history
    input_key: Key | None = None
    generate: bool = True
    generate_kwargs: Mapping[str, Any] = field(default_factory=dict)
    pad_output: bool = False
    inplace: bool | Literal["empty"] | None = None
    device: torch.device | str | None = None
    num_samples: int | None = None
    chat_template_name: str | None = None
    return_log_probs: bool = True
    history_key: str | None = "history"
    text_key: str | None = "text"
    tokens_key: str | None = "tokens"
    masks_key: str | None = "masks"
    log_probs_key: str | None = "log_probs"

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_mode", InputMode.of(self.input_mode))
        object.__setattr__(self, "generate_kwargs", _one_spelling(self.generate_kwargs))
        if not self.generate and not self.return_log_probs:
            raise ConfigError(
                "generate=False with return_log_probs=False leaves nothing to give: leave one of them out"
            )
        if not self.generate and (self.num_samples or "num_samples" in self.generate_kwargs):
            raise ConfigError("num_samples is a number of completions, and generate=False samples none: leave it out")
        if self.num_samples is not None and "num_samples" in self.generate_kwargs:
            raise ConfigError("num_samples is given twice, once in generate_kwargs: leave one out")
        for name in ("samples_per_prompt", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name.replace('samples_per_prompt', 'num_samples')}={value!r} must be at least 1")
        if self.inplace is True and self.samples_per_prompt is not None:
            raise ConfigError("num_samples gives a batch another shape, so inplace=True cannot be: leave it out")

    @property
    def mode(self) -> InputMode:
        """`input_mode`, as the enumeration it is."""
        return InputMode.of(self.input_mode)

    @property
    def samples_per_prompt(self) -> int | None:
        """n of the batch (B, n); None: the batch stays (B,)."""
        return self.num_samples if self.num_samples is not None else self.generate_kwargs.get("num_samples")

    @property
    def max_new_tokens(self) -> int | None:
        """How many tokens a completion has at most, besides what its conversation says; None: no other limit."""
        return self.generate_kwargs.get("max_new_tokens")

    @property
    def prompt_key(self) -> Key:
        """The entry that is read in this mode, where no ids are there."""
        if self.input_key is not None:
            return self.input_key
        group = getattr(self, f"{self.mode.value}_key") or self.mode.value
        return (group, "prompt" if self.generate else "full")

    def sampling(self, settings: SamplingSettings | None) -> SamplingSettings:
        """`settings`, else the defaults, changed by what `generate_kwargs` says. Raises ConfigError."""
        asked = {name: self.generate_kwargs[name] for name in SAMPLING if name in self.generate_kwargs}
        greedy = self.generate_kwargs.get("do_sample") is False
        if greedy and asked.get("temperature", 0.0) != 0:
            raise ConfigError(
                f"do_sample=False is greedy, and temperature={asked['temperature']:g} is not: leave one out"
            )
        if self.generate_kwargs.get("do_sample") and asked.get("temperature") == 0:
            raise ConfigError("do_sample=True with temperature=0 contradicts itself: leave one out")
        return replace(settings or SamplingSettings(), **asked, **({"temperature": 0.0} if greedy else {}))

    def with_template(self, tokenizer: Any) -> Any:
        """`tokenizer`, with the chat template that this face names: a copy then. Raises ConfigError for none."""
        if self.chat_template_name is None:
            return tokenizer
        from rlpost.data.chat_templates import chat_template

        changed = copy.copy(tokenizer)
        changed.chat_template = chat_template(self.chat_template_name).template
        return changed


def _one_spelling(given: Mapping[str, Any]) -> dict[str, Any]:
    """The words of `generate_kwargs` under one name each. Raises ConfigError for two of one, and for others."""
    chosen: dict[str, Any] = {}
    words: dict[str, str] = {}
    for word, value in given.items():
        if word in NOT_SAMPLED_WITH:
            raise ConfigError(
                f"generate_kwargs: rlpost samples with temperature, top_p, top_k and min_p alone; leave {word} out"
            )
        if word not in SPELLINGS:
            near = did_you_mean(nearest(word, SPELLINGS), f"the words are {', '.join(SPELLINGS)}")
            raise ConfigError(f"generate_kwargs has no {word!r}{near}")
        name = SPELLINGS[word]
        if name in chosen:
            raise ConfigError(f"generate_kwargs: {words[name]} and {word} are two words for one thing: leave one out")
        chosen[name], words[name] = value, word
    return chosen
