"""A policy that gives canned replies: the one fake that users and tests share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch

from rlpost.data.conversation import Completion, PolicyVersionLabel
from rlpost.data.habits import reply_text
from rlpost.policies.base import Policy, Request
from rlpost.policies.drawing import stop_test
from rlpost.settings import SamplingSettings, ScriptedSettings


class ScriptedPolicy(Policy):
    """Gives `replies` in turn: the i-th request of a call gets reply i modulo their number.

    The ids are the reply's tokens and the end-of-turn token; a reply longer than the request allows is truncated,
    like a model's. Every id is certain, so each log-prob is 0. Other keyword arguments are `Policy`'s.

    >>> from rlpost.envs import ChatEnv
    >>> from rlpost.models import load_tokenizer, locate_model
    >>> from rlpost.policies import ScriptedPolicy
    >>> from rlpost.settings import SamplingSettings
    >>> from tensordict import TensorDict
    >>> tokenizer = load_tokenizer(locate_model("builtin:tiny"))
    >>> policy = ScriptedPolicy(["It is 7.", "It is 8."], tokenizer, sampling=SamplingSettings())
    >>> asked = ChatEnv().reset(TensorDict({"text": ["How much is 3 + 4?"]}, batch_size=[1]))
    >>> list(policy(asked)["text", "response"])
    ['It is 7.']
    """

    name = "scripted"

    def __init__(
        self,
        replies: Sequence[str],
        tokenizer: Any,
        *,
        sampling: SamplingSettings | None = None,
        seed: int = 0,
        **face: Any,
    ) -> None:
        super().__init__(sampling=sampling, seed=seed, **face)
        self.replies = list(replies)
        self.tokenizer = self.templated(tokenizer)

    @classmethod
    def of(
        cls, settings: ScriptedSettings, folder: Path, tokenizer: Any, *, model: Any, model_settings: Any, **more: Any
    ) -> Self:
        """The policy that `settings` describe; it reads no model."""
        return cls(settings.replies, tokenizer, **more)

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """See `Policy.generate`."""
        with self.batching.lock:
            made = [
                self._complete(self.replies[i % len(self.replies)], request.max_tokens, sampling.stop)
                for i, request in enumerate(requests)
            ]
            self.tokens_sampled += sum(len(completion.token_ids) for completion in made)
        return made

    def load_folder(self, folder: Path, version: PolicyVersionLabel) -> None:
        """See `Policy.load_folder`; it has no weights, so any folder is fine."""
        with self.batching.lock:
            self.become(version)

    def token_log_probs(self, sequences: Sequence[Sequence[int]], sampling: SamplingSettings) -> list[torch.Tensor]:
        """See `Policy.token_log_probs`."""
        return [torch.zeros(len(ids)) for ids in sequences]

    def _complete(self, reply: str, max_tokens: int, stop: Sequence[str] = ()) -> Completion:
        ids = [*self.tokenizer(reply, add_special_tokens=False)["input_ids"], *self.stop_ids[:1]]
        if stop:
            ended = stop_test(self.tokenizer, stop)
            ends = (n for n in range(1, len(ids)) if ended(ids[:n]))
            ids = ids[: next(ends, len(ids))]
        reason = "stop" if len(ids) <= max_tokens else "length"
        ids = ids[:max_tokens]
        text = reply_text(self.tokenizer, ids)
        return Completion(ids, [0.0] * len(ids), text, reason, self.version)
