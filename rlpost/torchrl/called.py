"""A plain function of TensorDicts as the policy of a collector's conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from rlpost.data.conversation import Completion, Conversation
from rlpost.data.ragged import versions
from rlpost.envs.base import EnvBase
from rlpost.errors import PolicyError
from rlpost.policies.base import Policy, Request
from rlpost.settings import SamplingSettings
from rlpost.torchrl.replies import add_replies
from rlpost.torchrl.writing import put


class CalledPolicy(Policy):
    """Shows `called` what `env.reset` and `env.step` show, and takes the turn it writes as `env.step` does.

    `called` is any callable that is given a TensorDict (B,) and returns it with a turn in it, a TensorDictModule
    for one. A module's weights are its `model`, so that a push reaches them. It samples as it likes: without ids
    a turn has text alone, and without log-probs they are NaN. Raises TypeError for what cannot be called.
    """

    def __init__(self, called: Callable[[TensorDictBase], TensorDictBase], env: EnvBase) -> None:
        if not callable(called):
            raise TypeError(
                f"a policy is an rlpost.policies.Policy, a TensorDictModule or a callable on TensorDicts, and "
                f"{type(called).__name__} is none of them"
            )
        super().__init__(sampling=SamplingSettings())
        self.called = called
        self.env = env
        self.tokenizer: Any = env.tokenizer
        self.model = called if isinstance(called, torch.nn.Module) else None

    def reply(self, conversations: Sequence[Conversation], sampling: SamplingSettings | None = None) -> None:
        """See `Policy.reply`. Raises PolicyError for sampling settings, TypeError where no TensorDict comes back."""
        if sampling is not None:
            raise PolicyError("a callable policy samples as it likes: sampling settings need an rlpost.policies.Policy")
        if not conversations:
            return
        shown = self.env.observe(conversations)
        written = self.called(shown)
        if not isinstance(written, TensorDictBase):
            raise TypeError(
                f"the policy returned {type(written).__name__}: a callable policy returns the TensorDict it was given, "
                "with its turn in it"
            )
        if "policy_version" not in written.keys():  # noqa: SIM118  a TensorDict iterates over its rows
            written.set("policy_version", versions([self.version] * len(conversations)))
        if written is not shown:
            written = put(shown, written)
        add_replies(conversations, written, self.tokenizer, self.env.input_mode)

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """Raises PolicyError: what is called reads TensorDicts, not ids."""
        raise PolicyError("a callable policy answers whole conversations: give an rlpost.policies.Policy to sample ids")
