"""The interface every policy implements: prompts in, completions out, and a version."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.data.conversation import Completion, Conversation, Message, PolicyVersionLabel
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
    max_model_len: int | None = None  # longest prompt plus completion that the engine takes; None: unknown

    def __init__(self, *, sampling: SamplingSettings, seed: int = 0) -> None:
        self.sampling = sampling
        self.seed = seed
        self.version: PolicyVersionLabel = 0
        self.on_ended: Callable[[int], None] | None = None  # told, while `generate` works, how many have ended

    def start(self) -> None:  # noqa: B027  not every policy has something to load
        """Load what is needed to sample; a second call does nothing."""

    def close(self) -> None:  # noqa: B027
        """Give back what `start` took."""

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """One completion a request, in their order, each stamped with the version it was sampled under.

        Raises PolicyError when the engine fails.
        """

    def reply(self, conversations: Sequence[Conversation], sampling: SamplingSettings | None = None) -> None:
        """Let the model take its turn in each conversation, in place.

        Raises DataError for a prompt longer than its environment or the model's context allows.
        """
        requests = [self._request(conversation) for conversation in conversations]
        completions = self.generate(requests, sampling or self.sampling)
        for conversation, completion in zip(conversations, completions, strict=True):
            conversation.add_completion(completion)

    def _request(self, conversation: Conversation) -> Request:
        if not conversation.prompt_ids:
            self._render_prompt(conversation)
        elif conversation.messages[-1]["role"] != "assistant":
            self._append_environment_messages(conversation)
        seed = request_seed(self.seed, conversation.group_id, conversation.sample, conversation.turns)
        ids = conversation.prompt_ids + conversation.response_ids
        return Request(ids, conversation.max_completion_tokens, seed)

    def _append_environment_messages(self, conversation: Conversation) -> None:
        """Tokenise what the environment said since the model's last turn; what was sampled stays as it is.

        Raises DataError for a template that renders earlier messages differently once more follow.
        """
        last_reply = max(i for i, m in enumerate(conversation.messages) if m["role"] == "assistant")
        until_reply = self._render(conversation.messages[: last_reply + 1], add_generation_prompt=False)
        whole = self._render(conversation.messages, add_generation_prompt=True)
        end_of_turn = self.tokenizer.eos_token
        # the sampled ids end with the end-of-turn token; what the template puts behind it was not sampled
        kept = until_reply[: until_reply.rfind(end_of_turn) + len(end_of_turn)]
        if end_of_turn not in until_reply or not whole.startswith(kept):
            raise DataError(
                "the model's chat template does not render a conversation as a continuation of its beginning, so "
                "several turns cannot be trained on: use single-turn tasks with this model"
            )
        ids = self.tokenizer(whole[len(kept) :], add_special_tokens=False)["input_ids"]
        conversation.response_ids.extend(ids)
        conversation.mask.extend([0] * len(ids))
        conversation.log_probs.extend([0.0] * len(ids))

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=add_generation_prompt, tokenize=False
        )

    def _render_prompt(self, conversation: Conversation) -> None:
        """Render the first prompt with the model's chat template and tokenise it, once."""
        text = self._render(conversation.messages, add_generation_prompt=True)
        conversation.prompt_text = text
        conversation.prompt_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        length, limit = len(conversation.prompt_ids), conversation.max_prompt_tokens
        prompt = f"the prompt of draw {conversation.group_id} ({conversation.query[:60]!r}...) has {length} tokens"
        if limit is not None and length > limit:
            raise DataError(f"{prompt}, more than env.max_prompt_tokens={limit}: raise it, or leave the row out")
        if self.max_model_len is not None and length + conversation.max_completion_tokens > self.max_model_len:
            raise DataError(
                f"{prompt}: with env.max_completion_tokens={conversation.max_completion_tokens} that is more than the "
                f"{self.max_model_len} the model takes; lower it, or leave the row out"
            )
