"""A model behind a server that speaks OpenAI's chat completions, asked with the standard library alone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rlpost.errors import ConfigError, RewardError

LOCAL = "http://127.0.0.1:8000/v1"  # where a vLLM server answers
LONGEST_ANSWER = 1 << 20  # bytes
WRONG_FOR_ALL = (401, 403, 404)  # HTTP: the key, or the model's name or address, is wrong whatever is asked
TRY_AGAIN = (408, 409, 425, 429)  # HTTP, beside all from 500 on

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class ChatEndpoint:
    """The model `model` of a server that speaks OpenAI's chat completions at `base_url`; called with messages.

    `options` are further fields of each request. The API key is the value of the environment variable
    `api_key_variable`, and goes to this server alone. Raises ConfigError for another kind of address, and where that
    variable is not set.
    """

    model: str
    base_url: str = LOCAL
    api_key_variable: str | None = None
    timeout_seconds: float = 60.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={self.base_url} is no address: give one like {LOCAL}")
        if self.api_key_variable is not None and not os.environ.get(self.api_key_variable):
            raise ConfigError(f"there is no API key: set the environment variable {self.api_key_variable}")

    def __call__(self, messages: Messages) -> str:
        """What the model replies.

        Raises ConfigError where every request would fail, RewardError where this one always would, and
        any other exception where it may be worth another try.
        """
        body = {"model": self.model, "messages": messages, **self.options}
        request = Request(f"{self.base_url.rstrip('/')}/chat/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        if self.api_key_variable is not None:
            request.add_unredirected_header("Authorization", f"Bearer {os.environ[self.api_key_variable]}")
        try:
            choice = json.loads(self._answer(request))["choices"][0]
        except HTTPError as error:
            said = f"{self.base_url} answers {error.code} ({error.read(200).decode(errors='replace')!r})"
            if error.code in WRONG_FOR_ALL:
                raise ConfigError(f"{self.model} cannot be asked: {said}; check its name and key") from error
            if error.code < 500 and error.code not in TRY_AGAIN:
                raise RewardError(f"{self.model} cannot be asked about this reply: {said}") from error
            raise OSError(said) from error
        if choice.get("finish_reason") == "length":
            raise RewardError(f"the reply of {self.model} was cut: raise max_tokens in its options")
        text = choice["message"]["content"]
        if not isinstance(text, str):
            raise ValueError(f"{self.model} replied with {type(text).__name__} in the place of a text")
        return text

    def _answer(self, request: Request) -> bytes:
        """The body of the server's answer. Raises OSError where it has not all come in time, or is too long."""
        deadline = time.monotonic() + self.timeout_seconds
        answer = bytearray()
        with urlopen(request, timeout=self.timeout_seconds) as response:
            while piece := response.read1(1 << 16):
                answer += piece
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no whole answer within timeout_seconds={self.timeout_seconds:g}")
                if len(answer) > LONGEST_ANSWER:
                    raise OSError(f"an answer of more than {LONGEST_ANSWER} bytes")
        return bytes(answer)
