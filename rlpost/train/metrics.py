"""The figures of a step, under the names of metrics.jsonl."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from rlpost.data.conversation import PolicyVersionLabel


def batch_metrics(batch: TensorDictBase, group_size: int, version: PolicyVersionLabel | None) -> dict[str, float]:
    """What a step's completions say: (B,) rows in whole groups; `version` is the policy's at their training."""
    reward = batch["next", "reward"].squeeze(-1)
    valid = batch["valid"]
    groups = reward.view(-1, group_size)
    lengths = torch.tensor([float(mask.sum()) for mask in batch["masks", "all_assistant_mask"].unbind()])
    metrics = {
        "reward/mean": reward[valid].mean().item(),
        "reward/std": reward[valid].std().item(),
        "reward/failed": float((~valid).sum()),
        "groups/zero_std": (groups.amax(1) == groups.amin(1)).float().mean().item(),
        "completion/tokens_mean": lengths.mean().item(),
        "completion/truncated": sum(r == "length" for r in batch["finish_reason"]) / len(lengths),
        "tokens/generated": lengths.sum().item(),
    }
    for name, values in batch["next", "reward_parts"].items():
        metrics[f"reward/{name}"] = values.nanmean().item()
    for name in ("strict", "lenient"):
        metrics[f"accuracy/{name}"] = batch["next", f"accuracy_{name}"].nanmean().item()
    if isinstance(version, int):
        lag = version - batch["policy_version"].float()
        metrics |= {
            "policy/version": float(version),
            "policy/lag_mean": lag.mean().item(),
            "policy/lag_max": lag.max().item(),
        }
    return metrics
