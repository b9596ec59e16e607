"""The policy of another process, as the trainer sees it: it samples for an evaluation, and takes weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlpost.collectors.process import WorkerProcess
from rlpost.data.conversation import Completion, PolicyVersionLabel, next_version
from rlpost.errors import PolicyError
from rlpost.model.lora import is_adapted, save_adapter
from rlpost.policies.base import Policy, Request
from rlpost.policies.vllm_process import exchange_folder, save_one_by_one
from rlpost.settings import SamplingSettings
from rlpost.weight_sync.base import WeightSource, WeightUpdater, named_weights

PUSH_SECONDS = 900.0  # longest wait for weights to be loaded, the groups under way included where they are waited for


class RemotePolicy(Policy):
    """The policy of a `GroupPlayer` in a process of its own, which `build` makes there.

    `generate` is answered beside what is played. `on_event` and `on_death` are the process's; `revive` is called
    where it died while this policy was asked for something, and either starts another or raises why not. `name` says
    what samples there.
    """

    shares_weights = False
    pushes = "collectors.remote_policy:FolderUpdater"

    def __init__(
        self,
        build: Callable[[], Any],
        tokenizer: Any,
        *,
        sampling: SamplingSettings,
        seed: int = 0,
        max_model_len: int | None = None,
        name: str = "RemotePolicy",
        pushes_adapter: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(sampling=sampling, seed=seed)
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.name = name
        self.pushes_adapter = pushes_adapter
        self.on_event: Callable[[str, Any], None] = lambda kind, content: None
        self.on_death: Callable[[], None] = lambda: None
        self.revive: Callable[[], None] | None = None
        self.environment = environment
        self._build = build
        self._worker: WorkerProcess | None = None
        self._output: int | None = None

    @property
    def worker(self) -> WorkerProcess:
        """The process. Raises PolicyError where there is none."""
        if self._worker is None:
            raise PolicyError("the process that samples was not started, or is closed: call start()")
        return self._worker

    def start(self) -> None:
        """See `Policy.start`; raises what building the environment and the policy there raises."""
        if self._worker is not None:
            return
        if self._output is None:
            self._output = os.dup(1)  # for those that follow one that died too
        worker = WorkerProcess(
            self._build,
            name="the process that samples",
            on_event=self._take,
            on_death=lambda: self.on_death(),
            environment=self.environment,
            output=self._output,
        )
        self._worker = worker
        worker.start()
        worker.call("set_version", self.version)

    def restart(self) -> PolicyError | None:
        """Another process in the place of one that has died, with the weights it was first built with.

        Returns how it died, if it did so before it was ready.
        """
        self.worker.close()
        self._worker = None
        try:
            self.start()
        except PolicyError:
            if self.worker.failure is None:
                raise
        return self.worker.failure

    def close(self) -> None:
        """See `Policy.close`."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        output, self._output = self._output, None
        if output is not None:
            os.close(output)

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings) -> list[Completion]:
        """See `Policy.generate`. A process that dies meanwhile is replaced once."""
        ask = partial(self.worker.call, "generate", list(requests), sampling)
        try:
            return ask()
        except PolicyError:
            if self.revive is None or self.worker.failure is None:
                raise
            self.revive()
            return self.worker.call("generate", list(requests), sampling)

    def push(self, folder: Path, version: PolicyVersionLabel, *, wait: bool = True, adapter: bool = False) -> None:
        """Sample with the weights in `folder` from now on; returns when all of them have arrived."""
        self.worker.call("push", folder, version, wait=wait, adapter=adapter, seconds=PUSH_SECONDS)

    def _take(self, kind: str, content: Any) -> None:
        if kind == "ended":
            ended, self.tokens_sampled = content
            if self.on_ended is not None:
                self.on_ended(ended)
        else:
            self.on_event(kind, content)


class FolderUpdater(WeightUpdater):
    """Writes the weights into a folder, in memory where there is one, from which another process loads them.

    `wait`: once no group is under way there; else those go on with the new weights, each token with its version.
    """

    wait = True

    def restore_version(self, version: PolicyVersionLabel) -> None:
        """See `WeightUpdater.restore_version`."""
        super().restore_version(version)
        assert isinstance(self.policy, RemotePolicy)
        self.policy.worker.call("set_version", version)

    def send(self, policy: RemotePolicy, source: WeightSource, version: PolicyVersionLabel) -> None:
        """Bring the weights of `source` over as those of `version`."""
        with exchange_folder() as folder:
            if adapter := policy.pushes_adapter:
                if not is_adapted(source):
                    raise PolicyError(f"the sampler takes an adapter, and this {type(source).__name__} has none")
                save_adapter(source, folder)
            else:
                save_one_by_one(named_weights(source).items(), folder)
            policy.push(folder, version, wait=self.wait, adapter=adapter)

    def send_weights(self, policy: Policy, source: WeightSource) -> None:
        if not isinstance(policy, RemotePolicy):
            raise PolicyError(f"{type(self).__name__} pushes to a policy in another process: {type(policy).__name__}")
        self.send(policy, source, next_version(policy.version))
