"""How completions are drawn where no temperature is set."""

from __future__ import annotations

from rlpost.settings import EvalSamplingSettings, SampledSettings, SamplingSettings


def training_sampling(settings: SampledSettings) -> SamplingSettings:
    """Of the completions that are learned from: at the environment's own temperature."""
    own, asked = settings.env.train_temperature, settings.sampling
    return SamplingSettings(own if asked.temperature is None else asked.temperature, asked.top_p)


def evaluation_sampling(asked: EvalSamplingSettings, samples: int) -> SamplingSettings:
    """Of an evaluation: greedily for one completion a prompt, else at temperature 1."""
    usual = 0.0 if samples == 1 else 1.0
    return SamplingSettings(usual if asked.temperature is None else asked.temperature, asked.top_p)
