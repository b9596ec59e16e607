"""The gate between sampler and trainer: a fixed probe is scored by both, and the engine's weights are summed.

At the start the probe is sampled and read, which gives the bounds; after a push some weights of the engine are
compared with the trainer's by their sums, and every `gate.every` steps all of them, with the probe again.

Each fault leaves its own trace in the differences of the log-probs: another temperature, or one token more in front,
explains them wholly; a filter makes the sampler surer of every token; rounding pulls both ways alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rlpost.data.conversation import Conversation
from rlpost.errors import PolicyError
from rlpost.model.packing import Row
from rlpost.model.weights import EMBEDDINGS
from rlpost.policies.base import Policy, Request
from rlpost.screen import Screen
from rlpost.settings import Autocast, DType, ModelPolicySettings, ModelSettings, PolicySettings, SamplerCorrection
from rlpost.settings.training import GateAlarm, GateSettings
from rlpost.train.ranks import Ranks
from rlpost.weight_sync.base import WeightUpdater, named_weights

if TYPE_CHECKING:
    from rlpost.model.weight_sums import EngineSums

log = logging.getLogger("rlpost")
Read = Callable[[Sequence[Row], float], list[torch.Tensor]]  # rows and a temperature -> log-probs, 0 where not sampled


def restart_with_weights(policy: Policy, updater: WeightUpdater, model: Any) -> None:
    """Let an engine of this process that fails, or that drops its weights to sleep, get the trained weights again."""
    policy.reload = partial(updater.send_weights, policy, model)


def gate_of(
    settings: GateSettings, engine: PolicySettings, model: ModelSettings, policy: Policy, ranks: Ranks, screen: Screen
) -> Callable[[int], None] | None:
    """Compare the `policy` with the trainer; returns the function that does so after a later step's push.

    None if the gate is off or no model samples. With gate.on_alarm=correct the loss corrects for the sampler after an
    alarm.
    """
    if not (settings.enabled and isinstance(engine, ModelPolicySettings)):
        return None
    screen.phase("checking", "the sampler")
    dtypes = (model.dtype, model.autocast, getattr(engine, "dtype", DType.float32))
    exact = dtypes == (DType.float32, Autocast.none, DType.float32)
    gate = Gate(settings, policy, ranks, screen.note, exact=exact)
    gate.begin()
    return gate.pushed


# The probe and its bounds

QUESTIONS = ("What is 17 + 25?", "Name three colours.", "Write one sentence about rain.")
SAMPLES = 2  # per question
TOKENS = 24  # most tokens of a completion
SEED = 20  # of the probe's first request
WIDER, FLOOR = 4.0, 0.02  # bound = WIDER x the gap at the start + FLOOR, in nats a token
ROUNDING = 0.15  # nats a token: the most that rounding alone may cause while the model changes
WRONG_AT_START = 0.3  # nats a token: more than any pair of formats explains; where both are float32, FLOOR is
SOME = 6  # weights compared after each push, besides the head and the embedding
ENDS = ("lm_head.weight", "embed_out.weight", *EMBEDDINGS)  # name endings of the head and of a weight tied to it


# What tells the faults apart

EXPLAINED = 0.3  # share of the gap that may remain once a fault has explained it
LEAST = 2e-3  # nats a token: below this nothing is wrong
ONE_SIDED = 0.9  # share of the differing tokens that the sampler is surer of under a filter
ROUND = 0.35  # rounding: the mean difference is at most this share of the mean absolute difference
TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.4, 1.6, 2.0)


class Gate:
    """Watches one run's sampler. At an alarm raises PolicyError, or shows the reason with `note`; see `gate.on_alarm`.

    `exact`: both sides compute in float32.
    """

    def __init__(
        self, settings: GateSettings, policy: Policy, ranks: Ranks, note: Callable[[str], None], *, exact: bool = False
    ) -> None:
        self.every, self.on_alarm = settings.every, settings.on_alarm
        self.policy, self.ranks = policy, ranks
        self._note, self._exact = note, exact
        self.bound = float("inf")
        self.alarms: list[Disagreement] = []
        self._few: list[str] | None = None  # the engine's names of the weights compared after each push
        self._last: Mapping[int, EngineSums] = {}  # engine -> its sums at the last look

    def begin(self) -> None:
        """Compare everything once and set the bound."""
        rows, found = self.probe()
        fault: Disagreement | None = self.compare_weights(None)
        if fault is None and found.gap > FLOOR:
            looks_like = self._fault_of(rows, found)
            explained_wholly = looks_like not in (Disagreement.format, Disagreement.unknown, Disagreement.filtered)
            if found.gap > (FLOOR if self._exact else WRONG_AT_START) or explained_wholly:
                fault = looks_like
        self.bound = WIDER * found.gap + FLOOR
        log.info("sampler and trainer agree within %.2g nats a token; the bound is %.2g", found.gap, self.bound)
        if fault is not None:
            self._alarm(fault, found.gap, "at the start")

    def pushed(self, step: int) -> None:
        """Check the engine after the push of `step`: every `gate.every` steps all of it, else a few weights."""
        if self.every and step % self.every == 0:
            self.look(step)
        elif (fault := self.compare_weights(self._few)) is not None:
            self._alarm(fault, None, f"after the push of step {step}")

    def look(self, step: int) -> float:
        """Compare all weights and the probe after `step`; returns the gap in nats a token."""
        rows, found = self.probe()
        fault = self.compare_weights(None)
        if fault is None and found.gap > self.bound:
            fault = self._fault_of(rows, found)
            if fault in (Disagreement.format, Disagreement.unknown) and found.gap < ROUNDING:
                log.info(
                    "the gap is %.2g nats a token after step %d, as a model that changes may round", found.gap, step
                )
                fault = None
        if fault is not None:
            self._alarm(fault, found.gap, f"after the push of step {step}")
        return found.gap

    def probe(self) -> tuple[list[Row], Differences]:
        """Sample completions of fixed questions and read them; the rows, and the log-probs of both sides."""
        policy = self.policy
        sampled, on_ended = policy.tokens_sampled, policy.on_ended
        policy.on_ended = None
        try:
            requests = [Request(ids, TOKENS, SEED + number) for ids in self._prompts() for number in range(SAMPLES)]
            completions = policy.generate(requests, policy.sampling)
        finally:
            policy.tokens_sampled, policy.on_ended = sampled, on_ended
        if any(completion.policy_version != policy.version for completion in completions):
            self._alarm(Disagreement.version, None, f"version {policy.version}")
        rows = [
            Row(
                torch.tensor(request.prompt_ids),
                torch.tensor(completion.token_ids),
                torch.ones(len(completion.token_ids), dtype=torch.bool),
                torch.tensor(completion.log_probs),
                0.0,
            )
            for request, completion in zip(requests, completions, strict=True)
            if completion.token_ids
        ]
        return rows, Differences.of(rows, self._read(rows, policy.sampling.temperature))

    def _prompts(self) -> list[list[int]]:
        continuation = self.policy.continuation
        prompts = []
        for question in QUESTIONS:
            conversation = Conversation(task={}, messages=[{"role": "user", "content": question}])
            continuation.begin(conversation)
            prompts.append(conversation.prompt_ids)
        return prompts

    def _read(self, rows: Sequence[Row], temperature: float) -> list[torch.Tensor]:
        return self.ranks.read_log_probs(rows, temperature=temperature)

    def _fault_of(self, rows: Sequence[Row], found: Differences) -> Disagreement:
        temperature, bos = self.policy.sampling.temperature, self.policy.tokenizer.bos_token_id
        return fault_of(rows, found, self._read, temperature, bos)

    def compare_weights(self, names: list[str] | None) -> Disagreement | None:
        """The fault of the engines' weights, all or those of `names`; None if all agree or no engine has sums."""
        engines = {} if self.policy.shares_weights else self.policy.weight_sums(names)
        if not engines:
            return None
        weights: Mapping[str, torch.Tensor] = named_weights(self.ranks.own.model)
        faults: list[Disagreement | None] = []
        compared_with: list[tuple[EngineSums, tuple[list[str], int]]] = []  # most engines have the same sums
        for number, sums in engines.items():
            kept = sums.names_of(weights)
            if self._few is None:
                self._few = _spread(list(kept))
            wanted = {name: weights[name] for names_ in kept.values() for name in names_} if names else weights
            known = next((found for other, found in compared_with if other == sums), None)
            differing, compared = known or sums.differing(wanted)
            compared_with.append((sums, (differing, compared)))
            moved = sums.moved_since(self._last[number]) if number in self._last else None
            faults.append(fault_of_weights(differing, compared, moved))
            if differing:
                off = f"{len(differing)} of {compared} weights are not the trainer's, {differing[0]} among them"
                log.warning("engine %d of %d: %s", number + 1, len(engines), off)
        self._last = engines
        return next(filter(None, faults), None)

    def _alarm(self, fault: Disagreement, gap: float | None, when: str) -> None:
        self.alarms.append(fault)
        seen = "" if gap is None else f" (gap {gap:.2g} nats a token, bound {self.bound:.2g})"
        text = f"sampler and trainer disagree {when}: {fault.value}{seen}"
        if self.on_alarm is GateAlarm.stop:
            raise PolicyError(
                f"{text}; gate.on_alarm=correct goes on with a correction, gate.enabled=false without a look"
            )
        objective: Any = self.ranks.own.objective
        is_open = getattr(objective, "sampler_correction", "") == "none"
        if self.on_alarm is GateAlarm.correct and is_open and not getattr(objective, "ratio_to_sampler", False):
            objective.sampler_correction = SamplerCorrection.tis_token.name
            self.ranks.share_objective()  # the other ranks correct too
            text += "; going on with loss.sampler_correction=tis_token"
        log.warning("%s", text)
        self._note(text)


