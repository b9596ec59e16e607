"""Losses and advantages: tensors in, tensors out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpost.lazy import lazy_names

if TYPE_CHECKING:
    from rlpost.objectives import functional as functional
    from rlpost.objectives.grpo import GRPOLoss as GRPOLoss
    from rlpost.objectives.grpo import GRPOLossOutput as GRPOLossOutput
    from rlpost.objectives.mc_advantage import MCAdvantage as MCAdvantage
    from rlpost.objectives.sft import SFTLoss as SFTLoss
    from rlpost.objectives.sft import SFTLossOutput as SFTLossOutput

__getattr__, __dir__ = lazy_names(__name__, __file__)
