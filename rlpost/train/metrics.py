"""The figures of a step, under the names of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase

from rlpost.data.conversation import CUT, PolicyVersionLabel
from rlpost.objectives.advantage import equal_up_to_rounding
from rlpost.objectives.policy_loss import policy_metrics
from rlpost.objectives.policy_objective import PolicyOutput

# what policy_metrics calls it -> its name in metrics.jsonl
TOKEN_METRICS = {
    "clip_fraction": "ratio/clip_fraction",
    "clip_fraction_low": "ratio/clip_low",
    "clip_fraction_high": "ratio/clip_high",
    "ess": "ess",
    "kl_to_ref": "kl/ref",
    "kl_to_sampler": "kl/sampler",
    "sampler_gap": "sampler/logprob_gap",
    "sampler_ess": "sampler/ess",
}
CORRECTION_METRICS = {"sampler_weight_mean": "sampler/weight_mean", "sampler_cut_fraction": "sampler/cut"}


def batch_metrics(batch: TensorDictBase, group_size: int, version: PolicyVersionLabel | None) -> dict[str, float]:
    """What a step's completions say: (B,) rows in whole groups; `version` is the policy's at their training."""
    reward = batch["next", "reward"].squeeze(-1)
    valid = batch["valid"]
    groups = zip(reward.split(group_size), valid.split(group_size), strict=True)
    no_spread = [equal_up_to_rounding(rewards[counts]) for rewards, counts in groups]
    lengths = torch.tensor([float(mask.sum()) for mask in batch["masks", "all_assistant_mask"].unbind()])
    metrics = {
        "reward/mean": reward[valid].mean().item(),
        "reward/std": reward[valid].std().item(),
        "reward/failed": float((~valid).sum()),
        "groups/zero_std": sum(no_spread) / len(no_spread),
        "completion/tokens_mean": lengths.mean().item(),
        "completion/truncated": sum(r in CUT for r in batch["finish_reason"]) / len(lengths),
        "tokens/generated": lengths.sum().item(),
    }
    if int(batch["turns"].max()) > 1:
        ran_out = batch["next", "truncated"].squeeze(-1).tolist()
        metrics |= {
            "turns/mean": batch["turns"].float().mean().item(),
            "turns/ran_out": sum(t and r not in CUT for t, r in zip(ran_out, batch["finish_reason"], strict=True))
            / len(lengths),
            "tools/calls_mean": batch["tools", "calls"].float().mean().item(),
            "tools/errors_mean": batch["tools", "errors"].float().mean().item(),
        }
    for name, values in batch["next", "reward_parts"].items():
        metrics[f"reward/{name}"] = values.nanmean().item()
    for name in ("strict", "lenient"):
        metrics[f"accuracy/{name}"] = batch["next", f"accuracy_{name}"].nanmean().item()
    metrics |= _by_source(batch, group_size)
    if isinstance(version, int):
        lag = version - batch["policy_version"].float()
        metrics |= {
            "policy/version": float(version),
            "policy/lag_mean": lag.mean().item(),
            "policy/lag_max": lag.max().item(),
        }
    return metrics


def _by_source(batch: TensorDictBase, group_size: int) -> dict[str, float]:
    """The same figures of each source of a mix of environments, under `source/NAME/`; none where it is one.

    Those that are counts add up to the step's, and so do means, each times the completions it is of.
    """
    sources = list(batch["source"])
    metrics: dict[str, float] = {}
    for name in sorted({source for source in sources if source}):
        rows = torch.tensor([source == name for source in sources])
        reward, valid = batch["next", "reward"].squeeze(-1)[rows], batch["valid"][rows]
        sampled = batch["masks", "all_assistant_mask"].unbind()
        lengths = [int(mask.sum()) for mask, source in zip(sampled, sources, strict=True) if source == name]
        groups = zip(reward.split(group_size), valid.split(group_size), strict=True)
        no_spread = [equal_up_to_rounding(rewards[counts]) for rewards, counts in groups]
        own = {
            "completions": float(len(reward)),
            "reward": reward[valid].mean().item(),
            "failed": float((~valid).sum()),
            "zero_std": sum(no_spread) / len(no_spread),
            "tokens_mean": sum(lengths) / len(lengths),
        }
        for kind in ("strict", "lenient"):
            own[f"accuracy_{kind}"] = batch["next", f"accuracy_{kind}"].squeeze(-1)[rows].nanmean().item()
        metrics |= {f"source/{name}/{key}": value for key, value in own.items()}
    return metrics


def loss_metrics(updates: Sequence[Sequence[PolicyOutput]], *, corrected: bool) -> dict[str, float]:
    """What a step's optimizer steps say, each given by its microbatches' outputs.

    Losses are means over the optimizer steps, all else over every token that was read, however it was
    split. Where nothing was read the loss is 0 and the means are NaN: nothing was trained on, which is
    not the same as 0. `corrected` adds the weights that correct for the sampler.
    """
    outputs = [output for update in updates for output in update]
    num_updates = sum(bool(update) for update in updates)
    losses = {"loss/policy": 0.0}
    for output in outputs:
        for name, share in output.losses.items():
            losses[name] = losses.get(name, 0.0) + share.item() / num_updates
    means = policy_metrics([output.terms for output in outputs])
    names = TOKEN_METRICS | (CORRECTION_METRICS if corrected else {})
    entropy = torch.cat([output.entropy for output in outputs]).mean().item() if outputs else float("nan")
    return losses | {names[key]: value.item() for key, value in means.items() if key in names} | {"entropy": entropy}
