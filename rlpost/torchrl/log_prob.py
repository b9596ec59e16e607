"""A frozen model's log-probs in the data: for a loss that reads them, or as a penalty in the reward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rlpost.data.ragged import ASSISTANT, Key
from rlpost.envs.transforms.base import Transform
from rlpost.errors import ConfigError, DataError
from rlpost.torchrl.sequences import LOG_PROBS, LogProbModel, check_model, log_probs_of, rendered
from rlpost.torchrl.token_sequences import REF_LOG_PROBS, TOKENS, Sequences

REWARD: Key = ("next", "reward")
DONE: Key = ("next", "done")


class _OfPlayed(Transform):
    """Acts on turns that were played: appended to an environment, or called on a batch of a collector or buffer."""

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """See `on_played`; what a policy is shown, of which nothing is sampled yet, is left as it is."""
        return tensordict if _is_shown(tensordict) else self.on_played(tensordict)

    def on_played(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write into `tensordict` (B,), or (B, T) stacked lazily, and return it."""
        if isinstance(tensordict, LazyStackedTensorDict):
            for part in tensordict.tensordicts:
                self._write(part)
        else:
            self._write(tensordict)
        return tensordict

    @abstractmethod
    def _write(self, batch: TensorDictBase) -> None: ...


class RetrieveLogProb(_OfPlayed):
    """Writes a frozen model's log-probs of the sequences, one an id, where `GRPOLoss` and `SFTLoss` read a reference's.

    `model` is a causal LM of transformers, whose log-probs are taken at `temperature` (None: 1), that of
    the sampler where both are compared; or a function of a TensorDict that writes `("log_probs", "full")`,
    such as a policy made with `generate=False`, which has a temperature of its own. `model_factory` makes
    one when it is first needed. With `assistant_only` every other token has 0;
    a sequence's first id, which nothing predicts, always has.

    The sequences are `("tokens", "full")`, with the mask `("masks", "all_assistant_mask")`, or, where a
    batch has none, the conversations `("history", "full")` as the template of `tokenizer` writes them.
    What is written under `log_probs_full_key` is ragged (B, *), or (B, T) where the tokens are padded.

    Raises ValueError for both or neither model, ConfigError where the sampler's log-probs would be
    overwritten, the policy samples or has no use for a temperature; DataError for a batch that lacks what is read.
    """

    def __init__(
        self,
        model: LogProbModel | None = None,
        *,
        model_factory: Callable[[], LogProbModel] | None = None,
        log_probs_full_key: Key = REF_LOG_PROBS,
        assistant_only: bool = True,
        tokenizer: object = None,
        temperature: float | None = None,
    ) -> None:
        if log_probs_full_key == LOG_PROBS:
            raise ConfigError(
                f"log_probs_full_key={LOG_PROBS} is where the sampler's log-probs are: choose another key"
            )
        self._model = _Frozen(model, model_factory, temperature)
        self.log_probs_full_key = log_probs_full_key
        self.assistant_only = assistant_only
        self.tokenizer = tokenizer

    def _write(self, batch: TensorDictBase) -> None:
        if batch.get(TOKENS, None) is None:
            sequences, masks = rendered(batch, self.tokenizer)
            if not self.assistant_only:
                masks = sequences.masks(batch, assistant_only=False)
        else:
            sequences = Sequences.of(batch)
            masks = sequences.masks(batch, assistant_only=self.assistant_only)
        batch.set(self.log_probs_full_key, sequences.laid_out(self._model(batch, sequences, masks)))


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

    def __init__(
        self,
        ref_model: LogProbModel | None = None,
        *,
        ref_model_factory: Callable[[], LogProbModel] | None = None,
        coef: float = 1.0,
        log_prob_key: Key = LOG_PROBS,
        add_to_reward: bool = True,
        assistant_only: bool = True,
        temperature: float | None = None,
    ) -> None:
        if log_prob_key == REF_LOG_PROBS:
            raise ConfigError(f"log_prob_key={REF_LOG_PROBS} is where the reference's log-probs go: choose another key")
        self._model = _Frozen(ref_model, ref_model_factory, temperature)
        self.coef = coef
        self.log_prob_key = log_prob_key
        self.add_to_reward = add_to_reward
        self.assistant_only = assistant_only

    @property
    def reward_per_token(self) -> bool:  # type: ignore[override]
        """Whether `("next", "reward")` becomes a reward for each token."""
        return self.add_to_reward

    def _write(self, batch: TensorDictBase) -> None:
        sequences = Sequences.of(batch)
        masks = [mask.cpu() for mask in sequences.masks(batch, assistant_only=self.assistant_only)]
        log_probs = self._log_probs(batch, sequences, masks)
        references = self._model(batch, sequences, masks)
        done = batch.get(DONE, None)
        ended = [True] * len(masks) if done is None else done.reshape(len(masks), -1).any(-1).tolist()
        penalties = [
            torch.where(mask & over, self.coef * (own - ref), torch.zeros(()))
            for mask, over, own, ref in zip(masks, ended, log_probs, references, strict=True)
        ]
        if self.add_to_reward:
            hint = "score it first, to take a penalty off, or add_to_reward=False"
            rewards = sequences.field_or_expanded(batch, REWARD, hint)
            less = [reward.cpu() - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
            written = sequences.laid_out(less)
            batch.set(REWARD, written if written.is_nested else written.unsqueeze(-1))
        batch.set(("next", "kl_penalty"), sequences.laid_out(penalties))
        batch.set(REF_LOG_PROBS, sequences.laid_out(references))

    def _log_probs(self, batch: TensorDictBase, sequences: Sequences, masks: list[torch.Tensor]) -> list[torch.Tensor]:
        """The sampler's log-probs, one an id."""
        hint = "the penalty compares them with the reference's"
        rows = [row.float().cpu() for row in sequences.field(batch, self.log_prob_key, hint)]
        if not self.assistant_only and ASSISTANT in batch.keys(include_nested=True):
            sampled = sequences.masks(batch, assistant_only=True)
            for row, mask, own in zip(rows, masks, sampled, strict=True):
                others = row[mask & ~own.cpu()]
                if others.numel() and not others.any():
                    raise DataError(
                        f"{self.log_prob_key} is 0 at every token that was not sampled, and assistant_only=False "
                        "compares all tokens: write those of all with RetrieveLogProb first, or leave it out"
                    )
        return rows


class _Frozen:
    """The model that log-probs are asked of, made when it is first needed."""

    def __init__(
        self,
        model: LogProbModel | None,
        factory: Callable[[], LogProbModel] | None,
        temperature: float | None,
    ) -> None:
        if (model is None) == (factory is None):
            raise ValueError("give exactly one of a model and a factory that makes one")
        if temperature is not None and not temperature > 0:
            raise ConfigError(f"temperature={temperature:g} gives no probabilities: it must be above 0")
        if model is not None:
            check_model(model, temperature)
        self._made = model
        self._factory = factory
        self._temperature = temperature

    def __call__(self, batch: TensorDictBase, sequences: Sequences, masks: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._made is None:
            assert self._factory is not None
            self._made = self._factory()
            check_model(self._made, self._temperature)
        temperature = 1.0 if self._temperature is None else self._temperature
        return log_probs_of(self._made, batch, sequences, masks, temperature)


def _is_shown(tensordict: TensorDictBase) -> bool:
    """Whether this is what a reset or step gives a policy to act on."""
    return "conversation" in tensordict and "next" not in tensordict
