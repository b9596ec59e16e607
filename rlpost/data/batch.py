"""The TensorDict that a step trains on, and the best completions of its groups.

Keys (B rows; "ragged" is a jagged nested tensor of shape (B, *)):

    query, text.prompt                           str: the user's message, and the rendered first prompt
    text.response                                str: the model's last turn
    history                                      History (B, M): all messages, replies included
    tokens.prompt, tokens.response, tokens.full  int64, ragged; full = prompt + response always
    tokens.hinted_prompt                         int64, ragged: the prompt as the reference reads it, with the hint
                                                 (absent without one)
    tokens.restarts                              int64, ragged: the indices into response at which a whole new prompt
                                                 begins; from there on the model reads no id before it
    masks.all_attention_mask                     bool, ragged over full, all True
    masks.all_assistant_mask                     bool, ragged over full: True on every sampled id
    log_probs.response, log_probs.full           float32, ragged: the sampler's, 0 where not sampled
    policy_version                               int64 (B,): the oldest the row was sampled under
                                                 (str per row where versions are uuids)
    policy_version_max                           the newest, likewise
    token_versions                               int64, ragged over response: the version that each id was sampled
                                                 under, -1 where not sampled (absent where versions are uuids)
    group_id, sample                             int64 (B,)
    source                                       str: its source's name in a mix of environments, else ""
    turns                                        int64 (B,): the model's in this conversation
    tools.calls, tools.errors                    int64 (B,): calls that were run; calls that failed or were not run
    valid                                        bool (B,)
    finish_reason                                str
    next.reward                                  float32 (B, 1); NaN without one
    next.reward_parts.<name>                     float32 (B, 1); NaN in a row without this part
    next.part_weights.<name>                     float32 (B, 1), likewise: the part's weight in the reward
    next.accuracy_strict, next.accuracy_lenient  float32 (B, 1); NaN where the task has no measure
    next.done, next.terminated, next.truncated   bool (B, 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from statistics import median_low
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlpost.data.conversation import Conversation
from rlpost.data.history import History
from rlpost.data.ragged import one_each, ragged, strings, token_fields, versions

TOLERANCE = 1e-6  # relative: above the rounding error of equal rewards


def batch_from_conversations(conversations: Sequence[Conversation]) -> TensorDict:
    """The batch described at the top of this module, of batch size (B,)."""
    size = len(conversations)
    prompts = [c.prompt_ids for c in conversations]
    tokens = token_fields(prompts, [c.response_ids for c in conversations], torch.int64)
    tokens["restarts"] = ragged([torch.tensor(c.restarts, dtype=torch.int64) for c in conversations])
    if any(c.hinted_ids for c in conversations):
        tokens["hinted_prompt"] = ragged([torch.tensor(c.hinted_ids, dtype=torch.int64) for c in conversations])
    unsampled = [[0.0] * len(ids) for ids in prompts]
    log_probs = token_fields(unsampled, [c.log_probs for c in conversations], torch.float32)

    token_versions = [c.token_versions() for c in conversations]
    known: dict[str, Any] = {}
    if all(isinstance(version, int) for row in token_versions for version in row):
        known["token_versions"] = ragged([torch.tensor(row, dtype=torch.int64) for row in token_versions])
    part_names = sorted({name for c in conversations for name in c.reward_parts})

    def by_part(column: str) -> dict[str, torch.Tensor]:
        return {name: one_each([getattr(c, column).get(name) for c in conversations]) for name in part_names}

    return TensorDict(
        {
            "query": strings([c.query for c in conversations]),
            "history": History.from_chats([c.messages for c in conversations]),
            "text": {
                "prompt": strings([c.prompt_text for c in conversations]),
                "response": strings([c.response_text for c in conversations]),
            },
            "tokens": tokens,
            "masks": {
                "all_attention_mask": torch.ones_like(tokens["full"], dtype=torch.bool),
                "all_assistant_mask": token_fields(unsampled, [c.mask for c in conversations], torch.bool)["full"],
            },
            "log_probs": {"response": log_probs["response"], "full": log_probs["full"]},
            # -1 before the model's first turn
            "policy_version": versions([(c.policy_versions or [-1])[0] for c in conversations]),
            "policy_version_max": versions([c.newest_version for c in conversations]),
            **known,
            "group_id": torch.tensor([c.group_id for c in conversations]),
            "sample": torch.tensor([c.sample for c in conversations]),
            "source": strings([c.source for c in conversations]),
            "turns": torch.tensor([c.turns for c in conversations]),
            "tools": {
                "calls": torch.tensor([c.tool_calls for c in conversations]),
                "errors": torch.tensor([c.tool_errors for c in conversations]),
            },
            "valid": torch.tensor([c.valid for c in conversations]),
            "finish_reason": strings([c.finish_reason for c in conversations]),
            "next": {
                "reward": one_each([c.reward for c in conversations]),
                "reward_parts": by_part("reward_parts"),
                "part_weights": by_part("part_weights"),
                "accuracy_strict": one_each([c.accuracy_strict for c in conversations]),
                "accuracy_lenient": one_each([c.accuracy_lenient for c in conversations]),
                "done": one_each([c.done for c in conversations], torch.bool),
                "terminated": one_each([c.terminated for c in conversations], torch.bool),
                "truncated": one_each([c.truncated for c in conversations], torch.bool),
            },
        },
        batch_size=[size],
    )


def best_of_groups(batch: TensorDictBase, count: int, minimum: float | None) -> list[int]:
    """The places of each group's `best` in a batch (B,) of complete groups, one row a completion, group by group."""
    given = zip(batch["next", "reward"].flatten().tolist(), batch["valid"].tolist(), strict=True)
    worth = [reward if valid and isfinite(reward) else nan for reward, valid in given]
    groups: dict[int, list[int]] = {}
    for place, group in enumerate(batch["group_id"].tolist()):
        groups.setdefault(group, []).append(place)
    return [places[i] for places in groups.values() for i in best([worth[p] for p in places], count, minimum)]


def best(worth: Sequence[float], count: int, minimum: float | None) -> list[int]:
    """The places of the `count` greatest candidates, greatest first; NaN is never one.

    Candidates are at least `minimum`; if it is None, strictly above the lower median of all that are not NaN,
    up to rounding.
    """
    known = [value for value in worth if value == value]
    if not known:
        return []
    bar = median_low(known) + TOLERANCE * max(1.0, *map(abs, known)) if minimum is None else minimum
    candidates = [i for i, value in enumerate(worth) if (value > bar if minimum is None else value >= bar)]
    return sorted(candidates, key=lambda i: -worth[i])[:count]
