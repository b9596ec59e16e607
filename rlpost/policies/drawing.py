"""How completions are drawn: at which temperature, from how much of the distribution, and up to which text.

The plan of a command says it before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from rlpost.errors import ConfigError
from rlpost.settings import DrawSettings, EnvSettings, EvalSamplingSettings, SamplingSettings, TrainSamplingSettings

MORE_IDS = 8  # looked at beyond the bytes of a stop string, for ids that decode to none of its characters


def training_sampling(settings: TrainSamplingSettings, env: EnvSettings) -> SamplingSettings:
    """How training samples completions: at the environment's own temperature unless one is set."""
    return _drawn(settings, env.train_temperature)


def evaluation_sampling(settings: EvalSamplingSettings, samples: int) -> SamplingSettings:
    """How an evaluation samples: greedily for one completion a prompt, otherwise at temperature 1."""
    return _drawn(settings, 0.0 if samples == 1 else 1.0)


def _drawn(settings: DrawSettings, temperature: float) -> SamplingSettings:
    """`settings`, at `temperature` if they set none."""
    values: dict[str, Any] = {field.name: getattr(settings, field.name) for field in fields(DrawSettings)}
    if settings.temperature is None:
        values["temperature"] = temperature
    return SamplingSettings(**values)


def check_whole(sampling: SamplingSettings) -> None:
    """Raise ConfigError if `sampling` filters the distribution: log-probs of whole sequences need all of it."""
    if sampling.filters and sampling.temperature > 0:
        key, value = next(iter(sampling.filters.items()))
        raise ConfigError(
            f"{key}={value:g} is for sampling alone: log-probs of whole sequences are those of the whole distribution"
        )


def stop_test(tokenizer: Any, stop: Sequence[str]) -> Callable[[Sequence[int]], bool]:
    """A function of the sampled ids: whether their last one completes one of the strings in `stop`.

    To be called after each id. It reads as many ids as a stop string can be spread over; incomplete characters do not
    count, and special tokens only if a stop string has one.
    """
    longest = max((len(text.encode()) for text in stop), default=0) + MORE_IDS
    hidden = not stops_at_special(tokenizer, stop)

    def ended(ids: Sequence[int]) -> bool:
        text = tokenizer.decode(ids[-longest:], skip_special_tokens=hidden, clean_up_tokenization_spaces=False)
        return any(each in text.rstrip("\ufffd") for each in stop)

    return ended


def stops_at_special(tokenizer: Any, stop: Sequence[str]) -> bool:
    """Whether a stop string holds a special token, such as "<|eot_id|>", which decoding usually leaves out."""
    added = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    return any(token in text for text in stop for token in special)
