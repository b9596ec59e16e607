"""Where a training on a cluster stops getting faster: computed from figures that you enter, and checked by measuring.

limits   the seconds of a step for 1, 2, 4, ... workers, and what the limit is: sampling, the trainer, or the push
lengths  the longest sequence that fits GPUs of 24 and 80 GB, by rlpost's estimate of memory: the table of docs/scale.md
gpus     what is chosen for GPUs of 24, 40 and 80 GB, and whether it fits, by the same estimate: that of docs/gpu.md
measure  a rollout whose turns only wait (0.5 s each, 8 conversations at a time per worker, 256 tickets in all), played
         by 1, 2 and 4 workers of a Ray cluster on this machine, against the formulas below

The formulas, for W workers that each play c conversations at a time:

    sampling = tickets * samples / (W c), rounded up, turns of turn_seconds each, times straggler, + tickets * overhead
    push     = push_seconds, once: every host reads the same copy at the same time
    in turn (collector=sync):     step = sampling + train_seconds + push
    beside  (collector=async):    step = the greater of sampling and train_seconds + push

`overhead` is what the driver does for a group, one after the other; `straggler` is how much longer a step's last
conversation takes than the mean one: beside training, others fill the pause (1).

.venv/bin/python scripts/scale.py limits --train-seconds 20 --push-seconds 3 --turn-seconds 15 --tickets 64 --samples 8
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

TICKETS, AT_ONCE, TURN_SECONDS = 256, 8, 0.5  # of what is measured
PUSHES = 5
NEEDED = 0.9  # of linear scaling


@dataclass
class Figures:
    """What a step consists of; seconds, but for the counts."""

    train_seconds: float
    push_seconds: float
    turn_seconds: float
    turns: int = 1
    tickets: int = 8  # a step
    samples: int = 8  # a ticket
    at_once: int = 64  # conversations that a worker plays at a time
    overhead: float = 0.005  # a ticket, in the driver
    straggler: float = 1.0


def sampling_seconds(figures: Figures, workers: int) -> float:
    """Seconds that `workers` take to sample a step."""
    waves = math.ceil(figures.tickets * figures.samples / (workers * figures.at_once))
    return waves * figures.turns * figures.turn_seconds * figures.straggler + figures.tickets * figures.overhead


def step_seconds(figures: Figures, workers: int, *, beside: bool) -> tuple[float, str]:
    """Seconds of a step, and what would have to get faster first."""
    sampling, training = sampling_seconds(figures, workers), figures.train_seconds + figures.push_seconds
    parts = {"sampling": sampling, "the trainer": figures.train_seconds, "the push": figures.push_seconds}
    if beside:
        limit = "sampling" if sampling >= training else max(("the trainer", "the push"), key=lambda name: parts[name])
        return max(sampling, training), limit
    return sampling + training, max(parts, key=lambda name: parts[name])


def limits(figures: Figures, most: int) -> None:
    """Print the step for every number of workers up to `most`."""
    print("workers  in turn            beside")
    workers = 1
    while workers <= most:
        (turn, by), (beside, of) = (step_seconds(figures, workers, beside=each) for each in (False, True))
        print(f"{workers:7d}  {turn:8.1f} s {by:11s} {beside:8.1f} s {of}")
        workers *= 2


def player() -> Any:
    """A player whose turns wait, `AT_ONCE` at a time; built in its worker."""
    from rlpost.collectors.player import GroupPlayer
    from rlpost.data.conversation import Completion
    from rlpost.envs import DatasetChatEnv
    from rlpost.model.conversion import tiny_tokenizer
    from rlpost.policies import ScriptedPolicy
    from rlpost.policies.base import Request
    from rlpost.remote.loop import LoopThread
    from rlpost.rewards.score import Score
    from rlpost.settings import SamplingSettings

    class Waiting(ScriptedPolicy):
        def __init__(self, *replies: Any, **options: Any) -> None:
            super().__init__(*replies, **options)
            self._loop, self._room = LoopThread("scale-engine"), asyncio.Semaphore(AT_ONCE)

        def submit(self, request: Request, sampling: SamplingSettings | None = None) -> Future[Completion]:
            return self._loop.submit(self._later(request, sampling or self.sampling))

        async def _later(self, request: Request, sampling: SamplingSettings) -> Completion:
            async with self._room:
                await asyncio.sleep(TURN_SECONDS)
            return self.generate([request], sampling)[0]

    class Even(DatasetChatEnv):
        def score(self, conversation: Any) -> Score:
            return Score(float(conversation.group_id % 2))

    env = Even([{"question": f"q{i}"} for i in range(TICKETS)], num_envs=TICKETS)
    return GroupPlayer(env, Waiting(["a"], tiny_tokenizer(), sampling=SamplingSettings()))


def measured(ray: Any, workers: int) -> tuple[float, list[float], int]:
    """Seconds of playing all tickets, of each push, and the conversations that came back."""
    import torch

    from rlpost.collectors.driver import GroupDriver
    from rlpost.data.replay_buffer import GroupBuffer
    from rlpost.model.conversion import tiny_tokenizer
    from rlpost.policies.remote import Players, RemotePolicy
    from rlpost.remote.cluster import Copies, RayWorker
    from rlpost.settings import SamplingSettings

    def new_worker(seat: int) -> RayWorker:
        return RayWorker(
            ray,
            lambda folder: player,
            Path.cwd(),
            name=f"worker {seat}",
            options={"num_cpus": 0.1},
            environment={"OMP_NUM_THREADS": "1"},
            copies=Copies(ray),
            place_seconds=120,
            may_wait=lambda: False,
        )

    players = Players(new_worker, workers)
    policy = RemotePolicy(players, tiny_tokenizer(), sampling=SamplingSettings())
    env, buffer = player().env, GroupBuffer(1, oldest_first=True)
    model = torch.nn.Linear(1000, 1000)
    driver = GroupDriver(env, policy, buffer, model=model, prompts_per_step=TICKETS, depth=0, max_policy_lag=0)
    policy.start()
    while len(players.ready) < workers:
        time.sleep(0.1)
    began = time.perf_counter()
    driver.fill(TICKETS)
    batch = buffer.take(TICKETS)
    seconds = time.perf_counter() - began
    driver._trainer_waits = False
    pushes = []
    for _ in range(PUSHES):
        began = time.perf_counter()
        driver.weight_updater.push(model)
        pushes.append(time.perf_counter() - began)
    policy.close()
    return seconds, pushes, len(set(batch["group_id"].tolist()))


def measure() -> int:
    """Print what was measured beside what the formulas say; 1 where scaling is below `NEEDED` of linear."""
    from rlpost.model.memory import frozen_heap
    from rlpost.remote.cluster import connect

    ray = connect("local", num_cpus=4, object_store_memory=200 * 2**20)
    first, least = 0.0, 1.0
    with frozen_heap():  # as in a training
        figures = Figures(0, 0, TURN_SECONDS, tickets=TICKETS, samples=1, at_once=AT_ONCE, overhead=0)
        for workers in (1, 2, 4):
            seconds, pushes, played = measured(ray, workers)
            assert played == TICKETS
            if workers == 1:
                first, figures.overhead = seconds, (seconds - sampling_seconds(figures, 1)) / TICKETS
                print(f"overhead {1000 * figures.overhead:.2f} ms a group, with which the other rows are computed")
            scaled = first / seconds / workers
            least = min(least, scaled)
            print(
                f"{workers} workers: {seconds:.2f} s for {TICKETS} tickets (computed: "
                f"{sampling_seconds(figures, workers):.2f} s), {scaled:.3f} of linear, "
                f"push of 4 MB {1000 * statistics.median(pushes):.0f} ms",
                flush=True,
            )
    ray.shutdown()
    return 0 if least >= NEEDED else 1


LONGEST = 131_072  # tokens, beyond which the table does not look
DIVIDED = {  # ways of dividing a model among GPUs
    "cluster.sharding=full": ["cluster.sharding=full"],
    "and cluster.cpu_offload=true": ["cluster.sharding=full", "cluster.cpu_offload=true"],
}


def length_rows() -> list[str]:
    """The lines of the table: a line a model, number of GPUs and way; nothing is measured for it."""
    from rlpost.catalog import TRAIN_GRPO
    from rlpost.config.compose import compose
    from rlpost.estimate.needs import longest_that_fits, work_of
    from rlpost.estimate.shape import HUB_MODELS, shape_of_config

    lines = ["| model | GPUs | what a rank holds | 24 GB | 80 GB |", "|---|---|---|---|---|"]
    for model in ("qwen", "qwen-1.5b", "qwen-3b", "qwen-7b"):
        for ranks in (1, 4, 8):
            for way, words in (DIVIDED if ranks > 1 else {"the whole model": []}).items():
                asked = ["policy=vllm", "model.activation_checkpointing=true", f"env.max_completion_tokens={LONGEST}"]
                settings = compose(
                    TRAIN_GRPO, [f"model={model}", *asked, f"cluster.trainer_ranks={ranks}", *words]
                ).settings
                fits = []
                for room in (24 * 10**9, 80 * 10**9):
                    shape = shape_of_config(HUB_MODELS[settings.model.path].config)
                    assert shape is not None
                    work = work_of(settings, shape, gpu_bytes=room)
                    longest = longest_that_fits(work, room, on_gpu=True)
                    fits.append("more than 131,072" if longest >= LONGEST else f"{longest:,}" if longest else "none")
                lines.append(f"| {model} | {ranks if ranks > 1 else 'any'} | {way} | {' | '.join(fits)} |")
    return lines


GPUS = {24: 24564, 40: 40960, 80: 81559}  # GB as sold, and MiB as nvidia-smi gives them
IN_USE = 0.02  # share of a GPU's memory that others have


def gpu_rows() -> list[str]:
    """The lines of the table: a line a command, a column a GPU; nothing is measured for it."""
    from rlpost.catalog import TRAIN_GRPO, TRAIN_SFT
    from rlpost.config.compose import compose
    from rlpost.estimate.machine import Device, Room
    from rlpost.estimate.needs import Machine, needs_of
    from rlpost.estimate.shape import shape_of_model
    from rlpost.train.resolve import resolve

    lora = "lora.enabled=true"
    models = ("smollm2", "qwen", "qwen-1.5b", "qwen-3b", "qwen-7b")
    asked = [(TRAIN_GRPO, f"model={model} env=gsm8k") for model in models]
    asked += [(TRAIN_GRPO, f"model=qwen-3b env=gsm8k {lora}"), (TRAIN_GRPO, f"model=qwen-7b env=gsm8k {lora}")]
    asked += [(TRAIN_GRPO, f"model=qwen-7b env=gsm8k {lora} model.dtype=bfloat16")]
    asked += [(TRAIN_GRPO, "recipe=gsm8k-qwen0.5b-gpu"), (TRAIN_SFT, "recipe=gsm8k-sft-qwen0.5b-gpu")]
    lines = [f"| command | {' | '.join(f'{gb} GB' for gb in GPUS)} |", f"|---|{'---|' * len(GPUS)}"]
    host = Room(10**12, 10**12)
    for command, words in asked:
        composed, cells = compose(command, [*words.split(), "policy=vllm"]), []
        shape = shape_of_model(composed.settings.model.path)
        assert shape is not None
        for mib in GPUS.values():
            gpu = Room(int((1 - IN_USE) * mib * 2**20), mib * 2**20)
            settings, _ = resolve(composed.settings, Device(gpu), shape)
            cells.append(_told(settings, needs_of(settings, shape, Machine(host, gpu, host))))
        lines.append(f"| `{command.verb.removeprefix('train ')} {words}` | {' | '.join(cells)} |")
    return lines


def _told(settings: Any, needs: Any) -> str:
    """The choices and the estimated memory, or the first setting that helps."""
    from rlpost.estimate.needs import peak

    if needs.may_not_fit or needs.impossible():
        return f"no: {needs.advice().split(' (')[0]}"
    ways = {"recomputed": settings.model.activation_checkpointing, "sleeps": getattr(settings.policy, "sleep", False)}
    told = [f"{settings.tokens_per_microbatch:,} tokens", *(name for name, chosen in ways.items() if chosen)]
    return f"{', '.join(told)}; {peak(needs.parts, on_gpu=True) / 1e9:.0f} GB"


def main() -> int:
    """Do what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("measure").set_defaults(do=lambda asked: measure())
    commands.add_parser("lengths").set_defaults(do=lambda asked: print("\n".join(length_rows())) or 0)
    commands.add_parser("gpus").set_defaults(do=lambda asked: print("\n".join(gpu_rows())) or 0)
    computed = commands.add_parser("limits")
    for name, kind, default in (
        ("train-seconds", float, None),
        ("push-seconds", float, None),
        ("turn-seconds", float, None),
        ("turns", int, 1),
        ("tickets", int, 8),
        ("samples", int, 8),
        ("at-once", int, 64),
        ("overhead", float, 0.005),
        ("straggler", float, 1.0),
    ):
        computed.add_argument(f"--{name}", type=kind, default=default, required=default is None)
    computed.add_argument("--most", type=int, default=64, help="workers")
    computed.set_defaults(do=partial(_limits))
    asked = parser.parse_args()
    return asked.do(asked)


def _limits(asked: argparse.Namespace) -> int:
    figures = {name: value for name, value in vars(asked).items() if name not in ("do", "most")}
    limits(Figures(**figures), asked.most)
    return 0


if __name__ == "__main__":
    sys.exit(main())
