"""Token sequences as the nodes of a search tree, told apart by a hash each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from rlpost.data.ragged import column, ragged, strings
from rlpost.envs.base import one_dimension
from rlpost.envs.transforms.base import Transform
from rlpost.errors import DataError
from rlpost.torchrl.frames import Categorical

_BYTES = 8  # of a hash, and of a token in it


class LLMHashingEnv:
    """Appends one token a step to each of B sequences; a sequence's hash stands for all of it.

    The hash of a sequence is h(hash of the sequence without its last token, last token), with
    BLAKE2b of 64 bits keyed by `seed`: the same in every process, equal for equal sequences however
    they came about, and different for two different ones but for a chance of 2^-64. It does not
    score or end anything, and keeps no state: what a step needs travels in the TensorDict. A `Collector` plays it
    as it plays any other, with random tokens where it has no policy.

    Ids lie below `vocab_size`, by default the number of `tokenizer`'s tokens; with a tokenizer the text
    is written too. Raises TypeError where there is neither.
    """

    def __init__(
        self,
        vocab_size: int | None = None,
        *,
        tokenizer: Any = None,
        batch_size: int | Sequence[int] = (1,),
        observation_key: str = "observation",
        hashing_key: str = "hashing",
        action_key: str = "action",
        text_key: str = "text",
        seed: int = 0,
    ) -> None:
        if vocab_size is None and tokenizer is None:
            raise TypeError("LLMHashingEnv needs vocab_size, the number of tokens, or a tokenizer to ask for it")
        self.vocab_size = len(tokenizer) if vocab_size is None else vocab_size
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size={self.vocab_size} leaves no token: it must be at least 1")
        self.batch_size = one_dimension(batch_size)
        self.tokenizer = tokenizer
        self.observation_key = observation_key
        self.hashing_key = hashing_key
        self.action_key = action_key
        self.text_key = text_key
        self.action_spec = Categorical(self.vocab_size)
        self.observation_keys, self.action_keys = (observation_key, hashing_key), (action_key,)
        self.transforms: list[Transform] = []
        self._key = seed.to_bytes(_BYTES, "big", signed=True)

    def reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """The sequences to begin with: the ids or, with a tokenizer, the texts of `tensordict`; else empty ones.

        Returns a TensorDict (B,) with the ids, ragged (B, *), the hashes (B, 1) int64, the texts where there
        is a tokenizer, and `done` and `terminated` (B, 1), False. B is the rows given, else `batch_size`.
        Raises DataError for ids outside the vocabulary.
        """
        rows: list[list[int]] = [[] for _ in range(self.batch_size[0])]
        if tensordict is not None and self.observation_key in tensordict:
            rows = [row.tolist() for row in column(tensordict, self.observation_key)]
        elif tensordict is not None and self.text_key in tensordict:
            if self.tokenizer is None:
                raise DataError(f"reset was given {self.text_key!r} and this environment no tokenizer: give it one")
            texts = column(tensordict, self.text_key)
            rows = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        for row in rows:
            self._check(row)
        return self._observed(rows, [self.hash_of(row) for row in rows])

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Append `action`, an id a row, (B,) or (B, 1); writes `next`, which is as `reset` returns.

        Raises DataError without an action or for one outside the vocabulary.
        """
        if self.action_key not in tensordict:
            raise DataError(f"step found no {self.action_key!r}: set the id of one token a row")
        tokens = tensordict.get(self.action_key).reshape(-1).tolist()
        rows = [row.tolist() for row in column(tensordict, self.observation_key)]
        if len(tokens) != len(rows):
            raise DataError(f"{self.action_key!r} holds {len(tokens)} ids for {len(rows)} sequences: give one a row")
        self._check(tokens)
        before = tensordict.get(self.hashing_key).reshape(-1).tolist()
        hashes = [self._chained(hash_, token) for hash_, token in zip(before, tokens, strict=True)]
        longer = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
        return tensordict.set("next", self._observed(longer, hashes))

    def rollout(
        self,
        max_steps: int,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        tensordict: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """`max_steps` tokens of `policy`, which sets `action`, as one TensorDict (B, T), stacked lazily."""
        steps = []
        current = self.reset(tensordict)
        for _ in range(max_steps):
            steps.append(self.step(policy(current)))
            current = steps[-1]["next"].copy()
        return lazy_stack(steps, dim=1)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """`step`, and what to act on next: no sequence ever ends here."""
        stepped = self.step(tensordict)
        return stepped, stepped["next"].copy()

    def append_transform(self, transform: Transform) -> Self:
        """Let `transform` change what `reset` and `step` show, after those there are; returns this environment.

        Raises TypeError if it is none.
        """
        if not isinstance(transform, Transform):
            raise TypeError(
                f"{type(transform).__name__} is no Transform: derive it from rlpost.envs.transforms.Transform"
            )
        transform.start()
        self.transforms.append(transform)
        return self

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """The seed for the next environment of a chain; nothing is drawn here, and hashes stay what they are."""
        return seed if static_seed else seed + 1

    def close(self) -> None:
        """Give back what transforms hold; a second call does nothing."""
        for transform in self.transforms:
            transform.close()

    def hash_of(self, ids: Sequence[int]) -> int:
        """The hash of a whole sequence: what `reset` and the steps of its ids give; signed, of 64 bits."""
        hash_ = 0  # of the empty sequence
        for token in ids:
            hash_ = self._chained(hash_, token)
        return hash_

    def _chained(self, hash_: int, token: int) -> int:
        pair = hash_.to_bytes(_BYTES, "big", signed=True) + token.to_bytes(_BYTES, "big")
        digest = hashlib.blake2b(pair, digest_size=_BYTES, key=self._key).digest()
        return int.from_bytes(digest, "big", signed=True)

    def _check(self, ids: Sequence[int]) -> None:
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise DataError(f"token {wrong} is outside the vocabulary: ids lie between 0 and {self.vocab_size - 1}")

    def _observed(self, rows: Sequence[list[int]], hashes: Sequence[int]) -> TensorDictBase:
        over = torch.zeros(len(rows), 1, dtype=torch.bool)
        observed: dict[str, Any] = {
            self.observation_key: ragged([torch.tensor(row, dtype=torch.int64) for row in rows]),
            self.hashing_key: torch.tensor(hashes, dtype=torch.int64).unsqueeze(-1),
            "done": over,
            "terminated": over.clone(),
        }
        if self.tokenizer is not None:
            observed[self.text_key] = strings([self.tokenizer.decode(row) for row in rows])
        shown: TensorDictBase = TensorDict(observed, batch_size=[len(rows)])
        for transform in self.transforms:
            shown = transform(shown)
        return shown
