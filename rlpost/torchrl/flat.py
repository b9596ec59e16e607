"""Completions of plain text under flat names, dense: the layout of `LLMData`.

Keys (B rows, P the longest prompt, R the longest response):

    text, text_response              str: the first prompt, and all that the model said after it
    tokens                           int64 (B, P + R): prompts, padded on the left, and responses, on the right
    tokens_response                  int64 (B, R): the latter half of `tokens`
    attention_mask                   int64 (B, P + R): 1 on ids, 0 on pads
    log_probs                        float32 (B, R): the sampler's, 0 on pads
    policy_version, policy_version_max, group_id, sample, valid, finish_reason and `next`
                                     as `rlpost.data.batch` has them
    done, terminated, truncated      bool (B, 1): False, for a turn is taken in no conversation that is over
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from rlpost.data.batch import batch_from_conversations
from rlpost.data.conversation import Conversation
from rlpost.data.ragged import padded, strings, token_fields

AS_ELSEWHERE = ("policy_version", "policy_version_max", "group_id", "sample", "valid", "finish_reason", "next")
PAD = 0  # what stands at a pad; the attention mask tells it from an id


def flat_batch(conversations: Sequence[Conversation]) -> TensorDict:
    """The batch described at the top of this module, of batch size (B,)."""
    prompts, responses = [c.prompt_ids for c in conversations], [c.response_ids for c in conversations]
    tokens = token_fields(prompts, responses, torch.int64, PAD)
    before, after = ([[1] * len(ids) for ids in rows] for rows in (prompts, responses))
    log_probs = [torch.tensor(c.log_probs, dtype=torch.float32) for c in conversations]
    over = torch.zeros(len(conversations), 1, dtype=torch.bool)
    whole = batch_from_conversations(conversations)
    return TensorDict(
        {
            "text": strings([c.prompt_text for c in conversations]),
            "text_response": strings([_said(c) for c in conversations]),
            "tokens": tokens["full"],
            "tokens_response": tokens["response"],
            "attention_mask": token_fields(before, after, torch.int64, PAD)["full"],
            "log_probs": padded(log_probs, PAD),
            "done": over,
            "terminated": over.clone(),
            "truncated": over.clone(),
            **{name: whole.get(name) for name in AS_ELSEWHERE},
        },
        batch_size=[len(conversations)],
    )


def _said(conversation: Conversation) -> str:
    return "".join(m["content"] for m in conversation.messages if m["role"] == "assistant")
