"""The gate between sampler and trainer: a fixed probe is scored by both, and the engine's weights are summed.

At the start the probe is sampled and read, which gives the bounds; after a push some weights of the engine are
compared with the trainer's by their sums, and every `gate.every` steps all of them, with the probe again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rlpost.data.continuation import Continuation
from rlpost.data.conversation import Conversation
from rlpost.errors import PolicyError
from rlpost.model.packing import Row
from rlpost.model.sums import EngineSums
from rlpost.policies.base import Policy
from rlpost.policies.batching import Request
from rlpost.settings.gate import GateAlarm, GateSettings
from rlpost.train.agreement import ENDS, Differences, Disagreement, fault_of, fault_of_weights
from rlpost.train.ranks import Ranks
from rlpost.weight_sync.base import named_weights

QUESTIONS = ("What is 17 + 25?", "Name three colours.", "Write one sentence about rain.")
SAMPLES = 2  # of each question
TOKENS = 24  # of a completion at most
WIDER, FLOOR = 4.0, 0.02  # bound = WIDER x the gap at the start + FLOOR, in nats a token
ROUNDING = 0.15  # nats a token that rounding alone may come to while the model changes
WRONG_AT_START = 0.3  # nats a token that no formats explain
SOME = 6  # weights that are compared after each push
SEED = 20  # of the probe

log = logging.getLogger("rlpost")


class Gate:
    """Watches one run's sampler. Raises PolicyError at an alarm, or does what `gate.on_alarm` says through `act`."""

    def __init__(
        self,
        settings: GateSettings,
        policy: Policy,
        ranks: Ranks,
        model: Any,
        act: Callable[[GateAlarm, str], None],
    ) -> None:
        self.every, self.on_alarm = settings.every, settings.on_alarm
        self.policy, self.ranks, self.model = policy, ranks, model
        self._act = act
        self.bound = float("inf")
        self.alarms: list[Disagreement] = []
        self._few: list[str] | None = None  # engine's names of the weights that are compared after each push
        self._last: Mapping[int, EngineSums] = {}  # of the last look, of each engine

    def begin(self) -> None:
        """Look at everything once, and learn the bounds."""
        rows, found = self._probe()
        fault: Disagreement | None = self._fault_of_weights(None)
        if fault is None and found.gap > FLOOR:
            looks_like = fault_of(rows, found, self._read, self._temperature, self._bos)
            explained_wholly = looks_like not in (Disagreement.format, Disagreement.unknown, Disagreement.filtered)
            if found.gap > WRONG_AT_START or explained_wholly:
                fault = looks_like
        self.bound = WIDER * found.gap + FLOOR
        log.info("sampler and trainer agree within %.2g nats a token; the bound is %.2g", found.gap, self.bound)
        if fault is not None:
            self._alarm(fault, found.gap, "at the start")

    def pushed(self, step: int) -> None:
        """Weights were pushed after `step`."""
        if self.every and step % self.every == 0:
            self.look(step)
        elif (fault := self._fault_of_weights(self._few)) is not None:
            self._alarm(fault, None, f"after the push of step {step}")

    def look(self, step: int) -> float:
        """The whole look, after `step`; the gap."""
        rows, found = self._probe()
        fault = self._fault_of_weights(None)
        if fault is None and found.gap > self.bound:
            fault = fault_of(rows, found, self._read, self._temperature, self._bos)
            if fault in (Disagreement.format, Disagreement.unknown) and found.gap < ROUNDING:
                log.info(
                    "the gap is %.2g nats a token after step %d, as a model that changes may round", found.gap, step
                )
                fault = None
        if fault is not None:
            self._alarm(fault, found.gap, f"after the push of step {step}")
        return found.gap

    # What is looked at

    def _probe(self) -> tuple[list[Row], Differences]:
        """Completions of fixed questions, with the sampler's log-probs and the trainer's."""
        policy = self.policy
        sampled, told = policy.tokens_sampled, policy.on_ended
        policy.on_ended = None
        try:
            requests = [Request(ids, TOKENS, SEED + number) for ids in self._prompts() for number in range(SAMPLES)]
            completions = policy.generate(requests, policy.sampling)
        finally:
            policy.tokens_sampled, policy.on_ended = sampled, told
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
        return rows, Differences.of(rows, self._read(rows, self._temperature))

    def _prompts(self) -> list[list[int]]:
        continuation = Continuation(self.policy.tokenizer)
        prompts = []
        for question in QUESTIONS:
            conversation = Conversation(task={}, messages=[{"role": "user", "content": question}])
            continuation.begin(conversation)
            prompts.append(conversation.prompt_ids)
        return prompts

    def _read(self, rows: Sequence[Row], temperature: float) -> list[torch.Tensor]:
        return self.ranks.read_log_probs(rows, temperature=temperature)

    @property
    def _temperature(self) -> float:
        return self.policy.sampling.temperature

    @property
    def _bos(self) -> int | None:
        return self.policy.tokenizer.bos_token_id

    def _fault_of_weights(self, names: list[str] | None) -> Disagreement | None:
        """What is wrong with the engines' weights, all or those of `names`; None where nothing is, or none can tell."""
        told = {} if self.policy.shares_weights else self.policy.weight_sums(names)
        if not told:
            return None
        weights: Mapping[str, torch.Tensor] = named_weights(self.model)
        faults: list[Disagreement | None] = []
        compared_with: list[tuple[EngineSums, tuple[list[str], int]]] = []  # many engines tell the same
        for number, sums in told.items():
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
                log.warning("engine %d of %d: %s", number + 1, len(told), off)
        self._last = told
        return next(filter(None, faults), None)

    def _alarm(self, fault: Disagreement, gap: float | None, when: str) -> None:
        self.alarms.append(fault)
        seen = "" if gap is None else f" (gap {gap:.2g} nats a token, bound {self.bound:.2g})"
        text = f"sampler and trainer disagree {when}: {fault.value}{seen}"
        if self.on_alarm is GateAlarm.stop:
            raise PolicyError(
                f"{text}; gate.on_alarm=correct goes on with a correction, gate.enabled=false without a look"
            )
        log.warning("%s", text)
        self._act(self.on_alarm, text)


def _spread(names: list[str]) -> list[str]:
    """A few of the engine's weights: the head and the embedding where they are told apart, and some between."""
    chosen = [name for name in names if name.endswith(ENDS)]
    others = [name for name in names if name not in chosen]
    step = max(1, len(others) // SOME)
    return [*chosen, *others[::step][:SOME], *others[-1:]]
