"""The interface that every policy implements: prompts in, completions out, and a version.

`Policy` is what an engine's class derives from. Below it stand the parts that all of them share: how completions are
drawn, and the queue of requests that come one by one and are sampled together.
"""

from __future__ import annotations

import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlpost.data.chat import Continuation, stop_ids
from rlpost.data.conversation import Completion, Conversation, PolicyVersionLabel
from rlpost.errors import DataError, PolicyError
from rlpost.settings import SamplingSettings

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from rlpost.model.weight_sums import EngineSums
    from rlpost.policies import Face, MaskedCategorical


@dataclass(slots=True)
class Request:
    """One completion to sample: the prompt's ids, the most new ids, and the random seed."""

    prompt_ids: list[int]
    max_tokens: int
    seed: int


Generate = Callable[[Sequence[Request], SamplingSettings], list[Completion]]
Waiting = tuple[Future[Completion], Request, SamplingSettings]


class Policy(ABC):
    """Samples completions with one engine, and knows the version of the weights it samples with.

    Only the weight updater changes `version`, once a push has wholly succeeded: it calls `become`, or `load_folder`
    does so for it. Building a policy does no I/O; `start` does.

    A policy is also called on a TensorDict. The keyword arguments `face` are the fields of `Face`, which says how.
    """

    name = "policy"  # in a run's output
    shares_weights = True  # a push sends nothing: the policy samples from the trainer's tensors, or has no weights
    pushes = "weight_sync.base:SharedWeights"  # under rlpost: called with the policy, makes its weight updater
    tokenizer: Any  # a transformers tokenizer with a chat template
    max_model_len: int | None = None  # longest prompt plus completion that the engine takes; None: unknown
    restarts = 0  # of the engine after a failure, so far

    def __init__(self, *, sampling: SamplingSettings | None = None, seed: int = 0, **face: Any) -> None:
        self._face = face
        self.sampling = self.face.sampling(sampling) if face else sampling or SamplingSettings()
        self.seed = seed
        self.version: PolicyVersionLabel = 0
        # (unix time, old, new) of each push; bounded, since a long run makes one a step
        self.version_history: deque[tuple[float, PolicyVersionLabel, PolicyVersionLabel]] = deque(maxlen=1000)
        self.on_ended: Callable[[int], None] | None = None  # called during `generate` with how many have ended
        self.tokens_sampled = 0  # since the start; includes completions in flight if the engine reports them
        self.reload: Callable[[], None] | None = None  # pushes the current weights to an engine without
        self.batching = Batching()  # submitted requests; its lock is held while `generate` samples or weights change
        self.rows_numbered = 0  # rows of TensorDicts that no environment has numbered

    @property
    def max_new_tokens(self) -> int | None:
        """Most tokens of a turn, whatever its environment allows; None: no further limit."""
        return self.face.max_new_tokens if self._face else None

    def start(self) -> None:  # noqa: B027  not every policy has something to load
        """Load whatever sampling needs; a second call does nothing."""

    def close(self) -> None:
        """Release what `start` loaded; submitted requests that have not ended fail with PolicyError."""
        self.batching.close()

    def rest(self) -> None:  # noqa: B027
        """Free the memory that only sampling needs until the next call; nothing may be in flight."""

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """Sample one completion per request, in order, each stamped with the version it was sampled under.

        Raises PolicyError when the engine fails.
        """

    def submit(self, request: Request, sampling: SamplingSettings | None = None) -> Future[Completion]:
        """Sample one completion together with others that are submitted meanwhile; callable from any thread.

        The future fails with whatever `generate` raises. Cancelling it drops a request whose batch has not begun and
        aborts one that vLLM works on. Raises PolicyError once the policy is closed.
        """
        return self.batching.submit(self.generate, request, sampling or self.sampling)

    def load_folder(self, folder: Path, version: PolicyVersionLabel) -> None:
        """Load the weights in the *.safetensors of `folder`, named as in a checkpoint, and become `version`.

        Only a weight updater calls this. Raises PolicyError, and changes nothing, if the weights do not fit the model
        that samples or the policy has no weights.
        """
        raise PolicyError(f"{type(self).__name__} cannot load weights from a folder")

    def load_adapter_folder(self, folder: Path, version: PolicyVersionLabel) -> None:
        """Sample with the peft adapter in `folder` and become `version`; otherwise like `load_folder`."""
        raise PolicyError(
            f"{type(self).__name__} applies no adapter to weights of its own: bring it merged weights (load_folder)"
        )

    def become(self, version: PolicyVersionLabel) -> None:
        """Set `version`, once all of its weights have arrived; called by whatever pushed them."""
        old, self.version = self.version, version
        self.version_history.append((time.time(), old, version))

    def reply(self, conversations: Sequence[Conversation], sampling: SamplingSettings | None = None) -> None:
        """Let the model take its turn in each conversation, in place.

        The model skips a later turn for which its context has no room left, and `finish_reason` becomes "context".
        Raises DataError for a first prompt longer than its environment or the context allows.
        """
        for conversation, completion in zip(conversations, self.completions(conversations, sampling), strict=True):
            if completion is None:
                conversation.finish_reason = "context"
            else:
                conversation.add_completion(completion)

    def completions(
        self, conversations: Sequence[Conversation], sampling: SamplingSettings | None = None
    ) -> list[Completion | None]:
        """Sample the model's turn in each conversation, which gains the ids that the model read and not its reply.

        Returns None and raises as `requests` does.
        """
        requests = self.requests(conversations)
        possible = [request for request in requests if request is not None]
        completions = iter(self.generate(possible, sampling or self.sampling) if possible else [])
        return [None if request is None else next(completions) for request in requests]

    def token_log_probs(self, sequences: Sequence[Sequence[int]], sampling: SamplingSettings) -> list[torch.Tensor]:
        """log π of every id of each sequence, given those before it, at the sampling temperature (0: at 1).

        One 1-D float32 tensor per sequence; 0 for its first id, which nothing predicts. Raises PolicyError if this
        policy cannot compute them.
        """
        raise PolicyError(f"{type(self).__name__} gives no log-probs of whole sequences: sample with transformers")

    def weight_sums(self, names: Sequence[str] | None = None) -> dict[int, EngineSums]:
        """Engine number -> sums of that engine's own weights: of all, or of those it calls `names`.

        An engine that cannot compute sums is left out.
        """
        return {}

    def requests(self, conversations: Sequence[Conversation]) -> list[Request | None]:
        """The next request of each conversation, which gains the ids of messages that have none.

        None if a later turn has no room left. Raises DataError for a first prompt longer than its
        environment or the context allows.
        """
        return [self._request(conversation) for conversation in conversations]

    @cached_property
    def face(self) -> Face:
        """How the policy is called on a TensorDict; only those who do so load rlpost/torchrl."""
        from rlpost.policies import Face

        return Face(**self._face)

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Take the model's turn in each row of `tensordict`, or give each row's log-probs: see `Face`.

        Raises DataError for missing entries, PolicyError when the engine fails.
        """
        return self.face.call(self, tensordict)

    def templated(self, tokenizer: Any) -> Any:
        """`tokenizer`, with the chat template that `face` names, if it names one."""
        return self.face.with_template(tokenizer) if self._face else tokenizer

    @cached_property
    def continuation(self) -> Continuation:
        """Renders conversations for this policy's model."""
        return Continuation(self.tokenizer)

    @cached_property
    def stop_ids(self) -> list[int]:
        """The ids that end a completion, the end of turn first."""
        return stop_ids(self.tokenizer)

    def _request(self, conversation: Conversation) -> Request | None:
        """Append the new prompt ids and return the next request; without room for a reply, append nothing: None."""
        continuation = self.continuation.of(conversation)
        if not conversation.prompt_ids:
            continuation.begin(conversation)
        new, is_whole = [], False
        if conversation.turns:
            new, is_whole = continuation.next_turn(conversation)
        else:
            self._check_prompt(conversation)
        length = len(new) if is_whole else len(conversation.context) + len(new)
        room = min(conversation.max_completion_tokens, self.max_new_tokens or conversation.max_completion_tokens)
        if conversation.turns and self.max_model_len is not None:
            room = min(room, self.max_model_len - length)
        if room < 1:
            return None
        conversation.begin_anew(new) if is_whole else conversation.add_observation(new)
        conversation.opened = continuation.opened(conversation)
        seed = request_seed(self.seed, conversation.group_id, conversation.sample, conversation.turns)
        return Request(conversation.context, room, seed)

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


