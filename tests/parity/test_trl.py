"""The same tensors through TRL's own loss: GRPOTrainer._compute_loss on a trainer that holds nothing else.

Needs `pip install 'rlpost[parity]'`; run with `pytest -m parity`.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlpost.model.divergence import chunked_divergence
from rlpost.objectives.functional import policy_loss
from rlpost.objectives.preference import pair_loss

pytestmark = pytest.mark.parity

B, T = 4, 7
MAX_LENGTH = 11

# name -> (TRL's loss_type, its importance_sampling_level, epsilon low and high as TRL means them, ours)
LOSSES: dict[str, tuple[str, str, float, float, dict[str, Any]]] = {
    "grpo": ("grpo", "token", 0.2, 0.2, {"aggregation": "sequence_mean"}),
    "dr_grpo": ("dr_grpo", "token", 0.2, 0.2, {}),
    "dapo": ("dapo", "token", 0.2, 0.28, {}),
    "gspo": ("grpo", "sequence", 3e-4, 4e-4, {}),
    "cispo": ("cispo", "token", 0.2, 1.4, {"clip_high": 0.4}),  # TRL's epsilon_high is the largest weight itself
    "two_sided": ("dapo", "token", 0.2, 0.2, {"max_ratio": 1.5}),
    "sapo": ("sapo", "token", 0.2, 0.2, {}),
    "gmpo": ("gmpo", "token", 0.4, 0.4, {}),
}


@pytest.fixture(autouse=True)
def _trl_is_installed() -> None:
    """Here, since importing it takes its time and these tests are deselected by default."""
    pytest.importorskip("trl", reason="parity with TRL is checked where TRL is installed")


def bare_trainer(
    name: str, beta: float, log_probs: torch.Tensor, corrects_sampler: bool, weighted_kl: bool, mask: float | None
) -> Any:
    """A GRPOTrainer with the attributes that its loss reads, and `log_probs` for its model's."""
    from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    loss_type, level, low, high, ours = LOSSES[name]
    trainer: Any = object.__new__(GMPOTrainer if loss_type == "gmpo" else GRPOTrainer)
    trainer.loss_type, trainer.importance_sampling_level = loss_type, level
    trainer.epsilon_low, trainer.epsilon_high, trainer.beta = low, high, beta
    trainer.args = SimpleNamespace(
        delta=ours.get("max_ratio"),
        use_bias_correction_kl=weighted_kl,
        steps_per_generation=1,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
    )
    trainer.max_completion_length = MAX_LENGTH
    trainer.current_gradient_accumulation_steps = 1
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = corrects_sampler
    trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = False
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, mask
    trainer.model = SimpleNamespace(training=True)
    trainer.accelerator = SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x)
    trainer._metrics = {"train": defaultdict(list)}
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, torch.zeros(B, T), None)
    return trainer


def draw(seed: int) -> dict[str, Any]:
    """A ragged batch of completions, none of them empty, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(B, T, generator=generator, dtype=torch.float64)

    log_probs = -noise(1.0).abs() - 0.1
    lengths = torch.randint(1, T + 1, (B, 1), generator=generator)
    return {
        "log_probs": log_probs,
        "old_log_probs": log_probs + noise(0.4),
        "ref_log_probs": log_probs + noise(0.4),
        "sampler_log_probs": log_probs + noise(0.4),
        "advantage": torch.randn(B, generator=generator, dtype=torch.float64),
        "mask": torch.arange(T)[None] < lengths,
    }


def trl_loss(
    name: str,
    beta: float,
    given: dict[str, Any],
    weights: torch.Tensor | None = None,
    *,
    weighted_kl: bool = False,
    off_policy_mask: float | None = None,
) -> torch.Tensor:
    ids = torch.zeros(B, T, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones(B, 1),
        "completion_ids": ids,
        "completion_mask": given["mask"].double(),
        "advantages": given["advantage"],
        "old_per_token_logps": given["old_log_probs"],
        "sampling_per_token_logps": given["sampler_log_probs"],
        "ref_per_token_logps": given["ref_log_probs"],
        "importance_sampling_ratio": weights,
        "num_items_in_batch": given["mask"].sum().double(),
    }
    if LOSSES[name][0] == "sapo" or off_policy_mask is not None:
        inputs["advantages"] = given["advantage"][:, None]  # as GRPOTrainer gives them to its loss
    trainer = bare_trainer(name, beta, given["log_probs"], weights is not None, weighted_kl, off_policy_mask)
    return trainer._compute_loss(trainer.model, inputs)


def assert_same(name: str, ours: torch.Tensor, theirs: torch.Tensor, log_probs: torch.Tensor) -> None:
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5), name
    gradients = [torch.autograd.grad(loss, log_probs, retain_graph=True)[0] for loss in (ours, theirs)]
    assert gradients[1].abs().max() > 1e-3
    assert torch.allclose(gradients[0], gradients[1], rtol=0, atol=1e-5), name


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_trls(name: str, beta: float) -> None:
    for seed in range(4):
        given = draw(seed)
        given["log_probs"].requires_grad_()
        normaliser = B * MAX_LENGTH if name == "dr_grpo" else None
        ours, _ = policy_loss(name, **given, normaliser=normaliser, kl_coef=beta, kl_estimator="k3", **LOSSES[name][-1])
        assert_same(name, ours, trl_loss(name, beta, given), given["log_probs"])


def test_the_weighted_kl_term_is_trls() -> None:
    for seed in range(4):
        given = draw(seed)
        given["log_probs"].requires_grad_()
        ours, _ = policy_loss("grpo", **given, kl_coef=0.1, kl_estimator="k3_rho", aggregation="sequence_mean")
        assert_same("grpo", ours, trl_loss("grpo", 0.1, given, weighted_kl=True), given["log_probs"])


def test_the_mask_of_completions_that_have_moved_is_trls() -> None:
    for seed in range(4):
        given = draw(seed)
        given["log_probs"].requires_grad_()
        ours, _ = policy_loss("dapo", **given, off_policy_mask=0.05, **LOSSES["dapo"][-1])
        assert_same("dapo", ours, trl_loss("dapo", 0.0, given, off_policy_mask=0.05), given["log_probs"])


@pytest.mark.parametrize("correction", ["tis_token", "mis_token"])
def test_a_corrected_loss_is_trls_with_the_same_weights(correction: str) -> None:
    """TRL makes the weights where it generates: π_old/µ, clamped to its cap, or 0 above it."""
    for seed in range(4):
        given = draw(seed)
        given["log_probs"].requires_grad_()
        weights = (given["old_log_probs"] - given["sampler_log_probs"]).exp()
        cut = weights > 1.3
        weights = weights.masked_fill(cut, 0.0) if correction == "mis_token" else weights.clamp(max=1.3)
        assert cut[given["mask"]].any()
        ours, _ = policy_loss("dapo", **given, sampler_correction=correction, sampler_ratio_high=1.3)
        assert_same(correction, ours, trl_loss("dapo", 0.0, given, weights), given["log_probs"])


# Pairs and distillation


def pairs(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log π, log π_ref and the mask of two pairs, the rows 2i and 2i + 1 each, in float64."""
    given = draw(seed)
    return given["log_probs"].requires_grad_(), given["ref_log_probs"], given["mask"]


