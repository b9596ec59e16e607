"""Every family of docs/models.md under real vLLM: trained, resumed, with LoRA, and exported; fills the table there.

    scripts/dev/families OUT                        every cell
    scripts/dev/families OUT qwen3 gemma2-tied      some of them
    scripts/dev/families OUT --table                nothing but the table, from what is in OUT

A cell is a family with a tied or an untied head, in a process of its own: about 40 s on two cores. Results are kept
as OUT/CELL.json, and a cell that is there is not run again, so the command can be stopped and goes on. OUT/CELL.log has
the whole output of a cell.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # for the tests' own helpers

DEADLINE = 240.0  # seconds of a cell
GAP = 1e-3  # nats a token: the most that float32 kernels explain
TIED, UNTIED = "tied", "untied"
REPLY = 12  # tokens of a greedy reply
# these must be trained; the others may have a limit
NEEDED = ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "mistral", "phi3", "granite"]
NEEDED += ["olmo2", "smollm3", "glm4"]
# a configuration that real models have, where the table's own is another
OTHERWISE: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": False, "sliding_window": None},
    "falcon": {"ffn_hidden_size": 768},
    "qwen3_next": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "lfm2": {"conv_dim": 192, "block_dim": 192},
    "llama4_text": {"attention_chunk_size": 64, "num_experts_per_tok": 1},
    "deepseek_v2": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
WIDE_HEADS = {"head_dim": 256, "query_pre_attn_scalar": 256}
# what GGUF covers of a family: transformers reads the real models' figures in every file, and no window in llama's
FOR_GGUF: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 128},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **WIDE_HEADS},
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": None, **WIDE_HEADS},
}
# what vLLM computes in bfloat16 alone on a CPU
ROUNDED = ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear"]
ROUNDED_GAP = 0.1
REWARD = """
def reward(completions, **columns):
    return [float(sum(text.encode()) % 7) for text in completions]
