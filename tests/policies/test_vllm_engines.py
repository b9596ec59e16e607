"""What stands around vLLM's engines, without vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlpost.errors import PolicyError
from rlpost.model.weights import SavedWeights
from rlpost.policies.vllm_engine import with_head


def test_a_tied_head_is_written_beside_links_to_the_rest(tmp_path: Path) -> None:
    embedding = torch.arange(6.0).reshape(3, 2)
    save_file({"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    weights = SavedWeights(tmp_path)
    with with_head(tmp_path, weights) as whole:
        written = SavedWeights(whole)
        assert written.keys() == weights.keys() | {"lm_head.weight"}
        assert torch.equal(written["lm_head.weight"], embedding)
    assert not whole.exists()
    assert set(SavedWeights(tmp_path)) == set(weights)
    with pytest.raises(PolicyError, match=r"lm_head\.weight"), with_head(tmp_path, {"x": embedding}):
        """Not reached."""
    with with_head(tmp_path, {"lm_head.weight": embedding}) as as_it_is:
        assert as_it_is == tmp_path
