"""What scripts/gpu_check measures in a process of its own: `gpu_parts.py NAME MODEL_FOLDER` prints one JSON.

Each part has its own memory and its own variables, and none can stop the others.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlpost.model import attention, logprobs
from rlpost.model.attention import shared_prompt_attention
from rlpost.model.device import pick_device
from rlpost.model.load import load_model
from rlpost.model.locate import locate_model
from rlpost.model.logprobs import chunked_log_probs, token_log_probs
from rlpost.model.packing import Layout, Microbatch, Row, pack
from rlpost.model.tokenizer import load_tokenizer
from rlpost.settings import DType, ModelSettings

HEADS, KV_HEADS, WIDTH = 14, 2, 64  # of Qwen2.5-0.5B
SHAPES = 40  # of packed rows, none twice
ROUNDS = 3
COMPLETIONS = 8  # of a prompt
MOST_REQUESTS = 512


class Left(Exception):
    """A part that cannot be measured here."""


ON_GPU = torch.cuda.is_available()
DEVICE = pick_device("auto")


def kernels(folder: Path) -> dict[str, Any]:
    """Milliseconds of attention over packed rows of ever new shapes, forward and backward, by each road."""
    found: dict[str, Any] = {}
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    takes = attention.takes_sequences
    for name, sequences, cudnn in (
        ("in sequences", True, False),
        ("in padded blocks", False, False),
        ("in padded blocks, cuDNN allowed", False, True),
    ):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        if sequences and not takes(torch.empty(1, HEADS, 1, WIDTH, dtype=dtype, device=DEVICE)):
            found[name] = f"not taken on {DEVICE} by torch {torch.__version__}"
            continue
        attention.takes_sequences = takes if sequences else lambda query: False
        times = [1000 * _attend(layout, dtype) for layout in _layouts(name)]
        found[name] = {
            "first": round(times[0], 2),
            "median": round(statistics.median(times[1:]), 2),
            "slowest_after": round(max(times[1:]), 2),
            "shapes": len(times),
        }
    return found


def _layouts(name: str) -> Iterator[Layout]:
    draw = random.Random(name)
    for _ in range(SHAPES if ON_GPU else 3):
        prompt, longest = draw.randint(80, 300), draw.randint(100, 400)
        lengths = [draw.randint(longest // 2, longest) for _ in range(COMPLETIONS)]
        [microbatch] = pack(_rows([(prompt, lengths)]), 10**9, DEVICE)
        yield microbatch.layout


def _attend(layout: Layout, dtype: torch.dtype) -> float:
    tokens = layout.sequences.num_tokens
    heads = (HEADS, KV_HEADS, KV_HEADS)
    query, key, value = (
        torch.randn(1, h, tokens, WIDTH, device=DEVICE, dtype=dtype, requires_grad=True) for h in heads
    )
    return _seconds(
        lambda: shared_prompt_attention(torch.nn.Module(), query, key, value, None, packed=layout)[0].sum().backward()
    )


def packed(folder: Path) -> dict[str, Any]:
    """Log-probs and gradients of packed rows against the model's own forward of each, in each format."""
    found = {}
    long = (512, (2048,) * 8) if ON_GPU else (24, (40,) * 4)
    for name, nearest, direction, dtype, autocast, lengths in (
        ("float32", 2e-3, 0.9999, torch.float32, False, None),
        ("bfloat16", 0.15, 0.98, torch.bfloat16, False, None),
        ("bfloat16 by autocast, long rows", 0.15, 0.98, torch.float32, True, long),
    ):
        found[name] = figures = _packed_and_plain(str(folder), dtype, autocast=autocast, lengths=lengths)
        if figures["mean_difference"] > nearest or figures["gradient_cosine"] < direction:
            raise RuntimeError(f"in {name} packed rows differ from plain ones: {figures}")
        if figures["mean_if_rows_saw_each_other"] < 4 * figures["mean_difference"]:
            raise RuntimeError(f"in {name} the comparison could not tell a wrong mask: {figures}")
    return found