class Disagreement(Enum):
    """The faults that the gate can name; the value is how a message says it."""

    stale = "the engine samples with other weights than the trainer's: none of a push has arrived"
    half = "only a part of a push has arrived in the engine"
    head = "the engine's output head is not the trainer's: a tied head has stayed as it was"
    temperature = "the sampler draws at another temperature than its log-probs are read at"
    filtered = (
        "the sampler draws from a part of the distribution (top_p, top_k or min_p) and the trainer reads all of it"
    )
    begun_twice = "one of them reads the prompt with a token more in front: bos_token twice"
    shifted = "the log-probs are those of the tokens beside: the mask of what was sampled is shifted"
    format = "the formats of sampler and trainer differ by more than at the start"
    version = "the sampler's version is not that of the last push"
    unknown = "the cause is not known; policy=transformers samples from the trainer's own weights"


@dataclass(frozen=True)
class Differences:
    """log-probs of the same sampled tokens by sampler and trainer, (N,) each."""

    sampler: torch.Tensor
    trainer: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], read: Sequence[torch.Tensor]) -> Differences:
        """The differences on `rows`; `read` holds the trainer's log-probs of each."""
        return cls(
            torch.cat([row.sampler_log_probs[row.sampled] for row in rows]),
            torch.cat([log_probs[row.sampled] for row, log_probs in zip(rows, read, strict=True)]),
        )

    @property
    def gap(self) -> float:
        """Mean absolute difference, in nats a token."""
        return (self.sampler - self.trainer).abs().mean().item()


