"""Transforms in TorchRL's style: log-probs of a frozen model in the data, and text as ids or messages and back.

RetrieveLogProb writes the log-probs for a loss, KLRewardTransform takes them as a penalty off the reward; Tokenizer
and TemplateTransform convert texts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import nn

from rlpost.data.chat import ChatMask
from rlpost.data.history import History
from rlpost.data.ragged import ASSISTANT, Key, column, padded, padding_id, ragged, strings
from rlpost.envs.base import Transform
from rlpost.errors import DataError
from rlpost.objectives.aggregation import keep
from rlpost.torchrl.sequences import HISTORY, LOG_PROBS, REF_LOG_PROBS, TOKENS, LogProbModel, Sequences, read

REWARD: Key = ("next", "reward")
DONE: Key = ("next", "done")
TOKENS_A_PASS = 8192  # of a batch that a model reads at once


class _OfPlayed(Transform):
    """Acts on played turns: appended to an environment, or called on a batch of a collector or buffer."""

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """See `on_played`; the TensorDict of a reset or step, which a policy has yet to act on, stays as it is."""
        is_observation = "conversation" in tensordict and "next" not in tensordict
        return tensordict if is_observation else self.on_played(tensordict)

    def on_played(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write into `tensordict` (B,), or (B, T) stacked lazily, and return it."""
        for part in tensordict.tensordicts if isinstance(tensordict, LazyStackedTensorDict) else [tensordict]:
            self._write(part)
        return tensordict

    @abstractmethod
    def _write(self, batch: TensorDictBase) -> None: ...


@dataclass(eq=False)
class RetrieveLogProb(_OfPlayed):
    """Writes a frozen model's log-probs of the sequences, one an id, where `GRPOLoss` and `SFTLoss` read a reference's.

    `model` is a causal LM of transformers, whose log-probs are taken at `temperature` (None: 1), that of
    the sampler where both are compared; or a function of a TensorDict that writes `("log_probs", "full")`,
    such as a policy made with `generate=False`, which has a temperature of its own. `model_factory` makes
    one at the first use. With `assistant_only` every other token has 0;
    a sequence's first id, which nothing predicts, always has.

    The sequences are `("tokens", "full")`, with the mask `("masks", "all_assistant_mask")`, or, where a
    batch has none, the conversations `("history", "full")` as the template of `tokenizer` writes them.
    What is written under `log_probs_full_key` is ragged (B, *), or (B, T) where the tokens are padded.

    Raises DataError for a batch that lacks an entry.
    """

    model: LogProbModel | None = None
    _: KW_ONLY
    model_factory: Callable[[], LogProbModel] | None = None
    log_probs_full_key: Key = REF_LOG_PROBS
    assistant_only: bool = True
    tokenizer: object = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        self._frozen = _Frozen(self.model, self.model_factory, self.temperature)

    def _write(self, batch: TensorDictBase) -> None:
        if batch.get(TOKENS, None) is not None:
            sequences = Sequences.of(batch)
            mask = sequences.mask(batch, assistant_only=self.assistant_only)
        else:
            sequences, mask = Sequences.of_history(batch[HISTORY], ChatMask(self.tokenizer))
            if not self.assistant_only:
                mask = sequences.mask(batch, assistant_only=False)
        batch.set(self.log_probs_full_key, sequences.laid_out(self._frozen.log_probs(batch, sequences, mask)))


