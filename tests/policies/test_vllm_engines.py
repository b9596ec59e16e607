"""What stands around vLLM's engines, without vLLM."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlpost.errors import PolicyError
from rlpost.model.weights import SavedWeights
from rlpost.policies.vllm_engine import unreached_by_the_terminal, with_head

CHILD = """
import signal, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit(3))  # as an engine does, which then ends
signal.signal(signal.SIGHUP, lambda *_: sys.exit(3))
print("begun", flush=True)
sys.stdin.readline()
"""


def test_what_an_engine_runs_in_outlives_ctrl_c_and_a_closed_terminal() -> None:
    def begin() -> subprocess.Popen[str]:
        unreached_by_the_terminal()
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-S", "-c", CHILD], stdin=pipe, stdout=pipe, text=True)

    with concurrent.futures.ThreadPoolExecutor(1) as loop:
        child = loop.submit(begin).result()
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(child.pid, number)
    child.communicate("\n")
    assert child.returncode == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGHUP} == set()


def test_a_head_that_a_folder_leaves_out_as_tied_is_written_beside_links_to_the_rest(tmp_path: Path) -> None:
    embedding = torch.arange(6.0).reshape(3, 2)
    save_file({"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    weights = SavedWeights(tmp_path)
    with with_head(tmp_path, weights) as whole:
        written = SavedWeights(whole)
        assert set(written) == {*weights, "lm_head.weight"}
        assert torch.equal(written["lm_head.weight"], embedding)
    assert not whole.exists()
    assert set(SavedWeights(tmp_path)) == set(weights)
    with pytest.raises(PolicyError, match=r"holds no lm_head\.weight"), with_head(tmp_path, {"x": embedding}):
        """Not reached."""
    with with_head(tmp_path, {"lm_head.weight": embedding}) as as_it_is:
        assert as_it_is == tmp_path