def _packed_and_plain(
    model_path: str, dtype: torch.dtype, *, autocast: bool, lengths: tuple[int, tuple[int, ...]] | None
) -> dict[str, float]:
    """`lengths` are those of a prompt and of its completions; None: two completions, and one of another prompt."""
    model: Any = load_model(locate_model(model_path), ModelSettings(model_path, dtype=DType.float32))
    with torch.no_grad():
        for weights in model.get_decoder().layers.parameters():
            if weights.ndim == 2:
                weights.mul_(3)  # wide enough that what a row sees makes a difference
    model = model.to(device=DEVICE, dtype=dtype)
    draw = torch.Generator().manual_seed(0)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(3, 250, (length,), generator=draw)

    shared = ids(12 if lengths is None else lengths[0])
    if lengths is None:
        texts = [(shared, ids(9)), (shared, ids(17)), (ids(20), ids(5))]
    else:
        texts = [(shared, ids(length)) for length in lengths[1]]
    rows = [Row(p, c, torch.ones(len(c), dtype=torch.bool), torch.zeros(len(c)), 1.0) for p, c in texts]
    [microbatch] = list(pack(rows, 100_000, DEVICE))
    token_log_probs(model, next(pack(rows[:1], 10_000, DEVICE)), 1.0)  # the first call finds out how to read the model
    order = [next(i for i, row in enumerate(rows) if row is packed_row) for packed_row in microbatch.rows]
    sizes = [len(texts[i][1]) for i in order]

    def precision() -> Any:
        return torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast)

    def plain(prompt: torch.Tensor, completion: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
        parts = [prompt, completion] if before is None else [before, prompt, completion]
        whole = torch.cat(parts).to(DEVICE)[None]
        with precision():
            logits = model(input_ids=whole, logits_to_keep=len(completion) + 1).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(-1, completion.to(DEVICE)[:, None])[:, 0]

    def gradient() -> torch.Tensor:
        flat = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None]).cpu()
        model.zero_grad()
        return flat.double()

    weights = torch.linspace(-1, 1, sum(sizes), device=DEVICE)
    with precision():
        together, _ = token_log_probs(model, microbatch, 1.0)
    (together * weights).sum().backward()
    of_packed, together = gradient(), together.detach()
    separate = []
    for i, share in zip(order, weights.split(sizes), strict=True):  # one graph at a time: memory
        log_probs = plain(*texts[i])
        (log_probs * share).sum().backward()
        separate.append(log_probs.detach())
    with torch.no_grad():
        leaking = torch.cat([plain(*texts[i], before=torch.cat(texts[i - 1])) for i in order])
    apart = torch.cat(separate)
    return {
        "mean_difference": (together - apart).abs().mean().item(),
        "largest_difference": (together - apart).abs().max().item(),
        "gradient_cosine": torch.nn.functional.cosine_similarity(of_packed, gradient(), dim=0).item(),
        "mean_if_rows_saw_each_other": (leaking - apart).abs().mean().item(),
    }


def speed(folder: Path) -> dict[str, Any]:
    """Forward and backward of packed rows of several lengths: tokens and operations a second, and memory."""
    from rlpost.catalog import TRAIN_SFT
    from rlpost.config.compose import compose
    from rlpost.estimate.needs import parts_of, work_of
    from rlpost.estimate.shape import shape_of_folder

    model = _model(folder)
    parameters = sum(p.numel() for p in model.parameters())
    found: dict[str, Any] = {}
    for tokens in (512, 2048, 8192) if ON_GPU else (256,):
        microbatch = _microbatch(tokens)
        _learn(model, microbatch)  # the first of a shape is slower
        if ON_GPU:
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if ON_GPU else 0
        seconds = min(_seconds(partial(_learn, model, microbatch)) for _ in range(ROUNDS))
        words = [f"tokens_per_microbatch={microbatch.num_packed}", f"max_tokens={tokens}", "model.autocast=bfloat16"]
        settings = compose(TRAIN_SFT, words).settings
        shape = shape_of_folder(folder)
        assert shape is not None
        work = work_of(settings, shape, gpu_bytes=10**11)
        passing = ("gradients", "cast weights", "head's gradient", "activations")
        estimated = sum(part.bytes for part in parts_of(work) if part.name in passing)
        peak = torch.cuda.max_memory_allocated() - held if ON_GPU else None
        head = _head_seconds(model, microbatch, logprobs.CHUNK_ON_GPU)
        found[f"{microbatch.num_packed} tokens"] = {
            "tokens_per_second": round(microbatch.num_packed / seconds),
            "tflops": round(6e-12 * parameters * microbatch.num_packed / seconds, 3),
            "head_share": round(head / seconds, 3),
            "peak_gb": peak and round(peak / 1e9, 2),
            "estimated_gb": round(estimated / 1e9, 2),
        }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=ON_GPU)
    optimizer.step()
    return {**found, "optimizer_seconds": round(_seconds(optimizer.step), 4)}