@dataclass(eq=False)
class KLRewardTransform(_OfPlayed):
    """Takes the distance to a frozen reference off the reward, token by token.

    Of each token t that the model sampled, k1 = log π(t) − log π_ref(t), whose mean is KL(π‖π_ref)
    (Schulman, "Approximating KL Divergence"): `coef` * k1 is the penalty there. A reward, which is
    given once a row, stands at every token after this, less the penalty of that token; rewards per
    token are taken as they are. A conversation is penalised once, when it is done, for all its turns.

    `ref_model` or `ref_model_factory` is as the model of `RetrieveLogProb`, and `log_prob_key` where the
    log-probs of the policy are. Those that a collector delivers are of the sampled tokens alone:
    `assistant_only=False` compares every token, and needs the log-probs of every token, which
    `RetrieveLogProb(..., assistant_only=False)` writes under a key of their own.

    Writes `("next", "reward")`, unless `add_to_reward` is False, `("next", "kl_penalty")` and
    `("next", "ref_log_probs", "full")`: ragged (B, *) over the ids, or where the tokens are padded
    (B, T, 1), (B, T) and (B, T), 0 at the pads. Raises as `RetrieveLogProb` does.
    """

    ref_model: LogProbModel | None = None
    _: KW_ONLY
    ref_model_factory: Callable[[], LogProbModel] | None = None
    coef: float = 1.0
    log_prob_key: Key = LOG_PROBS
    add_to_reward: bool = True
    assistant_only: bool = True
    temperature: float | None = None

    def __post_init__(self) -> None:
        self._frozen = _Frozen(self.ref_model, self.ref_model_factory, self.temperature)

    @property
    def reward_per_token(self) -> bool:  # type: ignore[override]
        """Whether `("next", "reward")` becomes a reward for each token."""
        return self.add_to_reward

    def _write(self, batch: TensorDictBase) -> None:
        sequences = Sequences.of(batch)
        mask = sequences.mask(batch, assistant_only=self.assistant_only)
        own = sequences.field(batch, self.log_prob_key, "the penalty compares them with the reference's").float()
        if not self.assistant_only and ASSISTANT in batch.keys(include_nested=True):
            others = mask & ~sequences.mask(batch, assistant_only=True)
            if others.any() and not own[others].any():
                raise DataError(
                    f"{self.log_prob_key} is 0 at every token that was not sampled, and assistant_only=False "
                    "compares all tokens: write the log-probs of all tokens with RetrieveLogProb, or leave it out"
                )
        reference = self._frozen.log_probs(batch, sequences, mask)
        done = batch.get(DONE, None)
        ended = torch.ones(len(own), 1, dtype=torch.bool)
        if done is not None:
            ended = done.reshape(len(own), -1).any(-1, keepdim=True).cpu()
        penalty = keep(self.coef * (own - reference), mask & ended)
        if self.add_to_reward:
            hint = "score it first, to take a penalty off, or add_to_reward=False"
            reward = sequences.laid_out(sequences.field_or_expanded(batch, REWARD, hint) - penalty)
            batch.set(REWARD, reward if reward.is_nested else reward.unsqueeze(-1))
        batch.set(("next", "kl_penalty"), sequences.laid_out(penalty))
        batch.set(REF_LOG_PROBS, sequences.laid_out(reference))


@dataclass(eq=False)
class _Frozen:
    """The model that gives log-probs, made at the first use."""

    model: LogProbModel | None
    factory: Callable[[], LogProbModel] | None
    temperature: float | None

    def log_probs(self, batch: TensorDictBase, sequences: Sequences, mask: torch.Tensor) -> torch.Tensor:
        """The model's log-probs of the ids where `mask` is True, 0 elsewhere; float32 (B, T).

        A causal LM of transformers reads the ids here; anything else is called on the batch without its log-probs and
        `next`, and has to write `("log_probs", "full")`. Raises DataError where it does not.
        """
        if self.model is None:
            assert self.factory is not None
            self.model = self.factory()
        model = self.model
        with torch.no_grad():
            if isinstance(model, nn.Module) and hasattr(model, "get_output_embeddings"):  # a language model
                if not mask.any():
                    return torch.zeros(mask.shape)
                with _evaluating(model):
                    log_probs, _ = read(model, sequences, mask, self.temperature or 1.0, TOKENS_A_PASS)
                return log_probs.float().cpu()
            # a model that wrote into the batch itself would replace the sampler's log-probs by its own
            written = model(batch.exclude("log_probs", "next").clone(recurse=False))
        hint = f"the {type(model).__name__} has to write the log-probs of {TOKENS} there"
        return keep(sequences.field(written, LOG_PROBS, hint).float(), mask)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, which would make log-probs random."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


# Text, ids and messages