def fault_of(rows: Sequence[Row], found: Differences, read: Read, temperature: float, bos: int | None) -> Disagreement:
    """The fault that explains the differences of a probe whose weights agree."""
    enough = EXPLAINED * found.gap
    if min(_gaps_to_neighbours(found)) < enough:
        return Disagreement.shifted
    for other in TEMPERATURES:
        if other != temperature and Differences.of(rows, read(rows, other)).gap < enough:
            return Disagreement.temperature
    for changed in _begun_otherwise(rows, bos):
        if Differences.of(changed, read(changed, temperature)).gap < enough:
            return Disagreement.begun_twice
    difference = found.sampler - found.trainer
    differ = difference.abs() > LEAST / 10
    surer = (difference[differ] > 0).float().mean().item() if differ.any() else 0.0
    if surer >= ONE_SIDED:
        return Disagreement.filtered
    if abs(difference.mean().item()) <= ROUND * found.gap:
        return Disagreement.format
    return Disagreement.unknown


def fault_of_weights(differing: Sequence[str], compared: int, moved: bool | None) -> Disagreement | None:
    """The fault that the names of the `differing` weights show; None if there are none.

    `moved`: whether any of the engine's weights has changed since the last look; None at the first look.
    """
    if not differing:
        return None
    if all(name.endswith(ENDS) for name in differing) and compared > len(differing):
        return Disagreement.head
    arrived = moved if moved is not None else len(differing) < compared
    return Disagreement.half if arrived else Disagreement.stale


def _gaps_to_neighbours(found: Differences) -> tuple[float, float]:
    """The gap if each token's log-prob is compared with that of the token before it, and of the token behind it.

    The few pairs across two rows make no difference.
    """
    sampler, trainer = found.sampler, found.trainer
    before, behind = sampler[1:] - trainer[:-1], sampler[:-1] - trainer[1:]
    return before.abs().mean().item(), behind.abs().mean().item()


def _begun_otherwise(rows: Sequence[Row], bos: int | None) -> list[list[Row]]:
    """The rows with one more bos in front, and, if all of them begin with bos, with one less."""
    if bos is None:
        return []
    ways = [[replace(row, prompt=torch.cat([torch.tensor([bos]), row.prompt])) for row in rows]]
    if all(len(row.prompt) > 1 and row.prompt[0] == bos for row in rows):
        ways.append([replace(row, prompt=row.prompt[1:]) for row in rows])
    return ways


def _spread(names: list[str]) -> list[str]:
    """A few of the engine's weights: the head and the embedding if it has both, and some from between them."""
    chosen = [name for name in names if name.endswith(ENDS)]
    others = [name for name in names if name not in chosen]
    step = max(1, len(others) // SOME)
    return [*chosen, *others[::step][:SOME], *others[-1:]]
