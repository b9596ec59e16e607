"""Folders that pass for a model as far as that shows without loading one."""

from __future__ import annotations

import json
from pathlib import Path


def write_model(folder: Path, **config: object) -> Path:
    """The smallest folder that is whole: a configuration, a tokenizer, one tensor of one number."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "tokenizer.json").write_text("{}")
    write_weights(folder / "model.safetensors")
    return folder


def write_weights(file: Path, name: str = "w") -> None:
    """A safetensors file that holds the float32 1.0, as its format is described."""
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\x00\x00\x80\x3f")
