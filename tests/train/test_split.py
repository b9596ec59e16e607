"""The gradient of a minibatch is the same however it is split: microbatches, packing, padding, ranks.

Every loss goes through the very update of the training loops; what it would have stepped with is kept.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlpost import distributed
from rlpost.catalog import CHOICES, option_of
from rlpost.errors import RankError
from rlpost.model.lora import add_adapter
from rlpost.model.packing import Row, shares_of
from rlpost.model.sharding import ShardingPlan, shard
from rlpost.model.trainable import recompute_activations
from rlpost.model.weights import is_sharded, whole
from rlpost.objectives.functional import VARIANTS, aggregate, minor_sft_loss, policy_loss, sft_loss
from rlpost.objectives.policy_loss import PolicyObjective
from rlpost.objectives.supervised import SFTObjective
from rlpost.settings import (
    Aggregation,
    Autocast,
    KLEstimator,
    LoRASettings,
    OptimSettings,
    PolicyLossSettings,
    RatioTo,
    SamplerCorrection,
    SFTLossSettings,
)
from rlpost.settings.loss import SFTAggregation
from rlpost.train.update import Learner, Microbatches, Update, update

CPU = torch.device("cpu")
TEMPERATURE, LONGEST = 0.9, 12
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}  # transformers' norms are float32 in any model
CLIP = {"clip_low": 0.1, "clip_high": 0.1}
WIDE = {"sampler_ratio_low": 0.8, "sampler_ratio_high": 1.2}  # some completions are inside
ALL_TERMS = {"kl_coef": 0.3, "sampler_kl_coef": 0.2, "entropy_coef": 0.1}


def loss(option: str, **fields: Any) -> Any:
    """The settings of `loss=option`."""
    return CHOICES["loss"][option].cls(**fields)


LOSSES = {
    **{name: loss(name) for name in ("grpo", "dr_grpo", "dapo", "reinforce", "sapo", "gmpo", "minor_sft")},
    "grpo token_mean": loss("grpo", aggregation=Aggregation.token_mean),
    "gspo": loss("gspo", **CLIP),
    "gspo_token": loss("gspo_token", **CLIP),
    "cispo": loss("cispo", clip_high=0.3),
    "two_sided": loss("two_sided", max_ratio=1.3),
    "dual_clip": loss("dual_clip", max_ratio=1.3),
    "dppo_tv": loss("dppo_tv", max_fall=0.02, max_rise=0.02),
    "dppo_kl": loss("dppo_kl", max_kl=0.002, ratio_to=RatioTo.old),
    "a mask for having moved": loss("grpo", off_policy_mask=0.05),
    "a ratio to the sampler, and right completions": loss("gspo", ratio_to=RatioTo.sampler, right_nll_coef=0.3, **CLIP),
    "every term, k3": loss("grpo", kl_estimator=KLEstimator.k3, **ALL_TERMS),
    "every term, k3_rho": loss("grpo", kl_estimator=KLEstimator.k3_rho, **ALL_TERMS),
    "every term, k1": loss("dapo", kl_estimator=KLEstimator.k1, **ALL_TERMS),
    "every term, k2": loss("gspo", kl_estimator=KLEstimator.k2, **CLIP, **ALL_TERMS),
    "every term, k3_k2grad": loss("cispo", kl_estimator=KLEstimator.k3_k2grad, **ALL_TERMS),
    **{
        f"corrected by {each.name}": loss(
            "dr_grpo", sampler_correction=each, **(WIDE if each.name.startswith("geo") else {})
        )
        for each in SamplerCorrection
        if each is not SamplerCorrection.none
    },
    "sft": loss("sft", kl_coef=0.1),
    "sft sequence_mean": loss("sft", aggregation=SFTAggregation.sequence_mean),
}


def small_model(dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model("llama", vocab_size=53, **sizes, **heads)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def minibatch(model: PreTrainedModel) -> list[Row]:
    """Groups of ragged completions: some with holes in their mask, an empty one, advantages of 0 and per token."""
    generator = torch.Generator().manual_seed(1)

    def noise(size: int, scale: float) -> torch.Tensor:
        return scale * torch.randn(size, generator=generator)

    rows = []
    for prompt_length, lengths in ((5, [3, 9, 1, 6]), (3, [4, 4]), (8, [2, 12, 7])):
        prompt = torch.randint(0, 53, (prompt_length,), generator=generator)
        for length in lengths:
            response = torch.randint(0, 53, (length,), generator=generator)
            sampled = torch.rand(length, generator=generator) < 0.8
            sampled[-1] = True
            with torch.no_grad():
                own = plain(model, [Row(prompt, response, sampled, response, 0.0)])[0][0].float()
            near = [own + noise(length, scale) for scale in (0.3, 0.3, 0.5)]
            advantage = noise(1, 1.0).item()
            rows.append(
                Row(prompt, response, sampled, near[1], advantage, old_log_probs=near[0], ref_log_probs=near[2])
            )
    rows[1].advantage = noise(9, 1.0)
    rows[3].advantage = 0.0
    rows[0].right = rows[3].right = True
    rows[5].sampled = torch.zeros_like(rows[5].sampled)  # as overlong filtering leaves it
    return rows


class Kept(torch.optim.SGD):
    """Keeps the gradient that it is to step with, and takes no step."""

    gradient = torch.zeros(0)

    def step(self, closure: Any = None) -> None:
        [group] = self.param_groups
        self.gradient = torch.cat([whole(p.grad).flatten() for p in group["params"]])


def stepped(
    model: PreTrainedModel, objective: Any, rows: Sequence[Row], tokens_per_microbatch: int = 10_000
) -> tuple[torch.Tensor, Update[Any]]:
    """The gradient that a training would step with, and what it would report."""
    kept = Kept([p for p in model.parameters() if p.requires_grad], lr=1.0)
    learner = Learner(model, kept, objective, OptimSettings(max_grad_norm=1e9), None)
    microbatches = Microbatches(tokens_per_microbatch, CPU, Autocast.none, in_step=is_sharded(model))
    done = update(learner, microbatches, rows, 0)
    return kept.gradient, done


def gradient(model: PreTrainedModel, name: str, rows: Sequence[Row], budget: int = 10_000) -> torch.Tensor:
    """The gradient of one of `LOSSES`."""
    settings = LOSSES[name]
    if isinstance(settings, PolicyLossSettings):
        objective: Any = PolicyObjective(settings, temperature=TEMPERATURE, max_completion_tokens=LONGEST)
    else:
        objective = SFTObjective(settings)
    return stepped(model, objective, rows, budget)[0]


def plain(model: PreTrainedModel, rows: Sequence[Row], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """log π and entropy of each row's response, (B, T), by transformers' own forward over padded sequences."""
    full = [torch.cat([row.prompt, row.response]) for row in rows]
    ids = pad_sequence(full, batch_first=True)
    attention = pad_sequence([torch.ones_like(row) for row in full], batch_first=True)
    logits = model(input_ids=ids, attention_mask=attention).logits / temperature
    log_p = logits.log_softmax(-1)
    chosen = log_p[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropies = -(log_p.exp() * log_p).sum(-1)[:, :-1]

    def of_responses(values: torch.Tensor) -> torch.Tensor:
        cut = [v[len(row.prompt) - 1 :][: len(row.response)] for v, row in zip(values, rows, strict=True)]
        return pad_sequence(cut, batch_first=True)

    return of_responses(chosen), of_responses(entropies)


def padded(values: Sequence[Any]) -> torch.Tensor:
    return pad_sequence(list(values), batch_first=True)


def plain_gradient(model: PreTrainedModel, name: str, rows: Sequence[Row]) -> torch.Tensor:
    """Padded and in one piece: the loss function alone, on full logits."""
    settings, mask = LOSSES[name], padded([row.sampled for row in rows])
    own, entropy = plain(model, rows, TEMPERATURE if isinstance(settings, PolicyLossSettings) else 1.0)
    ref = padded([row.ref_log_probs for row in rows]).to(own.dtype)
    if isinstance(settings, PolicyLossSettings):
        loss = plain_policy_loss(settings, rows, own, entropy)
    elif isinstance(settings, SFTLossSettings):
        words = {"aggregation": settings.aggregation.name, "kl_coef": settings.kl_coef}
        loss, _ = sft_loss(own, mask, ref_log_probs=ref, **words)
    else:
        loss, _ = minor_sft_loss(own, ref, mask, beta=settings.beta)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def plain_policy_loss(
    settings: PolicyLossSettings, rows: Sequence[Row], own: torch.Tensor, entropy: torch.Tensor
) -> torch.Tensor:
    words = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    entropy_coef, right_coef, ratio_to = (words.pop(key) for key in ("entropy_coef", "right_nll_coef", "ratio_to"))
    for of_the_loop in ("kl_in", "ref_sync_every", "ref_sync_share", "entropy_target", "entropy_step"):
        del words[of_the_loop]
    words["kl_estimator"] = settings.kl_estimator.name
    words["sampler_correction"] = settings.sampler_correction.name if settings.sampler_correction else "none"
    words["aggregation"] = settings.aggregation and settings.aggregation.name
    aggregation = words["aggregation"] or settings.usual_aggregation.name
    words["normaliser"] = normaliser = len(rows) * LONGEST if aggregation == "constant_length" else None
    names = ("sampler_log_probs", "ref_log_probs", "old_log_probs", "advantages")
    sampler, ref, old, advantages = (padded([getattr(row, name) for row in rows]).to(own.dtype) for name in names)
    given = own, sampler if ratio_to is RatioTo.sampler else old, advantages
    mask, loss_name = padded([row.sampled for row in rows]), option_of("loss", type(settings))
    loss, _ = policy_loss(loss_name, *given, mask, sampler_log_probs=sampler, ref_log_probs=ref, **words)
    right = torch.tensor([row.right for row in rows])[:, None]
    nll = aggregate(-own * right, mask, aggregation, normaliser)
    return loss - entropy_coef * aggregate(entropy, mask, aggregation, normaliser) + right_coef * nll


def difference(gradient: torch.Tensor, other: torch.Tensor) -> float:
    return ((gradient - other).norm() / other.norm()).item()


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return small_model(request.param)


def test_every_loss_is_tried() -> None:
    tried = {option_of("loss", type(settings)) for settings in LOSSES.values()}
    assert tried == {*VARIANTS, "sft", "minor_sft"}


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_the_same_however_a_minibatch_is_split(model: PreTrainedModel, name: str) -> None:
    rows = minibatch(model)
    whole = gradient(model, name, rows)
    assert whole.norm() > 1e-3
    tolerance = TOLERANCE[model.dtype]
    assert difference(whole, plain_gradient(model, name, rows)) < tolerance
    sampled = random.Random(name)
    for budget in (1, sampled.randint(12, 40)):  # 1: each completion alone, whose prompt is read again
        shuffled = sampled.sample(rows, len(rows))
        assert difference(gradient(model, name, shuffled, budget), whole) < tolerance, budget


def adapted(model: PreTrainedModel) -> PreTrainedModel:
    """`model` with an adapter that already changes something, so that all of it has a gradient."""
    add_adapter(model, LoRASettings(enabled=True, rank=4), base="")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(2))
    return model


KINDS: dict[str, Callable[[], PreTrainedModel]] = {  # what a rank may hold
    "whole, float64": lambda: small_model(torch.float64),
    "whole, float32": lambda: small_model(torch.float32),
    "divided": lambda: small_model(torch.float32),
    "recomputed and divided": lambda: small_model(torch.float32),
    "adapter": lambda: adapted(small_model(torch.float32)),
    "adapter, divided": lambda: adapted(small_model(torch.float32)),
}
FEW = ("grpo", "gspo", "every term, k3", "corrected by tis_token", "sft")


def losses_of(kind: str, world: int) -> Sequence[str]:
    """The losses that are tried over `world` ranks."""
    return list(LOSSES) if world == 3 or kind.startswith(("whole", "divided")) else FEW


def rows_of(kind: str) -> list[Row]:
    """A minibatch; the reward of its seventh completion has failed."""
    rows = minibatch(small_model(torch.float64 if kind.endswith("float64") else torch.float32))
    rows[6].valid = False
    return rows


def gradients_of_a_rank(rank: int, world: int, meeting: str) -> dict[tuple[str, str], torch.Tensor]:
    """The gradient of losses over all ranks, by what each holds; of "nothing", of rows that rank 0 alone has."""
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    found = {}
    for kind, build in KINDS.items():
        model, rows = build(), rows_of(kind)
        if kind.startswith("recomputed"):
            recompute_activations(model)
        if kind.endswith("divided"):
            shard(model, ShardingPlan())
        # groups stay together where a model is divided
        mine = rows[rank::world] if kind.startswith("whole") else [rows[i] for i in shares_of(rows, world)[rank]]
        budget = 10_000 if kind.startswith("whole") else 15
        found |= {(kind, name): gradient(model, name, mine, budget) for name in losses_of(kind, world)}
        found[kind, "nothing"] = gradient(model, "grpo", rows if rank == 0 else [])
        assert all(parameter.grad is None for parameter in model.parameters())
    return found


def other_rank(rank: int, world: int, meeting: str, done: Any) -> None:
    torch.set_num_threads(1)
    gradients_of_a_rank(rank, world, meeting)
    done.wait(60)  # alive, but in no sum


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradient_is_the_same_over_several_ranks(world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, meeting = multiprocessing.get_context("spawn"), f"file://{tmp_path}/meeting"
    done = context.Event()
    others = [context.Process(target=other_rank, args=(rank, world, meeting, done)) for rank in range(1, world)]
    for other in others:
        other.start()
    try:
        found = gradients_of_a_rank(0, world, meeting)
        monkeypatch.setattr(distributed, "DEADLINE_SECONDS", 0.2)
        with pytest.raises(RankError, match=rf"^rank 0 of {world} .* a number: .* 0\.2 s "):
            distributed.sum_over_ranks(1.0, what="a number")
    finally:
        done.set()
        for other in others:
            other.join(60)
        dist.destroy_process_group()
    assert {other.exitcode for other in others} == {0}
    for kind, build in KINDS.items():
        model, rows = build(), rows_of(kind)
        tolerance = 1e-6 if kind.endswith("float64") else 1e-5
        for name in losses_of(kind, world):
            assert difference(found[kind, name], gradient(model, name, rows)) < tolerance, (kind, name)
        assert difference(found[kind, "nothing"], gradient(model, "grpo", rows)) < tolerance, kind
