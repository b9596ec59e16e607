"""Sampling with transformers, from the trained weights themselves.

The loop is our own rather than `model.generate`, so that a completion depends on its request's seed
alone, and log-probs and masks are those of exactly the sampled ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from transformers import DynamicCache, PreTrainedModel

from rlpost.data.conversation import Completion, PolicyVersionLabel
from rlpost.data.habits import reply_text
from rlpost.model.decoding import DECODINGS
from rlpost.model.families import attending
from rlpost.model.load import ends_of, load_model
from rlpost.model.logprobs import microbatches_of, token_log_probs, verdict_of
from rlpost.model.packing import Row
from rlpost.model.precision import autocast, bfloat16_is_fast
from rlpost.model.tokenizer import open_tokenizer
from rlpost.model.weights import SavedWeights, copy_weights
from rlpost.policies.base import CategoricalSequential, Policy, Request
from rlpost.policies.drawing import check_whole, stop_test
from rlpost.settings import Autocast, SamplingSettings, TransformersSettings

if TYPE_CHECKING:
    from rlpost.model.weight_sums import EngineSums

TOKENS_TOGETHER = 16384  # most packed tokens in one forward that reads log-probs


class SampledToken(NamedTuple):
    """One sampled token: its request's number, its log-prob, and whether it ends the completion."""

    request: int
    token: int
    log_prob: float
    stop: bool


