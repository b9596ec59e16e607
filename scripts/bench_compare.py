"""Times the same GRPO work in rlpost and in TRL 1.16.0, one after the other, and prints the ratio and the peak memory.

Run it on a machine that does nothing else. Figures are medians of the wall time of whole steps:
sampling, rewards, training and, in rlpost, the push of the new weights to the sampler. rlpost's peak memory is compared
with TRL's plus the weights and the KV cache of rlpost's sampler, by estimate.

Equal on both sides: the model folder, float32 weights and autocast to bfloat16 where rlpost measures
that it is faster here, the prompts and their order, prompts and completions a step, the limit on new tokens,
the same temperature and no other filter, the reward function (rlpost's own, imported by both), one update
a step over all completions, the loss (clipped at 0.2, mean over all tokens, no KL term), advantages
divided by the group's standard deviation, AdamW with a constant learning rate, gradients clipped at
1, the number of threads, no evaluation, no GPU.

Not equal, since each side is run as its users would run it on a CPU:
- rlpost samples with what `policy=auto` finds (vLLM, where it is installed); TRL samples
  with transformers, since its vLLM mode does not work on a CPU.
- rlpost computes a group's prompt once and packs by its own rule; TRL pads prompts and completions to
  one rectangle and trains in microbatches of 4 completions (--trl-microbatch), its fastest here. Its gradient
  checkpointing, on by default, is off here, which is faster.
- The samplers draw from different random numbers, so completions differ. They shrink as the model
  learns, on both sides, so only the first steps are compared; mean lengths are printed beside the
  times.
- Writing metrics and rollouts is outside the timed step on both sides.

TRL lives in an environment of its own, .bench/trl, made on first use. Results are written under
.bench/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / ".bench"
TRL_PACKAGES = ("trl==1.16.0", "transformers==5.19.0", "accelerate==1.15.0", "datasets==5.2.0")
TORCH = "torch==2.13.0"  # installed first and alone: a looser requirement could bring a CUDA build
SIDES = ("ours", "trl")


@dataclass(frozen=True)
class Work:
    """One thing to time: rlpost's settings for it, from which TRL's are derived, and the steps compared."""

    description: str
    settings: tuple[str, ...]
    steps: int


WORKS = {
    "grpo-short": Work("the default GRPO work, SmolLM2-135M on two-digit sums, steps 1 to 4", (), 4),
    "gemma3-270m": Work(
        "Gemma 3 270M, a vocabulary of 262,144 words: 8 x 8 completions of 64 tokens, steps 1 to 3",
        ("model=gemma3-270m", "env.max_completion_tokens=64"),
        3,
    ),
    "smoke": Work("one step of a random model with two layers: the machinery only", ("model=tiny",), 1),
}


@dataclass(frozen=True)
class Timing:
    """One side's steps: seconds, mean tokens a completion and mean reward of each; peak memory of its process.

    `prompts` are the rendered ones that were sampled from, once a group.
    """

    seconds: list[float]
    tokens_mean: list[float]
    reward_mean: list[float]
    memory_gb: float
    prompts: list[str]
    versions: dict[str, str | None]

    @property
    def median(self) -> float:
        """Seconds a step."""
        return statistics.median(self.seconds)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 2 for a mistake in the command, 3 for a side that failed."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", nargs="?", help="what to time, as --list prints it")
    parser.add_argument("--list", action="store_true", help="list what can be timed")
    parser.add_argument("--only", choices=SIDES, help="one side alone")
    parser.add_argument(
        "--trl-microbatch", type=int, default=4, metavar="N", help="completions of one forward in TRL (default 4)"
    )
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name:<12}  {work.description}" for name, work in WORKS.items()))
        return 0
    if options.work not in WORKS:
        asked = f"there is no work {options.work}" if options.work else "name what to time"
        print(f"error: {asked}: it is one of {', '.join(WORKS)}", file=sys.stderr)
        return 2
    sides = [options.only] if options.only else list(SIDES)
    try:
        timings = measure(WORKS[options.work], BENCH / "runs" / options.work, sides, options.trl_microbatch)
    except subprocess.CalledProcessError as error:
        print(f"error: {error}; see the logs in {BENCH / 'runs' / options.work}", file=sys.stderr)
        return 3
    if len({tuple(timing.prompts) for timing in timings.values()}) > 1:
        print("error: the two sides sampled from different prompts, so their times say nothing", file=sys.stderr)
        return 3
    result = report(options.work, timings, sampler_gb(WORKS[options.work]))
    file = BENCH / "results" / f"{options.work}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join([*lines(result), f"results  {file.relative_to(ROOT)}"]))
    return 0


def measure(work: Work, folder: Path, sides: Sequence[str], trl_microbatch: int) -> dict[str, Timing]:
    """Run the sides one after the other; what they leave replaces what lay in `folder`."""
    python = trl_environment() if "trl" in sides else None
    print(f"load average before the start: {os.getloadavg()[0]:.2f} (an idle machine is near 0)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    timings = {}
    if "ours" in sides:
        timings["ours"] = time_rlpost(work, folder / "ours")
    if python is not None:
        timings["trl"] = time_trl(work, folder, python, trl_microbatch)
    return timings


def time_rlpost(work: Work, folder: Path) -> Timing:
    """`rlpost train grpo` as a user would run it, times from its metrics.jsonl."""
    command = [sys.executable, "-P", "-m", "rlpost", "train", "grpo", *settings_words(work), "--out", str(folder)]
    run_logged(command, folder.with_suffix(".log"), "rlpost")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 0]
    packages = json.loads((folder / "environment.json").read_text())
    return Timing(
        [row["time/step"] for row in rows],
        [row["completion/tokens_mean"] for row in rows],
        [row["reward/mean"] for row in rows],
        max(row["memory/peak_gb"] for row in rows),
        prompts_of(folder),
        {"rlpost": packages["rlpost"], **packages["packages"]},
    )


def prompts_of(folder: Path) -> list[str]:
    """The rendered prompts of a run, group by group, from its rollouts."""
    import pyarrow.parquet as pq

    files = sorted((folder / "rollouts").glob("step-*.parquet"))
    rows = [row for file in files for row in pq.read_table(file, columns=["prompt", "sample"]).to_pylist()]
    return [row["prompt"] for row in rows if row["sample"] == 0]


def time_trl(work: Work, folder: Path, python: Path, microbatch: int) -> Timing:
    """scripts/bench_trl.py in TRL's environment, told by one JSON file and telling by another."""
    request, answer = folder / "trl-request.json", folder / "trl-answer.json"
    request.write_text(json.dumps(trl_request(work, folder / "trl", microbatch), indent=1))
    command = [str(python), str(ROOT / "scripts" / "bench_trl.py"), str(request), str(answer)]
    run_logged(command, folder / "trl.log", "TRL")
    return Timing(**json.loads(answer.read_text()))