@dataclass(eq=False)
class Tokenizer(Transform):
    """Writes the text under `in_key` as ids under `out_key`, an attention mask beside them; `inverse` reads them back.

    `tokenizer` is one of transformers or the folder or hub id of one, which is read when it is first
    needed. Ids and mask are int64, ragged (B, *), or with `padding` (B, T), padded on the left with the
    tokenizer's pad token, else its end of turn, else 0. The mask, 1 on ids and 0 on pads, is
    `attention_mask` in the same group. Special tokens are those that stand in the text, and with
    `add_special_tokens` those that the tokenizer puts around it; `skip_special_tokens` leaves them out of
    the text again.
    """

    tokenizer: Any
    _: KW_ONLY
    in_key: Key = ("text", "prompt")
    out_key: Key = ("tokens", "prompt")
    padding: bool = False
    add_special_tokens: bool = False
    skip_special_tokens: bool = False

    def __post_init__(self) -> None:
        group = () if isinstance(self.out_key, str) else self.out_key[:-1]
        self.mask_key: Key = (*group, "attention_mask")

    def opened(self) -> Any:
        """The tokenizer itself; that of a path is read first."""
        if isinstance(self.tokenizer, str):
            from rlpost.model.locate import locate_tokenizer
            from rlpost.model.tokenizer import open_tokenizer

            self.tokenizer = open_tokenizer(locate_tokenizer(self.tokenizer, key="tokenizer"))
        return self.tokenizer

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ids and mask. Raises DataError without the text."""
        tokenizer, texts = self.opened(), self._rows(tensordict, self.in_key)
        encoded = [tokenizer(text, add_special_tokens=self.add_special_tokens)["input_ids"] for text in texts]
        ids = [torch.tensor(row, dtype=torch.int64) for row in encoded]
        masks = [torch.ones_like(row) for row in ids]
        for key, rows, pad in ((self.out_key, ids, padding_id(tokenizer)), (self.mask_key, masks, 0)):
            tensordict.set(key, padded(rows, pad, left=True) if self.padding else ragged(rows))
        return tensordict

    def inverse(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the text of the ids, those of a padded tensor that the mask says. Raises DataError without either."""
        rows = self._rows(tensordict, self.out_key)
        if not tensordict.get(self.out_key).is_nested:
            masks = self._rows(tensordict, self.mask_key)
            rows = [row[mask.bool()] for row, mask in zip(rows, masks, strict=True)]
        texts = [self.opened().decode(row.tolist(), skip_special_tokens=self.skip_special_tokens) for row in rows]
        return tensordict.set(self.in_key, strings(texts))

    def _rows(self, tensordict: TensorDictBase, key: Key) -> list[Any]:
        if key not in tensordict.keys(include_nested=True):
            there = ", ".join(sorted(str(name) for name in tensordict.keys(include_nested=True)))
            raise DataError(f"the data has no {key!r}, only {there or 'nothing'}: set in_key and out_key")
        return column(tensordict, key)


@dataclass(eq=False)
class TemplateTransform(Transform):
    """Writes the `History` under `in_key` as text under `out_key`; `inverse` reads such text back.

    The template is `chat_template` (jinja), else the one named `chat_template_name`, else that of
    `tokenizer`; `template_kwargs` are variables for it. Reading back needs a format that
    `History.from_text` knows.
    """

    tokenizer: Any
    _: KW_ONLY
    in_key: Key = "history"
    out_key: Key = ("text", "prompt")
    chat_template_name: str | None = None
    chat_template: str | None = None
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] | None = None

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the text, a str a row. Raises DataError if the template refuses a conversation."""
        history: Any = tensordict[self.in_key]
        texts = history.apply_chat_template(
            self.tokenizer,
            add_generation_prompt=self.add_generation_prompt,
            chat_template=self.chat_template,
            chat_template_name=self.chat_template_name,
            template_kwargs=self.template_kwargs,
        )
        return tensordict.set(self.out_key, strings(texts))

    def inverse(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the messages, a History (B, M), that the text under `out_key` says.

        Raises UnparsedTextError for a text that is not a conversation.
        """
        texts = column(tensordict, self.out_key)
        messages: Any = History.from_text(texts, chat_template_name=self.chat_template_name, tokenizer=self.tokenizer)
        return tensordict.set(self.in_key, messages)