class TransformersWrapper(Policy, CategoricalSequential):
    """A policy sampled with transformers.

    The trainer shares `model`, so there is no second copy and a weight push only raises the version. At most
    `max_num_seqs` completions are sampled at once. `tokenizer` defaults to that of the folder or hub id that the
    model was loaded from. Other keyword arguments are `Policy`'s.

    >>> from rlpost.envs import ChatEnv
    >>> from rlpost.models import load_model, load_tokenizer, locate_model
    >>> from rlpost.policies import TransformersWrapper
    >>> from rlpost.settings import SamplingSettings
    >>> from tensordict import TensorDict
    >>> folder = locate_model("builtin:tiny")
    >>> model, tokenizer = load_model(folder), load_tokenizer(folder)
    >>> policy = TransformersWrapper(model, tokenizer, sampling=SamplingSettings(temperature=0.0))
    >>> env = ChatEnv(tokenizer=tokenizer, max_completion_tokens=3)
    >>> answered = policy(env.reset(TensorDict({"text": ["How much is 3 + 4?"]}, batch_size=[1])))
    >>> answered["tokens", "response"][0].shape
    torch.Size([3])
    """

    name = "transformers"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        sampling: SamplingSettings | None = None,
        max_num_seqs: int = 128,
        autocast: Autocast = Autocast.none,
        seed: int = 0,
        **face: Any,
    ) -> None:
        super().__init__(sampling=sampling, seed=seed, **face)
        self.model = model
        if tokenizer is None:
            tokenizer = open_tokenizer(Path(str(model.name_or_path)))
        self.tokenizer = self.templated(tokenizer)
        self.max_num_seqs = max_num_seqs
        self.max_model_len = getattr(model.config, "max_position_embeddings", None)
        if autocast is Autocast.auto:
            fast, _ = bfloat16_is_fast(model.device)
            autocast = Autocast.bfloat16 if fast else Autocast.none
        self.autocast = autocast
        configured = ends_of(model.generation_config)
        self._stop_ids = torch.tensor(sorted({*configured, *self.stop_ids}), device=model.device)

    @classmethod
    def of(
        cls,
        settings: TransformersSettings,
        folder: Path,
        tokenizer: Any,
        *,
        model: Any,
        model_settings: Any,
        **more: Any,
    ) -> Self:
        """The policy that `settings` describe, on the trainer's `model` or, without one, on that of `folder`."""
        model = load_model(folder, model_settings) if model is None else model
        most = settings.at_once
        return cls(model, tokenizer, max_num_seqs=most, autocast=model_settings.autocast, **more)

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """See `Policy.generate`."""
        completions: list[Completion] = []
        with self.batching.lock, self.inference():  # once, so that autocast casts each weight once
            for start in range(0, len(requests), self.max_num_seqs):
                together = requests[start : start + self.max_num_seqs]
                completions += self._generate_together(together, sampling, before=start)
        return completions

    def load_folder(self, folder: Path, version: PolicyVersionLabel) -> None:
        """See `Policy.load_folder`: into `model`'s own tensors, one at a time."""
        with self.batching.lock:
            copy_weights(SavedWeights(folder), self.model)
            self.become(version)

    def weight_sums(self, names: Sequence[str] | None = None) -> dict[int, EngineSums]:
        """See `Policy.weight_sums`."""
        from rlpost.model.weight_sums import as_engine_sums, sums_of

        with self.batching.lock:
            own = [name for name, _ in self.model.named_parameters() if names is None or name in names]
            return {0: as_engine_sums(sums_of(self.model, own))}

    def token_log_probs(self, sequences: Sequence[Sequence[int]], sampling: SamplingSettings) -> list[torch.Tensor]:
        """See `Policy.token_log_probs`; with a gradient unless gradients are off. Nothing is padded.

        Raises ConfigError under a filter such as top-p, which gives some ids no probability.
        """
        check_whole(sampling)
        rows = [torch.tensor(ids) for ids in sequences]
        # the first id is the prompt, all others count as sampled
        packed = [
            Row(ids[:1], ids[1:], torch.ones(len(ids) - 1, dtype=torch.bool), torch.zeros(len(ids) - 1), 0.0)
            for ids in rows
            if len(ids) > 1
        ]
        read: list[torch.Tensor] = []
        with autocast(self.autocast, self.model.device):
            for microbatch in microbatches_of(self.model, packed, TOKENS_TOGETHER, self.model.device):
                log_probs, _ = token_log_probs(self.model, microbatch, sampling.temperature or 1.0)
                read += log_probs.split([row.num_trained for row in microbatch.rows])
        following = iter(read)
        first = torch.zeros(1, device=self.model.device)
        return [torch.cat([first, next(following)]) if len(ids) > 1 else first for ids in rows]

    def token_logits(self, tokens: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """See `CategoricalSequential.token_logits`."""
        positions = (attention_mask.long().cumsum(-1) - 1).clamp_(min=0)
        attention = verdict_of(self.model).attention
        with autocast(self.autocast, self.model.device), attending(self.model.config, attention):
            logits = self.model(
                input_ids=tokens.to(self.model.device),
                attention_mask=attention_mask.long().to(self.model.device),
                position_ids=positions.to(self.model.device),
                use_cache=False,
            ).logits
        return logits.float()

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Without gradients and under autocast: a block in which to consume `draws`."""
        attention = verdict_of(self.model).attention
        with torch.no_grad(), autocast(self.autocast, self.model.device), attending(self.model.config, attention):
            yield

    @property
    def takes_cache(self) -> bool:
        """Whether `draws` can continue from the keys and values that an earlier call left in a cache."""
        return verdict_of(self.model).sampling == "padded"

    def draws(
        self, requests: Sequence[Request], sampling: SamplingSettings, cache: DynamicCache | None = None
    ) -> Iterator[list[SampledToken]]:
        """Sample token by token: each step yields a `SampledToken` for every completion that has not ended.

        `cache` may hold the keys and values of the first ids of a single request's prompt, at most
        all but one of them; afterwards it holds those of the prompt and of all drawn tokens but the last.
        Only give one if `takes_cache`.
        """
        device = self.model.device
        limits = torch.tensor([request.max_tokens for request in requests], device=device)
        uniforms = _uniforms(requests).to(device)  # (B, T)
        alive = torch.arange(len(requests), device=device)  # which request each row of the batch is
        ids: list[list[int]] = [[] for _ in requests]
        completed = stop_test(self.tokenizer, sampling.stop)
        decoding = DECODINGS[verdict_of(self.model).sampling](
            self.model, [request.prompt_ids for request in requests], cache
        )
        for step in range(int(limits.max())):
            chosen, log_probs = draw(decoding.next_logits().float(), sampling, uniforms[alive, step])
            stop = torch.isin(chosen, self._stop_ids)
            if sampling.stop:
                for row, token in zip(alive.tolist(), chosen.tolist(), strict=True):
                    ids[row].append(token)
                ended = [completed(ids[row]) for row in alive.tolist()]
                stop |= torch.tensor(ended, device=device)
            drawn = zip(alive.tolist(), chosen.tolist(), log_probs.tolist(), stop.tolist(), strict=True)
            yield [SampledToken(*one) for one in drawn]
            going = ~stop & (step + 1 < limits[alive])
            if not going.any():
                return
            decoding.go_on(chosen, going)
            alive = alive[going]

    def _generate_together(
        self, requests: Sequence[Request], sampling: SamplingSettings, *, before: int
    ) -> list[Completion]:
        """Sample these requests at once; `before` completions of the call have ended already."""
        ids: list[list[int]] = [[] for _ in requests]
        log_probs: list[list[float]] = [[] for _ in requests]
        stopped = [False] * len(requests)
        ended = 0
        for drawn in self.draws(requests, sampling):
            for row, token, log_prob, stop in drawn:
                ids[row].append(token)
                log_probs[row].append(log_prob)
                stopped[row] = stop
                ended += stop or len(ids[row]) == requests[row].max_tokens
            self.tokens_sampled += len(drawn)
            if self.on_ended is not None:
                self.on_ended(before + ended)
        return [
            Completion(
                token_ids=ids[row],
                log_probs=log_probs[row],
                text=reply_text(self.tokenizer, ids[row]),
                finish_reason="stop" if stopped[row] else "length",
                policy_version=self.version,
            )
            for row in range(len(requests))
        ]


def draw(logits: torch.Tensor, sampling: SamplingSettings, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row and its log-prob under the distribution it was drawn from.

    `logits` (B, V) float32; `uniforms` (B,) in [0, 1), at which the inverse of the cumulative distribution is taken.
    Temperature 0 takes the most likely token, with its log-prob at temperature 1.
    """
    if sampling.temperature == 0:
        log_probs = logits.log_softmax(-1)
        chosen = logits.argmax(-1)
    else:
        log_probs = _filtered(logits / sampling.temperature, sampling).log_softmax(-1)
        cumulative = log_probs.double().exp().cumsum(-1)
        target = uniforms.double()[:, None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    return chosen, log_probs.gather(-1, chosen[:, None]).squeeze(-1)


def _filtered(logits: torch.Tensor, sampling: SamplingSettings) -> torch.Tensor:
    """`logits` (B, V) with -inf where a filter drops the id, in vLLM's order: min-p, top-k, top-p.

    top-k also keeps ids as likely as the last one it keeps. top-p keeps the smallest set of that probability.
    """
    nothing = float("-inf")
    if sampling.min_p > 0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(sampling.min_p), nothing)
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], nothing)
    if sampling.top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        outside = torch.empty_like(before, dtype=torch.bool).scatter_(-1, order, before >= sampling.top_p)
        logits = logits.masked_fill(outside, nothing)
    return logits


def _uniforms(requests: Sequence[Request]) -> torch.Tensor:
    """(B, T) numbers in [0, 1), one row per request, from its own seed."""
    longest = max(request.max_tokens for request in requests)
    generator = torch.Generator()
    return torch.stack([torch.rand(longest, generator=generator.manual_seed(r.seed)) for r in requests])