def head(folder: Path) -> dict[str, Any]:
    """Seconds of the output head for one row, forward and backward, by the tokens whose logits exist at once."""
    model, microbatch = _model(folder), _microbatch(8192 if ON_GPU else 128)
    chunks = (256, 1024, 4096) if ON_GPU else (64, 128)
    return {f"{chunk} at once": round(_head_seconds(model, microbatch, chunk), 4) for chunk in chunks}


def _head_seconds(model: Any, microbatch: Microbatch, chunk: int) -> float:
    width, weights = model.config.hidden_size, model.get_output_embeddings()
    hidden = torch.randn(len(microbatch.target), width, device=DEVICE, requires_grad=True)
    before = logprobs.CHUNK_ON_GPU, logprobs.CHUNK
    logprobs.CHUNK_ON_GPU = logprobs.CHUNK = chunk
    try:

        def both() -> None:
            with _precision():
                chunked_log_probs(hidden, weights, microbatch.target, 1.0)[0].sum().backward()

        both()
        return min(_seconds(both) for _ in range(ROUNDS))
    finally:
        logprobs.CHUNK_ON_GPU, logprobs.CHUNK = before
        model.zero_grad()


def divided(folder: Path) -> dict[str, Any]:
    """A model divided among one rank (FSDP2): its gradient against the whole model's, and its export."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    from rlpost.model.sharding import ShardingPlan, export, load_sharded

    whole, microbatch = _model(folder), _microbatch(512 if ON_GPU else 64)
    _learn(whole, microbatch)
    expected = _gradient(whole)
    del whole
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if ON_GPU else "gloo", init_method=f"file://{scratch}/meeting", rank=0, world_size=1
        )
        plans = {"as it is": ShardingPlan(), "gathered in bfloat16": ShardingPlan(gather_dtype=torch.bfloat16)}
        if ON_GPU:
            plans["offloaded"] = ShardingPlan(offload=True)
        for name, plan in plans.items():
            model: Any = load_sharded(folder, torch.float32, DEVICE, plan)
            _learn(model, microbatch)
            cosine = torch.nn.functional.cosine_similarity(_gradient(model), expected, dim=0)
            found[name] = {"gradient_cosine": cosine.item()}
            if cosine < 0.99:
                raise RuntimeError(f"the gradient of the divided model is another one: {found}")
            found["export_seconds"] = round(_seconds(partial(export, model, Path(scratch) / "out")), 2)
        ours = [load_file(file) for file in sorted((Path(scratch) / "out").glob("*.safetensors"))]
        right = load_file(next(folder.glob("*.safetensors")))
        if not all(torch.equal(tensor, right[name].to(tensor.dtype)) for part in ours for name, tensor in part.items()):
            raise RuntimeError("the exported weights are not those of the model")
        dist.destroy_process_group()
    return found


def _gradient(model: Any) -> torch.Tensor:
    grads = (p.grad for p in model.parameters() if p.grad is not None)
    flat = [(grad.full_tensor() if hasattr(grad, "full_tensor") else grad).flatten().double().cpu() for grad in grads]
    return torch.cat(flat)


def push(folder: Path) -> dict[str, Any]:
    """Seconds of writing all weights for another process, in two formats, and the room that there is in memory."""
    from rlpost.files import memory_folder
    from rlpost.model.weights import save_one_by_one
    from rlpost.remote.exchange import exchange_folder
    from rlpost.weight_sync.base import named_weights

    model = _model(folder)
    found: dict[str, Any] = {"shared_memory_free_gb": round(shutil.disk_usage(memory_folder()).free / 1e9, 2)}
    for dtype in (torch.float32, torch.bfloat16):
        with exchange_folder() as place:

            def write(place: Path = place, dtype: torch.dtype = dtype) -> None:
                save_one_by_one(named_weights(model).items(), place, dtype)

            found[str(dtype).removeprefix("torch.")] = round(_seconds(write), 2)
    return found


def allocator(folder: Path) -> dict[str, Any]:
    """Peak reserved and allocated GPU memory after microbatches of changing lengths."""
    if not ON_GPU:
        raise Left("only a GPU has this allocator")
    model, draw = _model(folder), random.Random(0)
    for _ in range(20):
        _learn(model, _microbatch(draw.randint(1024, 8192)))
        model.zero_grad()
    reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    return {
        "expandable": os.environ.get("PYTORCH_ALLOC_CONF"),
        "reserved_gb": round(reserved / 1e9, 2),
        "allocated_gb": round(allocated / 1e9, 2),
    }


def engine(folder: Path) -> dict[str, Any]:
    """vLLM in this process: what it chose, tokens a second with and without decoding them, pushes, sleep, a restart."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise Left("vLLM is not installed") from error
    from rlpost.model.weights import SavedWeights
    from rlpost.policies import vLLMWrapper
    from rlpost.policies.base import Request
    from rlpost.settings import SamplingSettings, VLLMSettings

    counts, tokens = ((64, 256, MOST_REQUESTS), 128) if ON_GPU else ((4,), 8)
    settings = VLLMSettings(
        max_num_seqs=max(counts), sleep=ON_GPU, kv_cache_gb=4.0 if ON_GPU else 0.2, gpu_memory_utilization=0.3
    )
    policy = vLLMWrapper(folder, load_tokenizer(folder), settings=settings, max_model_len=512)
    found: dict[str, Any] = {"start": round(_seconds(policy.start), 1)}
    weights = SavedWeights(folder)
    policy.reload = lambda: policy.load_weights(weights)
    config = policy.model.llm_engine.vllm_config
    found["second_runner"] = config.use_v2_model_runner
    found["schedules_ahead"] = config.scheduler_config.async_scheduling
    draw = random.Random(0)
    policy.generate([Request([5] * 100, max_tokens=8, seed=0)], SamplingSettings())  # the first compiles
    for count in counts:
        for name, stop in (("", []), (", decoded", ["no model says this"])):
            prompts = [[draw.randint(3, 250) for _ in range(100)] for _ in range(count)]
            requests = [Request(ids, max_tokens=tokens, seed=seed) for seed, ids in enumerate(prompts)]
            began = time.perf_counter()
            sampled = policy.generate(requests, SamplingSettings(stop=stop))
            seconds = time.perf_counter() - began
            found[f"{count} at once{name}"] = round(sum(len(c.token_ids) for c in sampled) / seconds)
    found["push"] = round(_seconds(lambda: policy.load_weights(weights)), 2)
    if ON_GPU:
        free = [torch.cuda.mem_get_info()[0]]
        cycles = []
        for _ in range(10):
            asleep = round(_seconds(policy.rest), 2)
            given = round((torch.cuda.mem_get_info()[0] - free[0]) / 1e9, 1)
            awake = round(_seconds(lambda: policy.load_weights(weights)), 2)
            free.append(torch.cuda.mem_get_info()[0])
            cycles.append({"sleep": asleep, "given_gb": given, "wake_and_push": awake})
        found["sleep"] = [cycles[0], cycles[-1]]
        found["lost_in_ten_gb"] = round((free[0] - free[-1]) / 1e9, 2)
    policy.close()
    found["restart"] = round(_seconds(policy.start), 1)
    policy.close()
    return found


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    part.__name__: part for part in (kernels, packed, speed, head, divided, push, allocator, engine)
}


