"""Losses and advantages: tensors in, tensors out."""

from typing import TYPE_CHECKING

from rlpost.imports import lazy_names

if TYPE_CHECKING:
    from rlpost.objectives import functional as functional
    from rlpost.torchrl.buffer_transforms import MCAdvantage as MCAdvantage
    from rlpost.torchrl.losses import DistillationLoss as DistillationLoss
    from rlpost.torchrl.losses import DistillationLossOutput as DistillationLossOutput
    from rlpost.torchrl.losses import GRPOLoss as GRPOLoss
    from rlpost.torchrl.losses import GRPOLossOutput as GRPOLossOutput
    from rlpost.torchrl.losses import SFTLoss as SFTLoss
    from rlpost.torchrl.losses import SFTLossOutput as SFTLossOutput

__getattr__, __dir__ = lazy_names(__name__, __file__)