def settings_words(work: Work) -> list[str]:
    """The work as settings of `rlpost train grpo`."""
    return [*work.settings, f"steps={work.steps}", "eval.enabled=false"]


def resolved(work: Work) -> Any:
    """The settings that hold for the work: what rlpost measures or chooses when it starts is filled in."""
    from rlpost.catalog import TRAIN_GRPO
    from rlpost.config.compose import compose
    from rlpost.estimate.shape import shape_of_model
    from rlpost.model.precision import this_device
    from rlpost.train.resolve import resolve

    settings = compose(TRAIN_GRPO, settings_words(work)).settings
    return resolve(settings, this_device("cpu"), shape_of_model(settings.model.path))[0]


def sampler_gb(work: Work) -> float:
    """GB of the weights and the KV cache of rlpost's sampler, by its own estimate."""
    from rlpost.estimate.needs import parts_of, work_of
    from rlpost.estimate.shape import shape_of_model

    settings = resolved(work)
    shape = shape_of_model(settings.model.path)
    assert shape is not None
    parts = parts_of(work_of(settings, shape, gpu_bytes=None))
    return sum(part.bytes for part in parts if part.name in ("sampler", "its KV cache")) / 1e9


def trl_request(work: Work, folder: Path, microbatch: int) -> dict[str, Any]:
    """Everything that bench_trl.py needs, read from rlpost's own settings for the work and its first prompts."""
    from rlpost.envs.build import build_env
    from rlpost.model.locate import locate_model
    from rlpost.model.tokenizer import load_tokenizer
    from rlpost.policies.drawing import training_sampling
    from rlpost.settings import Autocast
    from rlpost.settings.loss import ClippedLossSettings

    settings = resolved(work)
    model = locate_model(settings.model.path)
    prompts = settings.prompts_per_step
    env = build_env(settings.env, num_prompts=prompts, group_size=settings.group_size, seed=settings.seed)
    env.start()
    drawn = [env.draw(prompts * settings.group_size)[:: settings.group_size] for _ in range(work.steps)]
    conversations = [conversation for step in drawn for conversation in step]
    loss = settings.loss
    assert isinstance(loss, ClippedLossSettings), "the other library's loss is clipped, and so must this one be"
    return {
        "folder": str(folder),
        "model": str(model),
        "chat_template": load_tokenizer(model, settings.model).chat_template,
        "rows": [{"prompt": c.messages, "answer": c.task["answer"]} for c in conversations],
        "bfloat16": settings.model.autocast is Autocast.bfloat16,
        "steps": work.steps,
        "group_size": settings.group_size,
        "completions_per_step": prompts * settings.group_size,
        "microbatch": microbatch,
        "max_completion_tokens": settings.env.max_completion_tokens,
        "temperature": training_sampling(settings.sampling, settings.env).temperature,
        "seed": settings.seed,
        "clip_low": loss.clip_low,
        "clip_high": loss.clip_high,
        "kl_coef": loss.kl_coef,
        "optim": {name: v for name, v in asdict(settings.optim).items() if isinstance(v, (int, float))}
        | {"schedule": settings.optim.schedule.value},
    }