def _model(folder: Path) -> Any:
    model = load_model(folder, ModelSettings(str(folder), dtype=DType.float32))
    token_log_probs(model, _microbatch(64), 1.0)  # the first call finds out how to read it
    return model


def _rows(groups: list[tuple[int, list[int]]]) -> list[Row]:
    """A group for each length of a prompt and lengths of its completions."""

    def ids(length: int) -> torch.Tensor:
        return torch.randint(3, 250, (length,))

    return [
        Row(prompt, ids(length), torch.ones(length, dtype=torch.bool), torch.zeros(length), 1.0)
        for prompt, lengths in ((ids(size), lengths) for size, lengths in groups)
        for length in lengths
    ]


def _microbatch(tokens: int) -> Microbatch:
    """A microbatch of about `tokens` packed tokens, in groups of 8 completions."""
    prompt = min(128, tokens // 4)
    longest = max(2, min(256, (tokens - prompt) // COMPLETIONS))
    group = prompt + longest * COMPLETIONS
    lengths = [longest] * COMPLETIONS
    [microbatch] = pack(_rows([(prompt, lengths)] * max(1, tokens // group)), 10**9, DEVICE)
    return microbatch


def _learn(model: Any, microbatch: Microbatch) -> None:
    """Forward and backward."""
    with _precision():
        log_probs, _ = token_log_probs(model, microbatch, 1.0)
    log_probs.sum().backward()


@contextmanager
def _precision() -> Iterator[None]:
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=ON_GPU):
        yield


def _seconds(work: Callable[[], Any]) -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    try:
        print(json.dumps(PARTS[sys.argv[1]](Path(sys.argv[2]))))
    except Left as reason:
        print(json.dumps({"left out": str(reason)}))
