"""A conversation with a model, whose replies are sampled as in training and shown piece by piece."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import DynamicCache

from rlpost.data.conversation import Message
from rlpost.data.rendering import render
from rlpost.errors import DataError
from rlpost.model.device import pick_device
from rlpost.model.load import load_model
from rlpost.model.locate import locate_model
from rlpost.model.precision import Precision, choose_precision
from rlpost.model.tokenizer import load_tokenizer
from rlpost.policies.base import Request, request_seed
from rlpost.policies.transformers import TransformersWrapper
from rlpost.settings import Autocast, ModelSettings, SamplingSettings, TransformersSettings
from rlpost.text import counted


@dataclass(frozen=True)
class Reply:
    """The model's reply to one message.

    `finish_reason` is "stop" (the model ended its turn), "length" (truncated at `max_tokens`), "context"
    (truncated at the end of the model's context) or "interrupted". `seconds` includes reading the message.
    """

    text: str
    tokens: int
    seconds: float
    finish_reason: str


class Chat:
    """The messages so far, and the model that answers them.

    Each turn the chat template renders all messages, as a deployment would; keys and values of ids that the model
    has read before are kept. The same messages under the same seed get the same replies.
    """

    def __init__(
        self,
        policy: TransformersWrapper,
        *,
        sampling: SamplingSettings,
        max_tokens: int,
        system: str | None = None,
        seed: int = 0,
    ) -> None:
        self.policy = policy
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.system = system
        self.seed = seed
        self.messages: list[Message] = []
        self._resets = 0
        self._forget_cache()

    def reset(self) -> None:
        """Start a new conversation, with the system prompt `system`."""
        self.messages = []
        self._resets += 1

    def reply(self, text: str, show: Callable[[str], None]) -> Reply:
        """Answer `text`, passing each piece of the reply to `show` once its characters are complete.

        Ctrl-C ends the reply, and its beginning stays part of the conversation. Raises DataError, leaving the
        conversation as it was, for a message that does not fit into the context or that the chat template refuses.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt_ids = self._render(messages)
        room = self._room(prompt_ids, first=not self.messages)
        ids: list[int] = []
        started = time.perf_counter()
        finish_reason = "interrupted"
        stream = TextStream(self.policy.tokenizer)
        try:
            with self.policy.inference():
                finish_reason = self._sample(prompt_ids, min(self.max_tokens, room), ids, stream, show)
        except KeyboardInterrupt:
            self._forget_cache()  # Ctrl-C may have come between two layers
        if finish_reason == "length" and room < self.max_tokens:
            finish_reason = "context"
        show(stream.rest())
        reply = Reply(stream.text, len(ids), time.perf_counter() - started, finish_reason)
        if ids:
            self.messages = [*messages, {"role": "assistant", "content": reply.text}]
        return reply

    def ending(self, reply: Reply) -> str:
        """The line under a reply: tokens, their speed, and why it ended."""
        reasons = {
            "stop": "stopped",
            "length": f"cut at --max-tokens {self.max_tokens}",
            "context": f"cut at the end of the context, {self.policy.max_model_len} tokens: /reset begins anew",
            "interrupted": "stopped by Ctrl-C",
        }
        speed = reply.tokens / reply.seconds if reply.seconds > 0 else 0.0
        return f"{counted(reply.tokens, 'token')}, {speed:.1f} tokens/s, {reasons[reply.finish_reason]}"

    def _sample(
        self, prompt_ids: list[int], max_tokens: int, ids: list[int], stream: TextStream, show: Callable[[str], None]
    ) -> str:
        """Append the sampled tokens to `ids`; returns "stop" or "length"."""
        seed = request_seed(self.seed, self._resets, 0, len(self.messages))
        self._keep_common(prompt_ids)
        request = Request(prompt_ids, max_tokens, seed)
        for [drawn] in self.policy.draws([request], self.sampling, self._cache):
            ids.append(drawn.token)
            self._cached_ids = [*prompt_ids, *ids[:-1]]
            show(stream.add(drawn.token))
            if drawn.stop:
                return "stop"
        return "length"

    def _render(self, messages: list[Message]) -> list[int]:
        tokenizer = self.policy.tokenizer
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        text = render(tokenizer, [*system, *messages], add_generation_prompt=True)
        text = text.encode(errors="replace").decode()  # a terminal can send invalid characters
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def _room(self, prompt_ids: list[int], *, first: bool) -> int:
        """The most tokens of a reply. Raises DataError if there is room for none."""
        longest = self.policy.max_model_len
        if longest is None:
            return self.max_tokens
        if len(prompt_ids) >= longest:
            subject, advice = ("the message", "shorten it") if first else ("the conversation", "/reset begins anew")
            raise DataError(f"{subject} has {len(prompt_ids)} tokens, the model takes {longest}: {advice}")
        return longest - len(prompt_ids)

    def _keep_common(self, prompt_ids: list[int]) -> None:
        """Crop the cache to the beginning that it shares with the prompt, without the prompt's last token."""
        if self._cache is None:
            return
        common = 0
        for cached, wanted in zip(self._cached_ids, prompt_ids[:-1], strict=False):
            if cached != wanted:
                break
            common += 1
        if common == 0:
            self._forget_cache()
        elif surplus := self._cache.get_seq_length() - common:
            self._cache.crop(-surplus)
        self._cached_ids = self._cached_ids[:common]

    def _forget_cache(self) -> None:
        self._cache = DynamicCache() if self.policy.takes_cache else None
        self._cached_ids: list[int] = []


class TextStream:
    """Decodes token ids piece by piece; a character split over tokens waits until it is complete."""

    def __init__(self, tokenizer: Any) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = 0  # characters of `text` already returned

    def add(self, token: int) -> str:
        """The text that one more token completes."""
        self._ids.append(token)
        # cleaning up spaces would change text already returned
        self.text = self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        whole = self.text.rstrip("\ufffd")
        # of the at most four bytes of a character, three may wait; more will never be one
        waiting = min(len(self.text) - len(whole), 3)
        return self._give(len(self.text) - waiting)

    def rest(self) -> str:
        """The rest of the text, at the end of the reply."""
        return self._give(len(self.text))

    def _give(self, until: int) -> str:
        piece = self.text[self._given : until]
        self._given = max(self._given, until)
        return piece


def load_policy(
    settings: ModelSettings, tell: Callable[[Precision], None] = lambda precision: None
) -> tuple[TransformersWrapper, Path]:
    """A policy to chat with, in the dtype of its products as nothing is trained, and the folder of its model.

    `tell` is called with the precision before the model is loaded.
    """
    precision = choose_precision(settings, TransformersSettings(), pick_device(settings.device), trains=False)
    tell(precision)
    folder = locate_model(settings.path, settings.revision)
    tokenizer = load_tokenizer(folder, settings)
    model = load_model(folder, replace(settings, dtype=precision.sampler))
    return TransformersWrapper(model, tokenizer, sampling=SamplingSettings(), autocast=Autocast.none), folder
