"""Which groups are worth training on: the rule of DAPO's dynamic sampling."""

from __future__ import annotations

from tensordict import TensorDictBase

from rlpost.objectives.advantage import equal_up_to_rounding
from rlpost.objectives.overlong import PART


def has_spread(group: TensorDictBase) -> bool:
    """Whether the task rewarded the valid completions of a group (G,) differently.

    The condition under eq. 11 of DAPO (arXiv:2503.14476), for rewards of any value. The overlong
    penalty is left out, since lengths alone do not tell a good completion from a bad one.
    """
    rewards = group["next", "reward"].squeeze(-1)
    parts = group["next"].get("reward_parts", None)
    if parts is not None and PART in parts:
        rewards = rewards - parts[PART].squeeze(-1)
    return not equal_up_to_rounding(rewards[group["valid"] & rewards.isfinite()])
