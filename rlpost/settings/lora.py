"""A low-rank change that is trained in the place of the model's own weights."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from rlpost.errors import ConfigError
from rlpost.settings.checks import Settings, limited

LARGEST_PUSHED_RANK = 512


class Push(Enum):
    """What a weight push brings to vLLM: the merged weights, or the adapter beside the starting ones."""

    merged = "merged"
    adapter = "adapter"


@dataclass
class LoRASettings(Settings, group="lora"):
    """LoRA (arXiv:2106.09685): each adapted layer computes W x + (alpha / rank) B A x; A and B are trained.

    There is no dropout: with it the trainer's log-probs would never match the sampler's. A and B
    want about ten times the learning rate of full training.
    """

    enabled: bool = False  # train an adapter instead of the weights; give optim.lr about 10 times as much
    rank: int = limited(16, at_least=1)  # rows of A and columns of B
    alpha: int = limited(32, at_least=1)  # the adapter counts alpha / rank times
    target_modules: list[str] | None = None  # names of layers; None: every linear layer but the output head
    path: str | None = None  # peft adapter to start from; merged into the model first
    push: Push = Push.merged  # what reaches vLLM: the merged weights, or the adapter itself

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_modules is not None and not self.target_modules:
            raise ConfigError("lora.target_modules=[] adapts nothing: name layers, or leave it out for all of them")
        if self.push is Push.adapter and self.rank > LARGEST_PUSHED_RANK:
            raise ConfigError(
                f"lora.rank={self.rank} is more than vLLM applies beside a model ({LARGEST_PUSHED_RANK}): lower it, or "
                "leave lora.push=adapter out"
            )
        if self.enabled:
            return
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                raise ConfigError(f"lora.{field.name} means nothing while lora.enabled=false: add lora.enabled=true")
