"""A second real model through everything: Gemma 3 270M, whose vocabulary has 262,144 words.

    scripts/dev/second_model OUT --gsm8k FOLDER              all parts, in order
    scripts/dev/second_model OUT --gsm8k FOLDER sft grpo     some of them
    scripts/dev/second_model OUT --gsm8k FOLDER --small      the same in a few steps, to see that it works

sft     fine-tuning on 2,000 rows of GSM8K; held-out loss and accuracy before and after
grpo    GRPO on sums of single digits from the model that sft made, under vLLM; accuracy before and after
exact   a short deterministic training killed with -9 and resumed: bitwise the same as one that was not
export  the GRPO run as HF and GGUF, read by transformers' and by llama.cpp's own generate, which must stop

sft and grpo are killed with -9 in the middle and resumed: the steps that are done again must give the same figures.
FOLDER holds train.jsonl and test.jsonl. Results are kept in OUT/results.json and not measured again, so the command can
be stopped and goes on. llama.cpp is built once in OUT/llama from llama-cpp-python (10 min), unless --llama names a
Python that has it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ordeal import Results, compared, rows_of, start
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpost.record import HELD_OUT_FIGURES, interval, worth_showing

MODEL = "gemma3-270m"
LLAMA = "llama-cpp-python==0.3.36"
PARTS = ("sft", "grpo", "exact", "export")
REPLY = 64  # most tokens of a reply of an export
SUMS = ["What is 2 + 4? Be brief.", "What is 7 + 1? Be brief.", "What is 8 + 7? Be brief."]

SFT = ["sft", f"model={MODEL}", "env=gsm8k", "max_tokens=512", "minibatch_size=16", "optim.lr=5e-5"]
SFT += ["optim.warmup_steps=5", "tokens_per_microbatch=2048", "env.max_completion_tokens=192", "eval.accuracy=true"]
SFT += ["checkpoint.every_minutes=0", "checkpoint.keep_last=1", "policy=vllm"]
GRPO = ["grpo", "env=arithmetic", "env.digits=1", "env.max_completion_tokens=64", "prompts_per_step=8", "group_size=8"]
GRPO += ["optim.lr=2e-5", "checkpoint.every_minutes=0", "checkpoint.keep_last=1", "policy=vllm"]
EXACT = ["sft", f"model={MODEL}", "env=gsm8k", "max_tokens=512", "minibatch_size=2", "steps=4", "env.limit=64"]
EXACT += ["eval.enabled=false", "checkpoint.every=2", "checkpoint.every_minutes=0", "deterministic=true"]


def sft(out: Path, gsm8k: Path, *, small: bool) -> dict[str, Any]:
    """Held-out loss and accuracy before and after fine-tuning; killed and resumed in the middle."""
    words = [*SFT, f"env.path={gsm8k}"]
    words += ["steps=4", "eval.limit=8", "env.limit=64"] if small else ["epochs=1", "eval.limit=200", "env.limit=2000"]
    return trained(words, out / "sft", save=2 if small else 15)


def grpo(out: Path, gsm8k: Path, *, small: bool) -> dict[str, Any]:
    """Held-out accuracy before and after GRPO under vLLM; killed and resumed in the middle."""
    words = [*GRPO, f"model.path={out / 'sft'}"]
    words += ["steps=4", "env.eval_limit=8"] if small else ["steps=40"]
    return trained(words, out / "grpo", save=2 if small else 20)


def exact(out: Path, gsm8k: Path, *, small: bool) -> dict[str, Any]:
    """Whether a deterministic training that is killed and resumed gives the same weights as one that is not."""
    words = [*EXACT, f"env.path={gsm8k}"]
    for name in ("whole", "broken"):
        shutil.rmtree(out / name, ignore_errors=True)
    if start(words, out / "whole").wait():
        raise RuntimeError(f"the training failed: see {out / 'whole.log'}")
    killed_after(3, start(words, out / "broken"), out / "broken")
    if start(words, out / "broken", resume=True).wait():
        raise RuntimeError(f"the resumed training failed: see {out / 'broken.log'}")
    return compared(out / "whole", out / "broken")


def export(out: Path, gsm8k: Path, *, small: bool, llama: str | None = None) -> dict[str, Any]:
    """How the exports of the GRPO run answer under transformers and llama.cpp, and why their replies end."""
    found: dict[str, Any] = {}
    for to in ("hf", "gguf"):
        shutil.rmtree(out / to, ignore_errors=True)
        command = [sys.executable, "-P", "-m", "rlpost", "export", str(out / "grpo"), "--to", to, "--json"]
        told = subprocess.run([*command, "--out", str(out / to)], stdout=subprocess.PIPE, check=True)
        found[to] = {"agreement": json.loads(told.stdout)["agreement"]["text"]}
    found["hf"]["transformers"] = by_transformers(out / "hf")
    found["gguf"]["transformers"] = by_transformers(out / "gguf", next((out / "gguf").glob("*.gguf")).name)
    found["gguf"]["llama.cpp"] = by_llama(next((out / "gguf").glob("*.gguf")), llama or llama_python(out / "llama"))
    return found


# A training that is killed


def trained(words: Sequence[str], run: Path, save: int) -> dict[str, Any]:
    """Train, kill with -9 one step after step `save`, whose checkpoint is there, and resume; the figures."""
    words = [*words, f"checkpoint.every={save}"]
    kept = run.parent / f"{run.name}-before.json"  # the steps before the kill
    began = time.monotonic()
    if not kept.is_file():
        killed_after(save + 1, start(words, run, resume=run.exists()), run)
        kept.write_text(json.dumps(rows_of(run)))
    if start(words, run, resume=True).wait():
        raise RuntimeError(f"the training failed: see {run}.log")
    before = [row for row in json.loads(kept.read_text()) if row["step"] > save]
    rows = rows_of(run)
    again = [row for row in rows if row["step"] in {row["step"] for row in before}]
    steps = [row["step"] for row in rows]
    return {
        **figures(rows),
        "steps": steps[-1],
        "each step once": sorted(set(steps)) == steps,
        "done again": [row["step"] for row in before],
        "equal": before == again,
        "differ": sorted({key for a, b in zip(before, again, strict=True) for key in a if a[key] != b.get(key)}),
        "peak_gb": max(json.loads(line).get("memory/peak_gb", 0) for line in (run / "metrics.jsonl").open()),
        "minutes": round((time.monotonic() - began) / 60, 1),
    }


def killed_after(step: int, running: subprocess.Popen[bytes], run: Path) -> None:
    """Kill a training with -9 as soon as `step` is in its metrics. Raises RuntimeError if it ends before."""
    metrics = run / "metrics.jsonl"
    while not metrics.is_file() or f'"step": {step},' not in metrics.read_text():
        if running.poll() is not None:
            raise RuntimeError(f"the training ended with {running.returncode} before step {step}: see {run}.log")
        time.sleep(0.2)
    running.kill()
    running.wait()


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Held-out figure -> before and after, with 95% intervals."""
    first, last = rows[0], rows[-1]
    shown = worth_showing({key: [row.get(key) for row in (first, last)] for _, key in HELD_OUT_FIGURES})
    return {name: f"{interval(first, key)} -> {interval(last, key)}" for name, key in HELD_OUT_FIGURES if key in shown}


