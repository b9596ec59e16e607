"""How completions are drawn where no temperature is set."""

from __future__ import annotations

from rlpost.settings import EvalSamplingSettings, SampledSettings, SamplingSettings, TrainSamplingSettings


def training_sampling(settings: SampledSettings) -> SamplingSettings:
    """Of the completions that are learned from: at the environment's own temperature."""
    return _drawn(settings.sampling, settings.env.train_temperature)


def evaluation_sampling(asked: EvalSamplingSettings, samples: int) -> SamplingSettings:
    """Of an evaluation: greedily for one completion a prompt, else at temperature 1."""
    return _drawn(asked, 0.0 if samples == 1 else 1.0)


def _drawn(asked: TrainSamplingSettings | EvalSamplingSettings, usual: float) -> SamplingSettings:
    return SamplingSettings(usual if asked.temperature is None else asked.temperature, asked.top_p)
