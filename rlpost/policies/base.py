"""The interface every policy implements: prompts in, completions out, and a version."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.data.conversation import Completion, Conversation, PolicyVersionLabel
from rlpost.errors import DataError
from rlpost.settings import SamplingSettings


@dataclass(slots=True)
class Request:
    """One completion to sample: the prompt's ids, how many ids at most, and the seed of its randomness."""

    prompt_ids: list[int]
    max_tokens: int
    seed: int


def request_seed(run_seed: int, group_id: int, sample: int, turn: int = 0) -> int:
    """A 63-bit seed that depends on nothing but its arguments, so no sampler state has to be saved."""
    key = f"{run_seed}/{group_id}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


class Policy(ABC):
    """Samples completions with one engine, and knows the version of the weights it samples with.

    `version` has one writer: the weight updater, after a push has wholly succeeded. Building a
    policy does no I/O; `start` does.
    """

    tokenizer: Any  # a transformers tokenizer with a chat template

    def __init__(self, *, sampling: SamplingSettings, seed: int = 0) -> None:
        self.sampling = sampling
        self.seed = seed
        self.version: PolicyVersionLabel = 0

    def start(self) -> None:
        """Load what is needed to sample; a second call does nothing."""

    def close(self) -> None:
        """Give back what `start` took."""

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """One completion a request, in their order, each stamped with the version it was sampled under.

        Raises PolicyError when the engine fails.
        """

    def reply(self, conversations: Sequence[Conversation], sampling: SamplingSettings | None = None) -> None:
        """Let the model take its turn in each conversation, in place.

        Raises DataError for a prompt longer than its environment allows.
        """
        requests = [self._request(conversation) for conversation in conversations]
        completions = self.generate(requests, sampling or self.sampling)
        for conversation, completion in zip(conversations, completions, strict=True):
            conversation.add_completion(completion)

    def _request(self, conversation: Conversation) -> Request:
        if not conversation.prompt_ids:
            self._render_prompt(conversation)
        seed = request_seed(self.seed, conversation.group_id, conversation.sample, conversation.turns)
        ids = conversation.prompt_ids + conversation.response_ids
        return Request(ids, conversation.max_completion_tokens, seed)

    def _render_prompt(self, conversation: Conversation) -> None:
        """Render the first prompt with the model's chat template and tokenise it, once."""
        text = self.tokenizer.apply_chat_template(
            conversation.messages, add_generation_prompt=True, tokenize=False
        )
        conversation.prompt_text = text
        conversation.prompt_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        limit = conversation.max_prompt_tokens
        if limit is not None and len(conversation.prompt_ids) > limit:
            raise DataError(
                f"the prompt of draw {conversation.group_id} has {len(conversation.prompt_ids)} tokens, more than "
                f"env.max_prompt_tokens={limit}: raise it, or leave the row out. It begins {conversation.query[:80]!r}"
            )
