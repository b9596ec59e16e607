"""Memory and disk of a training, against sums done by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from rlpost.catalog import TRAIN_DISTILL, TRAIN_GRPO, TRAIN_SFT
from rlpost.config.compose import compose
from rlpost.errors import ResourceError
from rlpost.estimate.machine import Room
from rlpost.estimate.needs import (
    Machine,
    Needs,
    When,
    Work,
    floor,
    longest_that_fits,
    needs_of,
    parts_of,
    peak,
    work_of,
)
from rlpost.estimate.shape import HUB_MODELS, Shape, shape_of_config, shape_of_model
from rlpost.train.facts import needs_facts
from tests.says import Says

GB = 10**9
SMALL = Shape(1000, 10, 2, 4, 20, 50, {"q_proj": 40, "up_proj": 60}, 2, 10, 20)


def known(hub_id: str) -> Shape:
    shape = shape_of_config(HUB_MODELS[hub_id].config)
    assert shape is not None
    return shape


SMOLLM2, QWEN_7B = known("HuggingFaceTB/SmolLM2-135M-Instruct"), known("Qwen/Qwen2.5-7B-Instruct")
GEMMA = shape_of_model("packaged:gemma3-270m") or SMALL


def settings(*words: str, command: Any = TRAIN_GRPO) -> Any:
    return compose(command, list(words)).settings


def work(*words: str, shape: Shape = SMALL, command: Any = TRAIN_GRPO) -> Work:
    return work_of(settings(*words, command=command), shape, gpu_bytes=None)


def parts(*words: str, command: Any = TRAIN_GRPO) -> dict[str, int]:
    return {part.name: part.bytes for part in parts_of(work(*words, command=command))}


def on_host(*words: str, shape: Shape, command: Any = TRAIN_GRPO) -> int:
    return peak(parts_of(work(*words, shape=shape, command=command)), on_gpu=False)


def needs(*words: str, shape: Shape, host: int, disk: int = 1000 * GB, gpu: Room | None = None) -> Needs:
    return needs_of(settings(*words), shape, Machine(Room(host, host), gpu, Room(disk, disk)))


FLOAT32 = ("policy=transformers", "model.dtype=float32")


def test_full_training_holds_weights_gradients_and_two_moments() -> None:
    found = parts(*FLOAT32)
    assert (found["weights"], found["gradients"], found["moments"]) == (4000, 4000, 8000)
    assert "reference" not in found
    assert parts(*FLOAT32, "optim=adamw_8bit")["moments"] == 2000


def test_a_kl_penalty_keeps_the_starting_weights() -> None:
    assert parts(*FLOAT32, "loss.kl_coef=0.1")["reference"] == 4000
    assert parts(*FLOAT32, "loss=minor_sft", command=TRAIN_SFT)["reference"] == 4000


def test_a_teacher_is_held_and_its_logits_beside_the_models() -> None:
    words = (*FLOAT32, "teacher=builtin:tiny", "tokens_per_microbatch=1000")
    whole, sampled = (parts(*words, f"loss={loss}", command=TRAIN_DISTILL) for loss in ("jsd", "opd"))
    assert whole["teacher"] == sampled["teacher"] > 0
    assert whole["activations"] - sampled["activations"] == 256 * SMALL.vocab * 3 * 4  # for one chunk of tokens


def test_a_run_as_it_is_comes_near_what_was_measured() -> None:
    """docs/memory.md: 4.4 GB where products are in bfloat16, 4.5 in float32."""
    for autocast, measured in (("bfloat16", 4.4), ("none", 4.5)):
        estimated = on_host("policy=vllm", f"model.autocast={autocast}", shape=SMOLLM2)
        assert estimated / GB == pytest.approx(measured, rel=0.15)


def test_head_gradient_of_a_microbatch_is_held_beside_the_others() -> None:
    assert parts(*FLOAT32)["head's gradient"] == 4 * 50 * 10
    assert "head's gradient" not in parts(*FLOAT32, "lora.enabled=true")


def test_auto_counts_the_precision_that_takes_more_on_a_cpu() -> None:
    def host(autocast: str, most: str) -> int:
        return on_host(most, f"model.autocast={autocast}", "env=gsm8k", shape=GEMMA, command=TRAIN_SFT)

    # the copies of 268M weights in bfloat16 take more than it saves of 384 tokens, and less than of 2,048
    few, many = "max_tokens=384", "max_tokens=2048"
    assert host("auto", few) == host("bfloat16", few) > host("none", few)
    assert host("auto", many) == host("none", many) > host("bfloat16", many)


def test_large_vocabulary_comes_near_what_was_measured() -> None:
    """Three steps on GSM8K, products in bfloat16: memory/peak_gb was 7.57."""
    words = ["env=gsm8k", "max_tokens=512", "minibatch_size=16", "model.autocast=bfloat16"]
    assert on_host(*words, shape=GEMMA, command=TRAIN_SFT) / GB == pytest.approx(7.57, rel=0.1)


def test_fine_tuning_samples_only_where_accuracy_is_asked_for() -> None:
    assert "sampler" not in parts("policy=vllm", command=TRAIN_SFT)
    assert "sampler" in parts("policy=vllm", "eval.accuracy=true", command=TRAIN_SFT)


def test_seven_billion_in_float32_are_over_120_gb_beside_vllm() -> None:
    found = parts_of(work("model=qwen-7b", "policy=vllm", "model.dtype=float32", shape=QWEN_7B))
    trained = sum(part.bytes for part in found if part.name in ("weights", "gradients", "moments"))
    assert trained == 16 * 7_615_616_512  # 121.8 GB
    assert floor(found, on_gpu=False) > trained + 2 * 7_615_616_512
    assert peak(found, on_gpu=False) > floor(found, on_gpu=False)


def test_what_comes_and_goes_is_counted_once() -> None:
    found = parts_of(work(*FLOAT32, shape=SMOLLM2))
    phases = {when: sum(part.bytes for part in found if part.when is when) for when in When}
    assert min(phases.values()) > 0
    assert peak(found, on_gpu=False) == sum(phases.values()) - min(phases[When.training], phases[When.sampling])


# Whether it fits


def test_what_fits_is_told_part_by_part(says: Says) -> None:
    says("train", "\n".join(map(str, needs_facts(needs(*FLOAT32, shape=SMOLLM2, host=64 * GB)))))


def test_too_small_shared_memory_is_said_where_processes_push() -> None:
    def told(*words: str, free: int) -> str:
        machine = Machine(Room(64 * GB, 64 * GB), None, Room(GB, GB), Room(free, free))
        needed = needs_of(settings("policy=vllm", "policy.dtype=bfloat16", *words), SMOLLM2, machine)
        return needed.pushed_by_disk or ""

    said = told("policy.engine=own_process", free=64 * 10**6)
    assert re.findall(r"(\d+) MB", said) == ["269", "64"]  # the weights, and what is free
    assert told("collector=async", free=64 * 10**6) == said
    assert told("policy.engine=own_process", free=GB) == ""
    assert told(free=64 * 10**6) == ""  # an engine in this process is handed the tensors


def test_a_training_that_cannot_fit_is_refused_with_advice(says: Says) -> None:
    words = ("model=qwen-7b", "policy=vllm", "model.dtype=float32", "policy.dtype=bfloat16")
    asked = needs(*words, shape=QWEN_7B, host=64 * GB)
    with says.refused("train", ResourceError, "138 GB"):
        asked.check("Qwen/Qwen2.5-7B-Instruct")
    assert asked.as_dict()["fits"] == "no"


def test_what_may_not_fit_is_said_and_not_refused(says: Says) -> None:
    least = floor(parts_of(work(*FLOAT32, shape=SMOLLM2)), on_gpu=False)
    tight = needs(*FLOAT32, shape=SMOLLM2, host=least + GB // 10)
    tight.check("smollm2")
    says("train", needs_facts(tight)[-1].note)
    assert tight.as_dict()["fits"] == "maybe"
    assert needs(*FLOAT32, shape=SMOLLM2, host=64 * GB).as_dict()["fits"] == "yes"


def test_a_disk_without_room_for_one_checkpoint_is_refused() -> None:
    with pytest.raises(ResourceError, match=r"1\.61 GB, and 1 GB"):
        needs(*FLOAT32, shape=SMOLLM2, host=64 * GB, disk=GB).check("smollm2")


def test_on_a_gpu_memory_is_told_of_both(says: Says) -> None:
    asked = needs("policy=vllm", shape=SMOLLM2, host=64 * GB, gpu=Room(70 * GB, 80 * GB))
    on_gpu, beside, _ = facts = list(map(str, needs_facts(asked)))
    assert "weights" in on_gpu
    assert "weights" not in beside
    says("train", "\n".join(facts))
    words = ("model=qwen-7b", "policy=vllm", "model.dtype=float32")
    too_small = needs(*words, shape=QWEN_7B, host=GB * 999, gpu=Room(GB, 80 * GB))
    with says.refused("train", ResourceError, "the GPU has 80 GB"):
        too_small.check("qwen-7b")


def test_a_too_long_sequence_is_refused_with_one_that_fits() -> None:
    asked = ("model=qwen-7b", "policy=scripted", *FLOAT32, "env.max_completion_tokens=200000")
    long = needs(*asked, shape=QWEN_7B, host=200 * GB)
    with pytest.raises(ResourceError, match=r" 2\d{5} tokens.*: \d+ tokens"):
        long.check("qwen-7b")
    fits = longest_that_fits(long.work, 200 * GB, on_gpu=False)
    assert 1000 < fits < 200_000
    as_long = replace(long.work, longest=fits, microbatch=fits)
    assert peak(parts_of(as_long), on_gpu=False) <= 200 * GB
    assert peak(parts_of(replace(as_long, microbatch=fits + 1)), on_gpu=False) > 200 * GB


def test_a_row_holds_the_prompt_of_each_turn_rendered_anew() -> None:
    turns = ("env.max_turns=3", "env.max_prompt_tokens=20", "env.max_completion_tokens=10")
    words = (*turns, "env.max_observation_tokens=5", "prompts_per_step=1", "group_size=2")

    def microbatch(*more: str) -> int:
        return work(*words, *more).microbatch

    assert microbatch("env.history=keep") == 2 * (20 + 3 * 10 + 2 * 5)
    # prompts of 20, then 15 more for a turn and an answer to it, then 15 more
    assert microbatch("env.history=as_template") == 2 * ((20 + 10) + (35 + 10) + (50 + 10))
    assert microbatch("env.history=as_template", "tokens_per_microbatch=100") == 135


def test_ranks_share_what_they_divide_and_a_cpu_holds_all() -> None:
    words = ("model=qwen-7b", "policy=scripted", *FLOAT32, "env.max_completion_tokens=64")

    def weights(*more: str, gpu: Room | None = None) -> int:
        parts = needs(*words, *more, shape=QWEN_7B, host=64 * GB, gpu=gpu).parts
        return next(part.bytes for part in parts if part.name == "weights")

    alone, gpu = weights(), Room(80 * GB, 80 * GB)
    assert alone == 4 * QWEN_7B.parameters
    assert weights("cluster.trainer_ranks=4") == 4 * alone
    assert weights("cluster.trainer_ranks=4", "cluster.sharding=full") == alone
    assert weights("cluster.trainer_ranks=4", gpu=gpu) == alone
    assert weights("cluster.trainer_ranks=4", "cluster.sharding=full", gpu=gpu) == alone // 4
    divided = [*words, "cluster.trainer_ranks=4", "cluster.sharding=full", "cluster.cpu_offload=true"]
    offloaded = needs(*divided, shape=QWEN_7B, host=999 * GB, gpu=gpu)
    on_gpu = {part.name for part in offloaded.parts if part.on_gpu}
    assert "gathered layers" in on_gpu
    assert not on_gpu & {"weights", "gradients", "moments"}
