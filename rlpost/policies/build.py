"""Policies, built from their settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rlpost.catalog import row_of
from rlpost.errors import ConfigError
from rlpost.model.load import context_length
from rlpost.policies.base import Policy
from rlpost.settings import EnvSettings, ModelSettings, PolicySettings, SamplingSettings, VLLMSettings


def build_policy(
    settings: PolicySettings,
    folder: Path,
    tokenizer: Any,
    *,
    model: PreTrainedModel | None,
    model_settings: ModelSettings,
    env_settings: EnvSettings,
    sampling: SamplingSettings,
    seed: int,
    adapter_rank: int | None = None,
    adapter: Path | None = None,
) -> Policy:
    """The policy of `settings`, which are resolved; `model` is the trainer's, which transformers samples from.

    With an `adapter_rank` vLLM keeps the weights of `folder` and takes pushes of an adapter beside them,
    the one of the folder `adapter` to begin with.
    """
    wanted = env_settings.longest_conversation()
    longest = min(wanted, context_length(folder) or wanted)
    if adapter_rank is not None and not isinstance(settings, VLLMSettings):
        raise ConfigError("lora.push=adapter needs vLLM, which is not installed: install it, or leave it out")
    policy: Policy = row_of("policy", type(settings)).build(
        settings,
        folder,
        tokenizer,
        model=model,
        model_settings=model_settings,
        sampling=sampling,
        seed=seed,
        **({} if adapter_rank is None else {"adapter_rank": adapter_rank, "adapter": adapter}),
    )
    policy.max_model_len = longest  # so that a conversation has the same room whatever samples it
    return policy
