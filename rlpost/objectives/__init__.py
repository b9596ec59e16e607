"""Losses and advantages: tensors in, tensors out."""

from rlpost.objectives import functional as functional
from rlpost.objectives.grpo import GRPOLoss as GRPOLoss
from rlpost.objectives.grpo import GRPOLossOutput as GRPOLossOutput
from rlpost.objectives.mc_advantage import MCAdvantage as MCAdvantage
from rlpost.objectives.sft import SFTLoss as SFTLoss
from rlpost.objectives.sft import SFTLossOutput as SFTLossOutput