def trl_environment() -> Path:
    """The interpreter of .bench/trl, made with the pinned packages where that was not done yet."""
    python, stamp = BENCH / "trl" / "bin" / "python", BENCH / "trl" / "bench-packages"
    wanted = " ".join((TORCH, *TRL_PACKAGES))
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"making {python.parents[1].relative_to(ROOT)} with {wanted} (some minutes) ...", flush=True)
    BENCH.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, TORCH, *TRL_PACKAGES], check=True)
    stamp.write_text(wanted)
    return python


def run_logged(command: list[str], log: Path, name: str) -> None:
    """Run one side to its end, its output in `log`. Raises CalledProcessError if it fails."""
    print(f"running {name}, output in {log.relative_to(ROOT)} ...", flush=True)
    threads = str(cores())
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as output:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, check=True)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def report(name: str, timings: Mapping[str, Timing], sampler: float) -> dict[str, Any]:
    """The result as plain values; `ratio` is TRL's median over ours, None with one side alone.

    `sampler` is the memory of our sampler's weights and cache in GB.
    """
    both = len(timings) == len(SIDES)
    return {
        "work": name,
        "description": WORKS[name].description,
        "cores": cores(),
        "platform": platform.platform(),
        "median_seconds": {side: timing.median for side, timing in timings.items()},
        "ratio": timings["trl"].median / timings["ours"].median if both else None,
        "sampler_gb": sampler,
        "timings": {side: _without_prompts(timing) for side, timing in timings.items()},
    }


def _without_prompts(timing: Timing) -> dict[str, Any]:
    return {name: value for name, value in asdict(timing).items() if name != "prompts"}


def lines(result: Mapping[str, Any]) -> list[str]:
    """The result for people."""
    shown = [f"{result['work']}: {result['description']}", f"{result['cores']} cores, {result['platform']}", ""]
    for side, timing in result["timings"].items():
        each = "  ".join(f"{seconds:.2f}" for seconds in timing["seconds"])
        tokens = "  ".join(f"{tokens:.0f}" for tokens in timing["tokens_mean"])
        versions = ", ".join(f"{package} {v}" for package, v in timing["versions"].items() if v is not None)
        shown += [
            f"{side:<5} {result['median_seconds'][side]:8.2f} s a step (median of {each})",
            f"      tokens a completion {tokens}; peak memory {timing['memory_gb']:.1f} GB",
            f"      {versions}",
        ]
    if result["ratio"] is not None:
        ours, trl = (result["timings"][side]["memory_gb"] for side in SIDES)
        at_most = trl + result["sampler_gb"]
        shown += [
            "",
            f"ratio {result['ratio']:8.2f}  (TRL's median over ours)",
            f"memory {ours:7.2f} GB, {'at most' if ours <= at_most else 'more than'} TRL's and our sampler's: "
            f"{trl:.2f} + {result['sampler_gb']:.2f} = {at_most:.2f}",
        ]
    return shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