"""
QUESTIONS = ["Name a colour.", "What is 17 + 25?", "the cat sat", "Say it again, Sam."]
WORDS = [
    *("model.autocast=none", "model.dtype=float32", "eval.enabled=false", "checkpoint.every=1", "gate.every=1"),
    *("prompts_per_step=2", "group_size=4", "env.max_completion_tokens=8", "sampling.temperature=1.0"),
    "env=dataset",
]
VLLM = ["policy=vllm", "policy.dtype=float32", "policy.timeout_seconds=90"]

# what a message shows -> the limit in a few words, for the table
LIMITS: list[tuple[str, str]] = [
    (r"named 'lm_head' in BloomModel", "no: vLLM's reload has no place for its head"),
    (r"no module or parameter named 'lm_head'", "no: vLLM always ties its head"),
    (r"are not supported for now", "no: vLLM does not know the architecture"),
    (r"was supported in vLLM until", "no: vLLM has dropped the architecture"),
    (r"GDN attention requires BF16", "in bfloat16 alone"),
    (r"apply_router_weight_on_input", "no: more than one expert a token"),
    (r"is not supported by MLA", "no: latent attention of 512 + 64 alone"),
    (r"selective_scan_fwd", "no: vLLM has no scan for a CPU"),
    (r"is_act_and_mul=False", "no: vLLM's experts on a CPU have gates"),
    (r"Qwen3_5ForCausalLM'\] failed to be inspected", "no: vLLM wants torchvision"),
    (r"module 'triton' has no attribute|_lib_fn_wrapper", "no: vLLM wants Triton, which has no CPU"),
    (r"no attribute 'num_local_experts'", "no: transformers cannot load its own checkpoint"),
    (r"PEFT:PeftType.LORA\] Module 'out_proj'", "PEFT adapts no out_proj beside Mamba layers"),
    (r"has no linear layer to adapt", "it has no linear layer, Conv1D alone"),
    (r"'model\.layer_norm\.bias'", "no: vLLM knows its weights by other names"),
    (r"Engine core initialization failed", "no: vLLM does not start on it"),
    (r"Field 'bos_token_id' expected int", ""),  # a tiny tokenizer without one: not measured
    (r"it never ended", "no: it hung"),
    (r"too many values to unpack", "no: vLLM replaces transformers' experts by others"),
]
# families for which vLLM's own computation is another, or ends
DIFFERS = {
    "apertus": "a gap of 0.002 nats a token, of unknown cause",
    "doge": "no: vLLM gives other log-probs, 2 nats a token",
    "jetmoe": "no: vLLM fails while it samples",
    "llama4_text": "no: the gate misreads its q and k, which vLLM orders anew",
    "phimoe": "no: vLLM replaces transformers' experts by others",
    "gpt_oss": "no: vLLM's reload leaves its experts as they were",
    "cohere2": "up to its window, which vLLM reads one token longer",
    "lfm2": "no: vLLM's rotary embedding on a CPU gives other log-probs",
    "lfm2_moe": "no: vLLM's rotary embedding on a CPU gives other log-probs",
    "deepseek_v2": "no: vLLM's latent attention on a CPU differs by 2 nats a token",
    "deepseek_v3": "no: vLLM's latent attention on a CPU differs by 2 nats a token",
}


# One cell, in a process of its own


class Cell:
    """The parts of one cell; each leaves its outcome in the cell's file as soon as it ends."""

    def __init__(self, out: Path, name: str) -> None:
        self.name = name
        self.kind, _, head = name.rpartition("-")
        self.tied = head == TIED
        self.file = out / f"{name}.json"
        self.folder = Path(tempfile.mkdtemp(prefix=f"rlpost-{name}-"))
        self.buffers: set[str] = set()  # names, but for their first part, of what is not trained
        self.found: dict[str, Any] = {"kind": self.kind, "tied": self.tied, "parts": {}}

    def run(self) -> None:
        """Run the parts in order. If one fails, note the reason and go on with the parts that need no engine."""
        began = time.monotonic()
        try:
            if self.part("model", self.build):
                under_vllm = self.part("grpo", self.grpo)
                if under_vllm:
                    self.part("resume", self.resume)
                    self.part("lora", self.lora)
                if under_vllm or self.part("transformers", self.without_vllm):
                    self.part("hf", lambda: self.exported("hf", "full"))
                    self.part("gguf", self.gguf)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.found["seconds"] = round(time.monotonic() - began, 1)
        self.write()

    def part(self, name: str, work: Callable[[], dict[str, Any]]) -> bool:
        """Run `work` and note its figures, or why it failed; whether it went well."""
        print(f"== {name}", flush=True)
        self.found["parts"][name] = {"ok": False, "why": "it never ended"}
        self.write()
        began = time.monotonic()
        try:
            told = {"ok": True, **work()}
        except Exception as error:  # noqa: BLE001  the next part goes on
            import traceback

            traceback.print_exc()
            told = {"ok": False, "why": " <- ".join(reasons(error))}
        told["seconds"] = round(time.monotonic() - began, 1)
        self.found["parts"][name] = told
        self.write()
        return told["ok"]

    def write(self) -> None:
        """Replace the cell's file."""
        making = self.file.with_suffix(".tmp")
        making.write_text(json.dumps(self.found, indent=1) + "\n")
        making.replace(self.file)

    # The parts

    def build(self, folder: str = "model", **more: Any) -> dict[str, Any]:
        """A random model and a tokenizer with merges where GGUF needs one, as a folder of transformers."""
        from tests.model_families import talking_model

        tokenizer, size = tokenizer_for(self.kind)
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        more = {**OTHERWISE.get(self.kind, {}), "tie_word_embeddings": self.tied, **more}
        model = talking_model(self.kind, **{**ids, "vocab_size": size, **more})
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if head is not None and (head.weight is embedding.weight) != self.tied:
            raise ValueError(f"transformers keeps the head of {self.kind} {'apart' if self.tied else 'tied'}")
        self.buffers = {name.partition(".")[2] for name, _ in model.named_buffers()}
        model.save_pretrained(self.folder / folder)
        tokenizer.save_pretrained(self.folder / folder)
        (self.folder / "reward.py").write_text(REWARD)
        rows = [json.dumps({"prompt": question}) for question in QUESTIONS]
        (self.folder / "rows.jsonl").write_text("\n".join(rows))
        return {"architecture": type(model).__name__}

    def trained(self, run: str, *words: str, model: str = "model", resume: str | None = None) -> dict[str, Any]:
        """Train, hold the figures to their bounds, and return them."""
        from rlpost.catalog import TRAIN_GRPO
        from tests.trainings import metrics, train_in

        given = [f"model.path={self.folder / model}", *WORDS, f"env.path={self.folder / 'rows.jsonl'}"]
        given += [f"env.reward={self.folder / 'reward.py'}:reward", *words]
        if self.kind in ROUNDED:
            given = ["policy.dtype=bfloat16" if word == "policy.dtype=float32" else word for word in given]
        if train_in(TRAIN_GRPO, self.folder / run, given, resume):
            raise RuntimeError("the training ended with an exit code")
        lines = metrics(self.folder / run)
        gaps, norms = [line["sampler/logprob_gap"] for line in lines], [line["grad_norm"] for line in lines]
        if max(gaps) > (ROUNDED_GAP if self.kind in ROUNDED else GAP):
            raise ValueError(f"the gap is {max(gaps):.2g} nats a token")
        if min(norms) <= 0:
            raise ValueError(f"grad_norm is {norms}: rewards or advantages were equal")
        return {"steps": len(lines), "gap": max(gaps), "grad_norm": min(norms)}

    def grpo(self) -> dict[str, Any]:
        """Two steps with a push after each; every weight has moved."""
        told = self.trained("full", *VLLM, "steps=2", "optim.lr=1e-3")
        return {**told, **self.moved("full"), "own_process": runs_with_transformers_classes(self.folder / "model")}

    def resume(self) -> dict[str, Any]:
        """A third step from the checkpoint."""
        told = self.trained("full", *VLLM, "steps=3", "optim.lr=1e-3", resume="latest")
        if told["steps"] != 3:
            raise ValueError(f"there are {told['steps']} steps instead of 3")
        return told

    def lora(self) -> dict[str, Any]:
        """Two steps of an adapter, which is merged for each push."""
        words = ["lora.enabled=true", "lora.rank=4", "lora.push=merged", "optim.lr=1e-2"]
        told = self.trained("lora", *VLLM, "steps=2", *words)
        return {**told, **self.moved("lora", some=True)}

    def without_vllm(self) -> dict[str, Any]:
        """Two steps sampled with transformers, for a checkpoint to export."""
        return {**self.trained("full", "policy=transformers", "steps=2", "optim.lr=1e-3"), **self.moved("full")}

    def moved(self, run: str, *, some: bool = False) -> dict[str, Any]:
        """How many weights the checkpoint has that differ from the start. Raises if all or any of them do not."""
        import torch

        from rlpost.model.weights import SavedWeights

        before, after = SavedWeights(self.folder / "model"), SavedWeights(self.checkpoint(run) / "model")
        if before.keys() != after.keys():
            raise ValueError(f"the checkpoint has other weights: {sorted(before.keys() ^ after.keys())[:3]}")
        trained = [name for name in before if name.partition(".")[2] not in self.buffers]
        same = sorted(name for name in trained if torch.equal(before[name].float(), after[name].float()))
        if len(same) == len(trained) or (same and not some):
            raise ValueError(f"{len(same)} of {len(trained)} weights have not moved, {same[0]} among them")
        return {"weights": len(trained), "moved": len(trained) - len(same)}

    def checkpoint(self, run: str) -> Path:
        """The last checkpoint of a run."""
        return max((self.folder / run / "checkpoints").glob("step-*"))

    def gguf(self) -> dict[str, Any]:
        """Export to GGUF, of a model of other figures where the family needs them."""
        if self.kind not in FOR_GGUF:
            return self.exported("gguf", "full")
        self.build("other", **FOR_GGUF[self.kind])
        self.trained("other-run", "policy=transformers", "steps=2", "optim.lr=1e-3", model="other")
        return self.exported("gguf", "other-run")

    def exported(self, to: str, run: str) -> dict[str, Any]:
        """Export the last checkpoint, and compare what plain transformers reads in it with the checkpoint itself."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from rlpost.export import export as exporting

        exporting.REPLY = REPLY
        checkpoint, target = self.checkpoint(run), self.folder / f"as-{to}"
        exporting.export(self.folder / run, checkpoint, to, "float32", target)
        file = {"gguf_file": next(target.glob("*.gguf")).name} if to == "gguf" else {}
        tokenizer = AutoTokenizer.from_pretrained(checkpoint / "model")
        own, read = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()
            for folder, more in ((checkpoint / "model", {}), (target, file))
        )
        off, replies = 0.0, set()
        for question in QUESTIONS:
            ids = torch.tensor([tokenizer(question, add_special_tokens=False)["input_ids"]])
            left, right = (greedy(model, ids) for model in (own, read))
            if left != right:
                raise ValueError(f"a greedy reply is {right} instead of {left}")
            replies.add(tuple(left))
            with torch.no_grad():
                logits = [model(ids, use_cache=False).logits.log_softmax(-1) for model in (own, read)]
            off = max(off, (logits[0] - logits[1]).abs().max().item())
        if not off < GAP:
            raise ValueError(f"log-probs are {off:.2g} apart")
        return {"off": off, "replies": len(replies)}


def greedy(model: Any, ids: Any) -> list[int]:
    """A greedy reply by transformers' own generate."""
    made = model.generate(ids, do_sample=False, max_new_tokens=REPLY, pad_token_id=0)
    return made[0, ids.shape[1] :].tolist()


