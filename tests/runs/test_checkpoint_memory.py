"""What writing a checkpoint holds beside the training: little, however large the model is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = r"""
import sys
from functools import partial
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from rlpost.model.load import save_model
from rlpost.model.conversion import tiny_tokenizer
from rlpost.model.optim import optimizer_tensors
from rlpost.runs.checkpoint import save_checkpoint

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e6

shape = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30)
heads = dict(num_attention_heads=9, num_key_value_heads=3)
model = LlamaForCausalLM(LlamaConfig(vocab_size=49152, tie_word_embeddings=True, **shape, **heads))
optimizer = torch.optim.AdamW(model.parameters())
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
optimizer.zero_grad()
folder = Path(sys.argv[1])
for step in (1, 2):  # the first brings in what writing imports
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak()
    save_checkpoint(folder, step, write_model=partial(save_model, model, tiny_tokenizer()), state={},
                    tensors=optimizer_tensors(model, optimizer), keep_last=1)
print(sum(p.numel() for p in model.parameters()), peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_saving_a_checkpoint_copies_no_tensor(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    parameters, more = ended.stdout.split()
    assert int(parameters) > 130_000_000  # 0.54 GB, and 1.1 GB of moments
    assert float(more) <= 0.2, f"{more} GB more while it was written"