class CategoricalSequential(ABC):
    """Mixed into a policy whose logits are known: gives its distributions over tokens.

    Each method reads the sequences of a TensorDict as `policy(tensordict)` with `generate=False`
    does, `("tokens", "full")` if it is there, and pads them on the right: T is the longest. The
    distribution at position t is the one that the token at t was drawn from, given those before it,
    at the sampling temperature; position 0, which nothing predicts, is never in the mask. Logits of
    every position are T times the vocabulary: `policy.token_log_probs` needs none of them.
    """

    face: Any

    @abstractmethod
    def token_logits(self, tokens: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """(B, T, V) float32 logits that follow each of `tokens` (B, T), where `attention_mask` (B, T) is True."""

    def get_dist(self, tensordict: TensorDictBase) -> MaskedCategorical:
        """The distributions of the model's own tokens, or of every token if nothing marks those.

        `("masks", "all_assistant_mask")` or the messages mark them; otherwise they are whatever follows
        `("tokens", "prompt")`.
        """
        return self.face.dist(self, tensordict, "own")

    def get_dist_with_prompt_mask(self, tensordict: TensorDictBase) -> MaskedCategorical:
        """The distribution of every token after `("tokens", "prompt")`."""
        return self.face.dist(self, tensordict, "prompt")

    def get_dist_with_assistant_mask(self, tensordict: TensorDictBase) -> MaskedCategorical:
        """The distribution of the assistant's tokens. Raises DataError if the batch does not mark them."""
        return self.face.dist(self, tensordict, "assistant")

    def get_dist_with_attention_mask(self, tensordict: TensorDictBase) -> MaskedCategorical:
        """The distribution of every token but the first, which nothing predicts."""
        return self.face.dist(self, tensordict, "attention")

    def get_dist_with_custom_mask(self, tensordict: TensorDictBase, mask: torch.Tensor) -> MaskedCategorical:
        """The distribution of the tokens where `mask`, ragged or (B, T), is True."""
        return self.face.dist(self, tensordict, mask)

    def log_prob(self, tensordict: TensorDictBase) -> torch.Tensor:
        """(B, T) log π of the tokens, 0 outside the mask of `get_dist`."""
        dist = self.get_dist(tensordict)
        return dist.log_prob(dist.tokens)


def request_seed(run_seed: int, group_id: int, sample: int, turn: int = 0) -> int:
    """A 63-bit seed that depends on its arguments alone, so no sampler state has to be saved."""
    key = f"{run_seed}/{group_id}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


# Requests that are sampled together

QUIET_SECONDS = 0.002  # without a further request before a batch begins, so that bursts are sampled together
CLOSE_SECONDS = 10.0  # longest wait for the running batch when the policy is closed


class Batching:
    """The pending requests of one policy, and the lock under which it samples and loads weights.

    A thread samples all pending requests of equal sampling settings with one call, and repeats that until none is
    left. A copy, in another process too, starts without pending requests.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition()  # guards all attributes below
        self._waiting: list[Waiting] = []
        self._at_work: list[Future[Completion]] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Batching, ()

    def submit(self, generate: Generate, request: Request, sampling: SamplingSettings) -> Future[Completion]:
        """Sample `request` with `generate`, together with the pending ones. Raises PolicyError once closed."""
        future: Future[Completion] = Future()
        with self._changed:
            if self._closed:
                raise PolicyError("the policy is closed and samples no more: build another")
            self._waiting.append((future, request, sampling))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(generate,), name="rlpost-batches", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return future

    def close(self) -> None:
        """Fail all pending requests with PolicyError; the running batch too, if it takes over `CLOSE_SECONDS`."""
        with self._changed:
            self._closed = True
            left = [future for future, _, _ in self._waiting if future.set_running_or_notify_cancel()]
            self._waiting.clear()
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():  # whose batch fails by itself
            thread.join(CLOSE_SECONDS)
            with self._changed:
                left += self._at_work
                self._at_work = []
        for future in left:
            future.set_exception(PolicyError("the policy was closed before this completion was sampled"))

    def _run(self, generate: Generate) -> None:
        while batch := self._next_batch():
            try:
                made = generate([request for _, request, _ in batch], batch[0][2])
                if len(made) != len(batch):
                    raise PolicyError(f"the policy gave {len(made)} completions for {len(batch)} requests")
            except BaseException as error:  # noqa: BLE001  raised again in the waiting threads
                failure = error
                self._settle(lambda future, _, failure=failure: future.set_exception(failure))
            else:
                self._settle(lambda future, i, made=made: future.set_result(made[i]))

    def _next_batch(self) -> list[Waiting]:
        """The pending requests with the settings of the first, without cancelled ones; empty: the thread ends."""
        with self._changed:
            while self._waiting:
                known = 0
                while known < len(self._waiting):
                    known = len(self._waiting)
                    self._changed.wait(QUIET_SECONDS)
                if not self._waiting:
                    break  # closed meanwhile
                sampling = self._waiting[0][2]
                together = [one for one in self._waiting if one[2] == sampling]
                self._waiting = [one for one in self._waiting if one[2] != sampling]
                if batch := [one for one in together if one[0].set_running_or_notify_cancel()]:
                    self._at_work = [future for future, _, _ in batch]
                    return batch
            self._thread = None
            return []

    def _settle(self, end: Callable[[Future[Completion], int], None]) -> None:
        """Apply `end` to each future of the running batch, unless `close` has ended them."""
        with self._changed:
            ended, self._at_work = self._at_work, []
        for i, future in enumerate(ended):
            end(future, i)
