"""Losses and advantages: tensors in, tensors out."""

from rlpost.objectives.mc_advantage import MCAdvantage as MCAdvantage
from rlpost.objectives.grpo import GRPOLoss as GRPOLoss
from rlpost.objectives.grpo import GRPOLossOutput as GRPOLossOutput