def trl_pair_loss(loss_type: str, beta: float, log_probs: torch.Tensor, ref: torch.Tensor, mask: torch.Tensor) -> Any:
    """DPOTrainer's loss, which takes all chosen replies first, on a trainer that holds nothing else."""
    from trl.trainer.dpo_trainer import DPOTrainer  # pyright: ignore[reportMissingImports]

    order = [0, 2, 1, 3]
    own, ref, mask = log_probs[order], (ref * mask)[order].sum(-1), mask[order]
    whole = torch.cat([torch.zeros(B, 1, dtype=torch.bool), mask], 1)  # one token of prompt
    trainer: Any = object.__new__(DPOTrainer)
    trainer.model = SimpleNamespace(training=True)
    trainer.accelerator = SimpleNamespace(device=log_probs.device, gather_for_metrics=lambda x: x, gather=lambda x: x)
    trainer.aux_loss_enabled = trainer.use_weighting = False
    trainer.ld_alpha, trainer.precompute_ref_logps, trainer.f_divergence_type = None, True, "reverse_kl"
    trainer.beta, trainer.loss_types, trainer.loss_weights, trainer.label_smoothing = beta, [loss_type], [1.0], 0.1
    trainer._metrics, trainer._total_train_tokens, trainer._tp_size = {"train": defaultdict(list)}, 0, 1
    zeros = torch.zeros(B, T)
    said = SimpleNamespace(log_probs=own * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    inputs = {
        "input_ids": torch.zeros(B, 1 + T, dtype=torch.int64),
        "attention_mask": torch.ones(B, 1 + T),
        "completion_mask": whole.long(),
        "ref_chosen_logps": ref[:2],
        "ref_rejected_logps": ref[2:],
    }
    return trainer._compute_loss(lambda **_: said, inputs, return_outputs=False)


@pytest.mark.parametrize(
    ("name", "theirs", "options"),
    [
        ("dpo", "sigmoid", {"beta": 0.3}),
        ("dpo_norm", "sigmoid_norm", {"beta": 2.0}),
        ("ipo", "ipo", {"beta": 0.3}),
    ],
)
def test_a_loss_on_pairs_is_trls(name: str, theirs: str, options: dict[str, Any]) -> None:
    for seed in range(4):
        log_probs, ref, mask = pairs(seed)
        ours, _ = pair_loss(name, log_probs, ref, mask, **options)
        assert_same(name, ours, trl_pair_loss(theirs, options["beta"], log_probs, ref, mask), log_probs)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_from_a_teacher_is_trls(beta: float) -> None:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer  # pyright: ignore[reportMissingImports]

    generator = torch.Generator().manual_seed(0)
    hidden, other = (torch.randn(5, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    heads = [torch.nn.Linear(8, 13, bias=False, dtype=torch.float64) for _ in range(2)]
    hidden.requires_grad_()
    ours = chunked_divergence(hidden, heads[0], other, heads[1], torch.arange(5), 0.7, beta).divergence.sum()
    theirs = GKDTrainer.generalized_jsd_loss(
        heads[0](hidden)[None], heads[1](other).detach()[None], beta=beta, temperature=0.7, reduction="sum"
    )
    assert_same(f"beta {beta}", ours, theirs, hidden)
