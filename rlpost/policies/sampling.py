"""How completions are drawn where no temperature is set, and what the drawing leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rlpost.errors import ConfigError
from rlpost.settings import DrawSettings, EvalSamplingSettings, SampledSettings, SamplingSettings

MORE_IDS = 8  # than a stop text has bytes: of ids that are none of its characters


def training_sampling(settings: SampledSettings) -> SamplingSettings:
    """Of the completions that are learned from: at the environment's own temperature."""
    return _drawn(settings.sampling, settings.env.train_temperature)


def evaluation_sampling(asked: EvalSamplingSettings, samples: int) -> SamplingSettings:
    """Of an evaluation: greedily for one completion a prompt, else at temperature 1."""
    return _drawn(asked, 0.0 if samples == 1 else 1.0)


def check_whole(sampling: SamplingSettings) -> None:
    """Raise ConfigError where `sampling` draws from a part of the distribution, and the whole one is asked for."""
    if sampling.filters and sampling.temperature > 0:
        key, value = next(iter(sampling.filters.items()))
        raise ConfigError(
            f"{key}={value:g} is for sampling alone: log-probs of whole sequences are those of the whole distribution"
        )


def ends_with_stop(tokenizer: Any, ids: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether the text of the last of `ids`, special tokens left out, holds one of the texts in `stop`.

    As many are looked at as a text can be spread over: asked after each id, this is True at the first that
    completes one. A character that is not whole yet is no text.
    """
    last = ids[-max(len(text.encode()) for text in stop) - MORE_IDS :]
    said = tokenizer.decode(last, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return any(text in said.rstrip("\ufffd") for text in stop)


def _drawn(asked: DrawSettings, usual: float) -> SamplingSettings:
    said: dict[str, Any] = {field.name: getattr(asked, field.name) for field in fields(DrawSettings)}
    return SamplingSettings(**{**said, "temperature": usual if asked.temperature is None else asked.temperature})