# Exports, read by other programs alone


def by_transformers(folder: Path, gguf: str | None = None) -> list[dict[str, Any]]:
    """Greedy replies by transformers' own generate, with no setting but the length."""
    file = {"gguf_file": gguf} if gguf else {}
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, **file)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file)
    replies = []
    for question in SUMS:
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=REPLY, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        text = tokenizer.decode(made, skip_special_tokens=True)
        replies.append({"reply": text, "tokens": len(made), "stopped": len(made) < REPLY})
    return replies


ASK = """
import json, sys
from llama_cpp import Llama

file, tokens, questions = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
model = Llama(file, n_ctx=512, verbose=False)
for question in questions:
    made = model.create_chat_completion([{"role": "user", "content": question}], temperature=0, max_tokens=tokens)
    choice = made["choices"][0]
    told = {"reply": choice["message"]["content"], "tokens": made["usage"]["completion_tokens"]}
    print(json.dumps(told | {"stopped": choice["finish_reason"] == "stop"}))
"""


def by_llama(file: Path, python: str) -> list[dict[str, Any]]:
    """Greedy replies by llama.cpp, with the template and the end of turn of the file."""
    command = [python, "-c", ASK, str(file), str(REPLY), *SUMS]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in told.stdout.splitlines()]


def llama_python(folder: Path) -> str:
    """The interpreter of an environment with llama.cpp, made the first time."""
    python = folder / "bin" / "python"
    if not (folder / "made").is_file():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", LLAMA], check=True)
        (folder / "made").touch()
    return str(python)


def main() -> int:
    """Run the parts that were asked for; 1 if a resumed training differs or a reply does not stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--llama", help="an interpreter that has llama-cpp-python")
    asked = parser.parse_intermixed_args()
    if unknown := {*asked.parts} - {*PARTS}:
        parser.error(f"there is no part {', '.join(unknown)}: it is one of {', '.join(PARTS)}")
    out = asked.out.resolve()
    results = Results(out / "results.json")
    for name in asked.parts or PARTS:
        if name not in results.all:
            more = {"llama": asked.llama} if name == "export" else {}
            results.add(name, globals()[name](out, asked.gsm8k.resolve(), small=asked.small, **more))
    return int('"equal": false' in json.dumps(results.all) or '"stopped": false' in json.dumps(results.all))


if __name__ == "__main__":
    sys.exit(main())
