"""Losses and advantages: tensors in, tensors out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpost.lazy import lazy_names

if TYPE_CHECKING:
    from rlpost.objectives import functional as functional
    from rlpost.torchrl.grpo_loss import GRPOLoss as GRPOLoss
    from rlpost.torchrl.grpo_loss import GRPOLossOutput as GRPOLossOutput
    from rlpost.torchrl.mc_advantage import MCAdvantage as MCAdvantage
    from rlpost.torchrl.sft_loss import SFTLoss as SFTLoss
    from rlpost.torchrl.sft_loss import SFTLossOutput as SFTLossOutput

__getattr__, __dir__ = lazy_names(__name__, __file__)
