"""A worker that keeps what it is sent in a dictionary, for both sides of a test of two processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch

from rlpost.policies.vllm_worker import vLLMWorker


class Model:
    """As vLLM's models say which of their weights are made of several."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


class Worker(vLLMWorker):
    """What vLLM's own worker gives the extension, with a dictionary for a model."""

    rank = 0
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.get_model = Model
        self.reload_weights = self._reload
        self.compute_weight_checksums = lambda: {name: str(w.tolist()) for name, w in self.weights.items()}

    def _reload(self, *, weights_iterator: Iterable[tuple[str, torch.Tensor]], is_checkpoint_format: bool) -> None:
        assert is_checkpoint_format
        self.weights.update(weights_iterator)