def tokenizer_for(kind: str) -> tuple[Any, int]:
    """A tokenizer, with merges for a family that GGUF covers, and a vocabulary that is larger than it."""
    from rlpost.export.gguf import FAMILIES
    from rlpost.model.conversion import tiny_tokenizer
    from tests.export.checkpoints import QWEN2_WORDS, byte_level, pieces
    from tests.model_families import VOCABULARY

    if kind not in FAMILIES:
        return tiny_tokenizer(), VOCABULARY
    if kind.startswith("gemma"):
        return pieces(), VOCABULARY + 64
    return byte_level(QWEN2_WORDS) if kind.startswith("qwen") else byte_level(), VOCABULARY


def runs_with_transformers_classes(folder: Path) -> bool:
    """Whether vLLM samples this model with transformers' own classes, which it rewrites."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=str(folder), dtype="float32", skip_tokenizer_init=True).create_model_config()
    return config.using_transformers_backend()


def reasons(error: BaseException | None) -> Iterator[str]:
    """The first line of an error and of each error behind it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = str(error.errors()[0]["msg"] if hasattr(error, "errors") else error).strip()  # type: ignore[attr-defined]
        yield f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
        error = error.__cause__ or error.__context__


# All cells


def cells(wanted: list[str]) -> list[str]:
    """The names of the cells to run, the needed families first, then each with the head that it usually has."""
    from tests.model_families import FAMILIES, tiny_config

    def heads(kind: str) -> list[str]:
        usual = getattr(tiny_config(kind), "tie_word_embeddings", False)
        return [TIED, UNTIED] if usual else [UNTIED, TIED]

    others = [kind for kind in FAMILIES if kind not in NEEDED]
    ordered = [f"{kind}-{head}" for kind in NEEDED for head in heads(kind)]
    ordered += [f"{kind}-{heads(kind)[place]}" for place in (0, 1) for kind in others]
    if unknown := [name for name in wanted if name not in FAMILIES and name not in ordered]:
        sys.exit(f"unknown cells: {', '.join(unknown)}; a cell is a family, or a family and -tied or -untied")
    return [name for name in ordered if not wanted or name in wanted or name.rpartition("-")[0] in wanted]


