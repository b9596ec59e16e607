"""How weights reach the policy of a collector in another process, and its version as this process counts it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rlpost.collectors.players import PUSH_SECONDS
from rlpost.collectors.process import WorkerProcess
from rlpost.data.conversation import Completion, PolicyVersionLabel, next_version
from rlpost.errors import PolicyError
from rlpost.policies.base import Policy, Request
from rlpost.policies.vllm_engines import exchange_folder, save_one_by_one
from rlpost.settings import SamplingSettings
from rlpost.weight_sync.base import WeightSource, WeightUpdater, named_weights


class ChildPolicy(Policy):
    """The policy of a collector's process, as its owner knows it: its version, and `model`, whose weights it takes."""

    shares_weights = False
    pushes = "collectors.child_weights:ChildUpdater"

    def __init__(self, given: Any) -> None:
        super().__init__(sampling=SamplingSettings())
        model = given if isinstance(given, torch.nn.Module) else getattr(given, "model", None)
        self.model = model if isinstance(model, torch.nn.Module) else None

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """Raises PolicyError: it samples in its collector's process alone."""
        raise PolicyError("this policy samples in its collector's process: build another to sample with here")


class ChildUpdater(WeightUpdater):
    """Writes weights into a folder, in memory where there is one, which a `CollectorHost` loads between two batches."""

    def __init__(self, policy: Policy, worker: WorkerProcess) -> None:
        super().__init__(policy)
        self._worker = worker

    def push(self, source: WeightSource) -> PolicyVersionLabel:
        """See `WeightUpdater.push`."""
        assert self.policy is not None
        self.send_weights(self.policy, source)
        return self.policy.version

    def send_weights(self, policy: Policy, source: WeightSource) -> None:
        """See `WeightUpdater.send_weights`; the version rises with it. Raises PolicyError after `PUSH_SECONDS`."""
        self.bring(source, next_version(policy.version))

    def bring(self, weights: WeightSource | Path, version: PolicyVersionLabel, *, adapter: bool = False) -> None:
        """Let the policy be `version`, with weights of a source or in a folder. Raises as `send_weights` does."""
        if isinstance(weights, Path):
            risen = self._risen(weights, version, adapter, ExitStack())
        else:
            risen = self.begin(weights, version)
        try:
            risen.result(PUSH_SECONDS)
        except FutureTimeout:
            raise PolicyError(f"waited {PUSH_SECONDS:.0f} s for weights to be loaded: the policy may hang") from None

    def begin(self, source: WeightSource, version: PolicyVersionLabel | None = None) -> Future[PolicyVersionLabel]:
        """Copy the weights of `source` now, and let them be loaded as soon as may be; done when the version has risen.

        They are those of `version`, or of the next one. Raises TypeError for a source without weights.
        """
        assert self.policy is not None
        weights = named_weights(source)
        version = next_version(self.policy.version) if version is None else version
        with ExitStack() as stack:
            folder = stack.enter_context(exchange_folder())
            save_one_by_one(weights.items(), folder)
            return self._risen(folder, version, False, stack)

    def _risen(
        self, folder: Path, version: PolicyVersionLabel, adapter: bool, stack: ExitStack
    ) -> Future[PolicyVersionLabel]:
        """Let `folder` be loaded, and `stack` be closed after that; done when the version has risen."""
        loaded = self._worker.submit("push", folder, version, adapter)
        kept = stack.pop_all()
        risen: Future[PolicyVersionLabel] = Future()
        loaded.add_done_callback(lambda done: self._arrived(done, kept, version, risen))
        return risen

    def _arrived(
        self, loaded: Future[None], folder: ExitStack, version: PolicyVersionLabel, risen: Future[PolicyVersionLabel]
    ) -> None:
        """The weights are there, or could not be loaded: remove their folder and say so."""
        folder.close()
        if (error := loaded.exception()) is not None:
            risen.set_exception(error)
            return
        assert self.policy is not None
        self.policy.become(version)
        risen.set_result(version)
