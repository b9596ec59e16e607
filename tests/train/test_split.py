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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlpost import distributed
from rlpost.catalog import option_of
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
    CISPOLossSettings,
    DAPOLossSettings,
    DemonstrationLossSettings,
    DPPOKLLossSettings,
    DPPOTVLossSettings,
    DrGRPOLossSettings,
    DualClipLossSettings,
    GMPOLossSettings,
    GRPOLossSettings,
    GSPOLossSettings,
    GSPOTokenLossSettings,
    KLEstimator,
    LoRASettings,
    MinorSFTLossSettings,
    OptimSettings,
    PolicyLossSettings,
    RatioTo,
    ReinforceLossSettings,
    SamplerCorrection,
    SAPOLossSettings,
    SFTLossSettings,
    TwoSidedLossSettings,
)
from rlpost.settings.loss import SFTAggregation
from rlpost.train.update import Learner, Microbatches, update

TEMPERATURE, LONGEST = 0.9, 12
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}  # transformers' norms are float32 in any model
SHARES = ([0, 2, 3, 5, 7, 8], [1, 4, 6])  # of a minibatch's rows over two ranks
WIDE: dict[str, Any] = {"sampler_ratio_low": 0.8, "sampler_ratio_high": 1.2}  # some completions are inside
ALL_TERMS: dict[str, Any] = {"kl_coef": 0.3, "sampler_kl_coef": 0.2, "entropy_coef": 0.1}
LOSSES: dict[str, PolicyLossSettings | DemonstrationLossSettings] = {
    "grpo": GRPOLossSettings(),
    "grpo token_mean": GRPOLossSettings(aggregation=Aggregation.token_mean),
    "dr_grpo": DrGRPOLossSettings(),
    "dapo": DAPOLossSettings(),
    "gspo": GSPOLossSettings(clip_low=0.1, clip_high=0.1),
    "gspo_token": GSPOTokenLossSettings(clip_low=0.1, clip_high=0.1),
    "cispo": CISPOLossSettings(clip_high=0.3),
    "two_sided": TwoSidedLossSettings(max_ratio=1.3),
    "dual_clip": DualClipLossSettings(max_ratio=1.3),
    "reinforce": ReinforceLossSettings(),
    "sapo": SAPOLossSettings(),
    "gmpo": GMPOLossSettings(),
    "dppo_tv": DPPOTVLossSettings(max_fall=0.02, max_rise=0.02),
    "dppo_kl": DPPOKLLossSettings(max_kl=0.002, ratio_to=RatioTo.old),
    "a mask for having moved": GRPOLossSettings(off_policy_mask=0.05),
    "a ratio to the sampler, and right completions": GSPOLossSettings(
        clip_low=0.1, clip_high=0.1, ratio_to=RatioTo.sampler, right_nll_coef=0.3
    ),
    "every term, k3": GRPOLossSettings(kl_estimator=KLEstimator.k3, **ALL_TERMS),
    "every term, k3_rho": GRPOLossSettings(kl_estimator=KLEstimator.k3_rho, **ALL_TERMS),
    "every term, k1": DAPOLossSettings(kl_estimator=KLEstimator.k1, **ALL_TERMS),
    "every term, k2": GSPOLossSettings(kl_estimator=KLEstimator.k2, clip_low=0.1, clip_high=0.1, **ALL_TERMS),
    "every term, k3_k2grad": CISPOLossSettings(kl_estimator=KLEstimator.k3_k2grad, **ALL_TERMS),
    **{
        f"corrected by {correction.name}": DrGRPOLossSettings(
            sampler_correction=correction, **(WIDE if correction.name.startswith("geo") else {})
        )
        for correction in SamplerCorrection
        if correction is not SamplerCorrection.none
    },
    "sft": SFTLossSettings(kl_coef=0.1),
    "sft sequence_mean": SFTLossSettings(aggregation=SFTAggregation.sequence_mean),
    "minor_sft": MinorSFTLossSettings(),
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


def objective_of(settings: PolicyLossSettings | DemonstrationLossSettings) -> Any:
    if isinstance(settings, PolicyLossSettings):
        return PolicyObjective(settings, temperature=TEMPERATURE, max_completion_tokens=LONGEST)
    return SFTObjective(settings)


def gradient(
    model: PreTrainedModel, name: str, rows: Sequence[Row], tokens_per_microbatch: int = 10_000
) -> torch.Tensor:
    """What the training loops would step with."""
    kept = Kept([p for p in model.parameters() if p.requires_grad], lr=1.0)
    learner = Learner(model, kept, objective_of(LOSSES[name]), OptimSettings(max_grad_norm=1e9), total_updates=1)
    cpu = torch.device("cpu")
    microbatches = Microbatches(tokens_per_microbatch, cpu, Autocast.none, in_step=is_sharded(model))
    update(learner, microbatches, rows, 0)
    return kept.gradient


def plain(model: PreTrainedModel, rows: Sequence[Row], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """log π and entropy of each row's response, (B, T), by transformers' own forward over padded sequences."""
    full = [torch.cat([row.prompt, row.response]) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(full, batch_first=True)
    attention = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in full], batch_first=True)
    logits = model(input_ids=ids, attention_mask=attention).logits / temperature
    log_p = logits.log_softmax(-1)
    chosen = log_p[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropies = -(log_p.exp() * log_p).sum(-1)[:, :-1]

    def of_responses(values: torch.Tensor) -> torch.Tensor:
        cut = [v[len(row.prompt) - 1 :][: len(row.response)] for v, row in zip(values, rows, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(cut, batch_first=True)

    return of_responses(chosen), of_responses(entropies)


def plain_gradient(model: PreTrainedModel, name: str, rows: Sequence[Row]) -> torch.Tensor:
    """Padded and in one piece: the loss function alone, on full logits."""
    settings = LOSSES[name]

    def padded(values: Sequence[Any]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True)

    mask = padded([row.sampled for row in rows])
    own, entropy = plain(model, rows, TEMPERATURE if isinstance(settings, PolicyLossSettings) else 1.0)
    ref = padded([row.ref_log_probs for row in rows]).to(own.dtype)
    if isinstance(settings, PolicyLossSettings):
        loss = plain_policy_loss(settings, rows, own, entropy, ref, mask)
    elif isinstance(settings, SFTLossSettings):
        words = {"aggregation": settings.aggregation.name, "kl_coef": settings.kl_coef}
        loss, _ = sft_loss(own, mask, ref_log_probs=ref, **words)
    else:
        assert isinstance(settings, MinorSFTLossSettings)
        loss, _ = minor_sft_loss(own, ref, mask, beta=settings.beta)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def plain_policy_loss(
    settings: PolicyLossSettings,
    rows: Sequence[Row],
    own: torch.Tensor,
    entropy: torch.Tensor,
    ref: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    def padded(values: Sequence[Any]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True).to(own.dtype)

    words = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    entropy_coef, right_coef, ratio_to = (words.pop(key) for key in ("entropy_coef", "right_nll_coef", "ratio_to"))
    for of_the_loop in ("kl_in", "ref_sync_every", "ref_sync_share", "entropy_target", "entropy_step"):
        del words[of_the_loop]
    words["kl_estimator"] = settings.kl_estimator.name
    words["sampler_correction"] = settings.sampler_correction.name if settings.sampler_correction else "none"
    words["aggregation"] = settings.aggregation and settings.aggregation.name
    aggregation = words["aggregation"] or settings.usual_aggregation.name
    normaliser = len(rows) * LONGEST if aggregation == "constant_length" else None
    sampler = padded([row.sampler_log_probs for row in rows])
    loss, _ = policy_loss(
        option_of("loss", type(settings)),
        own,
        sampler if ratio_to is RatioTo.sampler else padded([row.old_log_probs for row in rows]),
        padded([row.advantages for row in rows]),
        mask,
        sampler_log_probs=sampler,
        ref_log_probs=ref,
        normaliser=normaliser,
        **words,
    )
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
def test_the_gradient_is_the_same_however_a_minibatch_is_split(model: PreTrainedModel, name: str) -> None:
    rows = minibatch(model)
    whole = gradient(model, name, rows)
    assert whole.norm() > 1e-3
    tolerance = TOLERANCE[model.dtype]
    assert difference(whole, plain_gradient(model, name, rows)) < tolerance
    sampled = random.Random(name)
    for budget in (1, sampled.randint(12, 40)):  # 1: each completion alone, whose prompt is read again
        shuffled = sampled.sample(rows, len(rows))
        assert difference(gradient(model, name, shuffled, budget), whole) < tolerance, budget


def gradients_of_a_rank(rank: int, meeting: str) -> dict[tuple[str, torch.dtype], torch.Tensor]:
    """One of two processes of a training: the gradient of every loss, its rows being those of its share."""
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    found = {}
    for dtype in TOLERANCE:
        model = small_model(dtype)
        rows = minibatch(model)
        mine = [rows[i] for i in SHARES[rank]]
        found |= {(name, dtype): gradient(model, name, mine) for name in LOSSES}
        found["nothing", dtype] = gradient(model, "grpo", mine if rank == 0 else [])  # a rank without rows comes, too
    return found


def adapted(model: PreTrainedModel) -> PreTrainedModel:
    """`model` with an adapter that already changes something, so that all of it has a gradient."""
    add_adapter(model, LoRASettings(enabled=True, rank=4), base="")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(2))
    return model


KINDS: dict[str, Callable[[], PreTrainedModel]] = {  # what a rank may hold
    "divided": lambda: small_model(torch.float32),
    "recomputed and divided": lambda: small_model(torch.float32),
    "adapter": lambda: adapted(small_model(torch.float32)),
    "adapter, divided": lambda: adapted(small_model(torch.float32)),
}


def with_a_failed_reward(rows: list[Row]) -> list[Row]:
    """`rows` with the seventh made invalid."""
    rows[6].valid = False
    return rows


FEW = ("grpo", "gspo", "every term, k3", "corrected by tis_token", "sft")


def losses_of(kind: str, world: int) -> list[str]:
    """The losses that are tried: over three ranks all, over two all of a divided model."""
    return [name for name in LOSSES if world == 3 or kind == "divided" or name in FEW]


def gradients_by_kind(rank: int, world: int) -> dict[tuple[str, str], torch.Tensor]:
    """The gradient of losses over the ranks of the group, whatever each holds, and with a rank without rows."""
    found = {}
    whole_model = small_model(torch.float32)
    for kind, build in KINDS.items():
        model = build()
        if kind.startswith("recomputed"):
            recompute_activations(model)
        if kind.endswith("divided"):
            shard(model, ShardingPlan())
        rows = with_a_failed_reward(minibatch(whole_model))
        mine = [rows[place] for place in shares_of(rows, world)[rank]]
        tried = losses_of(kind, world)
        found |= {(kind, name): gradient(model, name, mine, tokens_per_microbatch=15) for name in tried}
        found[kind, "nothing"] = gradient(model, "grpo", rows if rank == 0 else [])
        assert not parameters_left(model)
    return found


def parameters_left(model: PreTrainedModel) -> list[str]:
    """Those that still hold a gradient."""
    return [name for name, parameter in model.named_parameters() if parameter.grad is not None]


def check_kinds(found: dict[tuple[str, str], torch.Tensor], world: int) -> None:
    """Every gradient over several ranks is one rank's, within 1e-5 of its norm."""
    rows = with_a_failed_reward(minibatch(small_model(torch.float32)))
    for kind, build in KINDS.items():
        model = build()
        for name in losses_of(kind, world):
            assert difference(found[kind, name], gradient(model, name, rows)) < 1e-5, (kind, name)
        assert difference(found[kind, "nothing"], gradient(model, "grpo", rows)) < 1e-5, kind


def rank_of_three(rank: int, meeting: str) -> dict[tuple[str, str], torch.Tensor]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=3, timeout=timedelta(seconds=120))
    return gradients_by_kind(rank, 3)


@pytest.mark.slow
def test_the_gradient_is_the_same_over_three_ranks(tmp_path: Path) -> None:
    context, meeting = multiprocessing.get_context("spawn"), f"file://{tmp_path}/meeting"
    others = [context.Process(target=rank_of_three, args=(rank, meeting)) for rank in (1, 2)]
    for other in others:
        other.start()
    try:
        found = rank_of_three(0, meeting)
    finally:
        dist.destroy_process_group()
        for other in others:
            other.join(60)
    assert [other.exitcode for other in others] == [0, 0]
    check_kinds(found, 3)


def other_rank(meeting: str, done: Any) -> None:
    torch.set_num_threads(1)
    gradients_of_a_rank(1, meeting)
    gradients_by_kind(1, 2)
    done.wait(60)  # alive, but in no sum


def test_the_gradient_is_the_same_over_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = f"file://{tmp_path}/meeting"
    context = multiprocessing.get_context("spawn")
    done = context.Event()
    other = context.Process(target=other_rank, args=(meeting, done))
    other.start()
    try:
        found = gradients_of_a_rank(0, meeting)
        by_kind = gradients_by_kind(0, 2)
        monkeypatch.setattr(distributed, "DEADLINE_SECONDS", 0.2)
        with pytest.raises(RankError, match=r"^rank 0 of 2 could not sum what nobody else sums: within 0.2 s another"):
            distributed.sum_over_ranks(1.0, what="what nobody else sums")
    finally:
        done.set()
        other.join(60)
        dist.destroy_process_group()
    assert other.exitcode == 0
    check_kinds(by_kind, 2)
    for dtype, tolerance in TOLERANCE.items():
        model = small_model(dtype)
        rows = minibatch(model)
        for name in LOSSES:
            assert difference(found[name, dtype], gradient(model, name, rows)) < tolerance, (name, dtype)
        alone = gradient(model, "grpo", [rows[i] for i in SHARES[0]])
        assert difference(found["nothing", dtype], alone) < tolerance


def test_without_ranks_a_sum_is_what_it_was() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert distributed.sum_over_ranks(3.5, what="a number") == 3.5
    distributed.sum_gradients([parameter])
    assert parameter.grad is None