def run_cell(out: Path, name: str) -> dict[str, Any]:
    """Run a cell in a process of its own; its outcome, in which a part that hung or crashed is named."""
    file, log = out / f"{name}.json", out / f"{name}.log"
    file.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"XDG_CACHE_HOME": str(out / "cache"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # tiny models, and maybe other work
    with log.open("w") as output:
        child = subprocess.Popen(
            [sys.executable, __file__, str(out), "--cell", name],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            cwd=ROOT,
        )
        try:
            ended = f"exit code {child.wait(DEADLINE)}"
        except subprocess.TimeoutExpired:
            ended = f"no end after {DEADLINE:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # an engine's process may be left
            child.wait()
    found: dict[str, Any] = {"parts": {"start": {"ok": False, "why": ended}}}
    if file.is_file():
        found = json.loads(file.read_text())
    if "seconds" not in found:
        hung = list(found["parts"])[-1]
        found["parts"][hung] = {"ok": False, "why": f"{ended} in {hung}"}
        found["seconds"] = DEADLINE
        for left in Path(tempfile.gettempdir()).glob(f"rlpost-{name}-*"):
            shutil.rmtree(left, ignore_errors=True)
    for part in found["parts"].values():
        if not part["ok"] and "dead" in part["why"]:
            part["why"] += f" <- {last_error(log)}"
    found.update(kind=name.rpartition("-")[0], tied=name.endswith(f"-{TIED}"))
    file.write_text(json.dumps(found, indent=1) + "\n")
    return found


def last_error(log: Path) -> str:
    """The last error that an engine's own process printed."""
    lines = re.findall(r"(?:ERROR [^\]]*\] |\(EngineCore[^)]*\) )+(\w+(?:Error|Exception): .*)", log.read_text())
    return lines[-1] if lines else ""


def told(name: str, found: dict[str, Any]) -> str:
    """A line on a cell."""
    parts = [
        f"{part} {each.get('seconds', 0):.0f}s" if each["ok"] else f"{part} FAILED ({each['why'][:200]})"
        for part, each in found["parts"].items()
    ]
    return f"{name:28} {found['seconds']:5.0f}s  {', '.join(parts)}"


# The table


def limit(kind: str, why: str) -> str:
    """The limit behind a failure, in a few words."""
    if kind in DIFFERS and re.search(r"the gap is|disagree (at the start|after)|EngineDeadError", why):
        return DIFFERS[kind]
    for pattern, words in LIMITS:
        if re.search(pattern, why):
            return words
    return why.split(" <- ")[-1][:100].replace("|", "/")


def column(of: dict[str, dict[str, Any]], part: Callable[[dict[str, Any]], str | None]) -> str:
    """One word if both heads have the same outcome, else one for each that was tried; None: there is no such head."""
    words = {head: told for head, found in of.items() if (told := part(found)) is not None}
    if len(of) == 2 and len({*words.values()}) == 1:
        return next(iter(words.values()))
    return "; ".join(f"{head}: {told}" for head, told in words.items())


def under_vllm(found: dict[str, Any]) -> str | None:
    """What the table says of a cell under vLLM."""
    parts = found["parts"]
    if not parts.get("model", {}).get("ok"):
        return None
    for name in ("grpo", "resume", "lora"):
        if not parts[name]["ok"]:
            return ("" if name == "grpo" else f"trained, but {name}: ") + limit(found["kind"], parts[name]["why"])
    if found["kind"] in ROUNDED:
        return "trained, in bfloat16 alone"
    return "trained, own process" if parts["grpo"]["own_process"] else "trained"


def exports(found: dict[str, Any]) -> str | None:
    """What the table says of a cell's exports."""
    parts = found["parts"]
    if not parts.get("model", {}).get("ok") or "hf" not in parts:
        return None
    return ", ".join(to for to in ("hf", "gguf") if parts[to]["ok"]) or "no"


def write_table(out: Path) -> None:
    """Put what OUT has into docs/models.md."""
    from tests.model_families import FAMILIES, write_measured

    measured: dict[str, tuple[str, str]] = {}
    for kind in FAMILIES:
        files = {head: out / f"{kind}-{head}.json" for head in (TIED, UNTIED)}
        of = {head: json.loads(file.read_text()) for head, file in files.items() if file.is_file()}
        of = {head: found for head, found in of.items() if "seconds" in found}  # the others are still running
        if of:
            measured[kind] = column(of, under_vllm), column(of, exports)
    write_measured(measured)


def main() -> None:
    """See the top of this file."""
    reading = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reading.add_argument("out", type=Path)
    reading.add_argument("cells", nargs="*")
    reading.add_argument("--table", action="store_true", help="write the table, and run nothing")
    reading.add_argument("--cell", help=argparse.SUPPRESS)
    given = reading.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if given.cell:
        faulthandler.dump_traceback_later(DEADLINE - 10)  # where it hung, in its log
        Cell(out, given.cell).run()
        faulthandler.cancel_dump_traceback_later()
        return
    names = [] if given.table else cells(given.cells)
    for number, name in enumerate(names, 1):
        file = out / f"{name}.json"
        if file.is_file() and "seconds" in (kept := json.loads(file.read_text())):
            found, again = kept, " (kept)"
        else:
            found, again = run_cell(out, name), ""
        print(f"{number}/{len(names)} {told(name, found)}{again}", flush=True)
    write_table(out)


if __name__ == "__main__":
    main()
