"""The interface every policy implements: prompts in, completions out, and a version."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from rlpost.data.continuation import Continuation
from rlpost.data.conversation import Completion, Conversation, PolicyVersionLabel
from rlpost.errors import DataError, PolicyError
from rlpost.model.sums import EngineSums
from rlpost.policies.batching import Batching, Request
from rlpost.policies.face import Face
from rlpost.settings import SamplingSettings


def request_seed(run_seed: int, group_id: int, sample: int, turn: int = 0) -> int:
    """A 63-bit seed that depends on nothing but its arguments, so no sampler state has to be saved."""
    key = f"{run_seed}/{group_id}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


class Policy(ABC):
    """Samples completions with one engine, and knows the version of the weights it samples with.

    `version` is the weight updater's to change, after a push has wholly succeeded: by `become`, which
    `load_folder` calls for it. Building a policy does no I/O; `start` does. Called on a TensorDict, a policy answers
    its prompts or scores its sequences, as `face` says.
    """

    shares_weights = True  # whether a push has nothing to send: it samples from the trainer's tensors, or from none
    pushes = "weight_sync.base:SharedWeights"  # under rlpost: what makes its weight updater, called with the policy
    tokenizer: Any  # a transformers tokenizer with a chat template
    max_model_len: int | None = None  # longest prompt plus completion that the engine takes; None: unknown

    def __init__(self, *, sampling: SamplingSettings, seed: int = 0, face: Face | None = None) -> None:
        self.sampling = sampling
        self.seed = seed
        self.face = face or Face()
        self.rows_asked = 0  # of TensorDicts without conversations of an environment, which number each row
        self.version: PolicyVersionLabel = 0
        # (unix time, old, new) of each push; bounded, since a long run makes one a step
        self.version_history: deque[tuple[float, PolicyVersionLabel, PolicyVersionLabel]] = deque(maxlen=1000)
        self.on_ended: Callable[[int], None] | None = None  # told, while `generate` works, how many have ended
        self.tokens_sampled = 0  # in all, those under way included where the engine tells
        self.reload: Callable[[], None] | None = None  # brings the present weights to an engine that was started anew
        self.batching = Batching()  # of what is submitted; its lock is held while `generate` samples or weights change

    @cached_property
    def name(self) -> str:
        """What a run calls it."""
        return type(self).__name__

    def start(self) -> None:  # noqa: B027  not every policy has something to load
        """Load what is needed to sample; a second call does nothing."""

    def close(self) -> None:
        """Give back what `start` took; what was submitted and has not ended ends with PolicyError."""
        self.batching.close()

    def rest(self) -> None:  # noqa: B027
        """Give back the memory that only sampling needs, while nothing is sampled; the next call takes it again."""

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """One completion a request, in their order, each stamped with the version it was sampled under.

        Raises PolicyError when the engine fails.
        """

    def submit(self, request: Request, sampling: SamplingSettings | None = None) -> Future[Completion]:
        """One completion, sampled beside others that are submitted meanwhile, from any thread.

        The future ends with what `generate` raises where that fails. It may be cancelled: a request whose
        batch has not begun is left out then, and one that vLLM works on is aborted. Raises PolicyError once the
        policy is closed.
        """
        return self.batching.submit(self.generate, request, sampling or self.sampling)

    def load_folder(self, folder: Path, version: PolicyVersionLabel) -> None:
        """Take up the weights in the *.safetensors of `folder`, named as in a checkpoint: `version` from then on.

        For a weight updater alone. Raises PolicyError, and changes nothing, where they are not those of
        the model that samples, or this policy has none.
        """
        raise PolicyError(f"{type(self).__name__} takes no weights from a folder")

    def load_adapter_folder(self, folder: Path, version: PolicyVersionLabel) -> None:
        """Sample with the peft adapter in `folder`, and be `version` from then on: as `load_folder` otherwise."""
        raise PolicyError(
            f"{type(self).__name__} applies no adapter to weights of its own: bring it merged weights (load_folder)"
        )

    def become(self, version: PolicyVersionLabel) -> None:
        """Be `version` from now on, whose weights have all arrived: for what brought them."""
        old, self.version = self.version, version
        self.version_history.append((time.time(), old, version))

    def reply(self, conversations: Sequence[Conversation], sampling: SamplingSettings | None = None) -> None:
        """Let the model take its turn in each conversation, in place.

        A later turn for which the model's context has no room left is not taken: `finish_reason` says
        "context" then. Raises DataError for a first prompt longer than its environment or the context allows.
        """
        for conversation, completion in zip(conversations, self.completions(conversations, sampling), strict=True):
            if completion is None:
                conversation.finish_reason = "context"
            else:
                conversation.add_completion(completion)

    def completions(
        self, conversations: Sequence[Conversation], sampling: SamplingSettings | None = None
    ) -> list[Completion | None]:
        """The model's turn in each conversation, which gains what the model read and not what it said.

        None, and raises, as `requests` says.
        """
        requests = self.requests(conversations)
        asked = [request for request in requests if request is not None]
        completions = iter(self.generate(asked, sampling or self.sampling) if asked else [])
        return [None if request is None else next(completions) for request in requests]

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Take the model's turn in each row of `tensordict`, or give each row's log-probs: see `Face`.

        Raises DataError for entries that are missing or of another kind, PolicyError when the engine fails.
        """
        from rlpost.torchrl.calling import call

        return call(self, tensordict)

    def token_log_probs(self, sequences: Sequence[Sequence[int]], sampling: SamplingSettings) -> list[torch.Tensor]:
        """log π of every id of each sequence, given those before it, at the sampling temperature (0: at 1).

        1-D float32 a sequence; 0 for its first id, which nothing predicts. Raises PolicyError where
        this policy cannot tell.
        """
        raise PolicyError(f"{type(self).__name__} gives no log-probs of whole sequences: use a TransformersWrapper")

    def weight_sums(self, names: Sequence[str] | None = None) -> dict[int, EngineSums]:
        """The sums of each engine's own weights, all or those it calls `names`, by the engine's number.

        Of an engine that cannot tell there are none.
        """
        return {}

    def requests(self, conversations: Sequence[Conversation]) -> list[Request | None]:
        """What to sample next in each conversation, which gains the ids of messages that have none.

        None where a later turn has no room left. Raises DataError for a first prompt longer than its
        environment or the context allows.
        """
        return [self._request(conversation) for conversation in conversations]

    @cached_property
    def continuation(self) -> Continuation:
        """Renders conversations for this policy's model."""
        return Continuation(self.tokenizer)

    def _request(self, conversation: Conversation) -> Request | None:
        """What to sample next, the prompt's new ids appended; None, and nothing appended, without room for a reply."""
        if not conversation.prompt_ids:
            self.continuation.begin(conversation)
        new: list[int] = []
        if conversation.turns:
            new = self.continuation.observation_ids(conversation)
        else:
            self._check_prompt(conversation)
        length = len(conversation.prompt_ids) + len(conversation.response_ids) + len(new)
        room = min(conversation.max_completion_tokens, self.face.max_new_tokens or conversation.max_completion_tokens)
        if conversation.turns and self.max_model_len is not None:
            room = min(room, self.max_model_len - length)
        if room < 1:
            return None
        conversation.add_observation(new)
        seed = request_seed(self.seed, conversation.group_id, conversation.sample, conversation.turns)
        return Request(conversation.prompt_ids + conversation.response_ids, room, seed)

    def _check_prompt(self, conversation: Conversation) -> None:
        """Raise DataError for a prompt that leaves its completion no room, or is longer than the environment allows."""
        length, limit = len(conversation.prompt_ids), conversation.max_prompt_tokens
        place = conversation.where or f"draw {conversation.group_id}"
        prompt = f"the prompt of {place} ({conversation.query[:60]!r}...) has {length} tokens"
        if limit is not None and length > limit:
            raise DataError(f"{prompt}, more than env.max_prompt_tokens={limit}: raise it, or leave the row out")
        context = self.max_model_len
        if context is not None and length + conversation.max_completion_tokens > context:
            room = context - length
            advice = f"type env.max_completion_tokens={room} or less" if room > 0 else "shorten the row or leave it out"
            raise DataError(
                f"{prompt}: with env.max_completion_tokens={conversation.max_completion_tokens} that is more than the "
                f"model's context of {context} tokens; {advice}"
            )
