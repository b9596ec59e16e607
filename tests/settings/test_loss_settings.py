"""The losses' settings: what they refuse, and that they say what the functions do."""

from __future__ import annotations

from dataclasses import fields

import pytest

from rlpost.catalog import CHOICES, TRAIN_GRPO
from rlpost.config.compose import compose
from rlpost.config.schema import options
from rlpost.errors import ConfigError
from rlpost.objectives.aggregation import CORRECTIONS
from rlpost.objectives.functional import VARIANTS
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.settings import PolicyLossSettings
from tests.says import Says


@pytest.mark.parametrize("name", VARIANTS)
def test_every_loss_has_the_coefficients_of_its_function(name: str) -> None:
    assert set(options("loss", TRAIN_GRPO)) == set(VARIANTS)
    settings = compose(TRAIN_GRPO, [f"loss={name}"]).settings.loss
    assert type(settings) is CHOICES["loss"][name].cls
    shared = {field.name for field in fields(PolicyLossSettings)}
    own = {f.name: getattr(settings, f.name) for f in fields(settings)}
    assert {key: value for key, value in own.items() if key not in shared} == VARIANTS[name].coefficients
    objective = PolicyObjective(settings, temperature=1.0, max_completion_tokens=8)
    assert objective.coefficients == VARIANTS[name].coefficients
    assert objective.aggregation == VARIANTS[name].aggregation  # the command averages as Python does


def test_the_bounds_in_the_comments_are_those_of_corrections() -> None:
    cut, masked = (0.0, 2.0), (0.0, 3.0)
    told = {"tis_token": cut, "tis_sequence": cut, "mis_token": masked, "mis_sequence": masked, "icepop": (0.5, 5.0)}
    told |= dict.fromkeys(("geo_mask", "geo_mask_tis"), (0.99, 1.01))
    assert {name: (own.low, own.high) for name, own in CORRECTIONS.items()} == told


REFUSED = """
    loss.clip_low=0
    loss.clip_low=1.5
    loss.clip_high=-1
    loss.kl_coef=-1
    loss.sampler_ratio_high=3
    loss.sampler_correction=icepop loss.sampler_ratio_low=2
    loss.sampler_correction=icepop loss.sampler_ratio_high=0.5
    loss.sampler_correction=tis_token loss.ratio_to=sampler
    loss=reinforce loss.ratio_to=sampler
    loss.ref_sync_every=10
    loss.ref_sync_every=10 loss.kl_coef=0.1 lora.enabled=true
    loss.kl_in=reward loss.kl_coef=0.1 advantage.estimator=gdpo
    loss.kl_in=reward
    loss=reinforce loss.clip_low=0.1
"""


def test_what_cannot_work_is_refused_before_a_model_is_loaded(says: Says) -> None:
    told = []
    for words in map(str.strip, REFUSED.strip().splitlines()):
        with pytest.raises(ConfigError) as refused:
            compose(TRAIN_GRPO, words.split())
        told.append(f"{words}\n  {refused.value}")
    says("train", "\n".join(told))
