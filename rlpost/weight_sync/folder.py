"""Weight pushes to other processes, as a folder that they load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlpost.data.conversation import PolicyVersionLabel
from rlpost.model.lora import save_adapter
from rlpost.model.weights import save_one_by_one
from rlpost.policies.base import Policy
from rlpost.policies.remote import RemotePolicy, Seat
from rlpost.remote.exchange import exchange_folder
from rlpost.weight_sync.base import WeightSource, WeightUpdater, named_weights


@contextmanager
def weights_folder(source: WeightSource, *, adapter: bool = False, dtype: torch.dtype | None = None) -> Iterator[Path]:
    """An exchange folder with the weights of `source`, or with its adapter alone; removed at the end of the block.

    Raises TypeError for a source without weights.
    """
    with exchange_folder() as folder:
        if adapter:
            save_adapter(source, folder)
        else:
            save_one_by_one(named_weights(source).items(), folder, dtype)
        yield folder


class FolderUpdater(WeightUpdater):
    """Writes the weights into an exchange folder, from which the players load them.

    With `wait` they load once none of their groups is in flight; otherwise those go on with the new weights, each
    token with its version.
    """

    wait = True

    def restore_version(self, version: PolicyVersionLabel) -> None:
        """See `WeightUpdater.restore_version`."""
        super().restore_version(version)
        assert isinstance(self.policy, RemotePolicy)
        self.policy.players.set_version(version)

    def send(
        self, policy: RemotePolicy, source: WeightSource, version: PolicyVersionLabel, seats: list[Seat] | None = None
    ) -> None:
        """Push the weights of `source` as those of `version`, to `seats` or to all."""
        adapter = policy.pushes_adapter
        with weights_folder(source, adapter=adapter, dtype=policy.weights_dtype) as folder:
            chosen = policy.players.ready if seats is None else seats
            policy.players.push(folder, version, seats=chosen, wait=self.wait, adapter=adapter)

    def send_weights(self, policy: Policy, source: WeightSource) -> None:
        assert isinstance(policy, RemotePolicy)
        self.send(policy, source, self.new_version)


class RayWeightSyncScheme:
    """How a `RayCollector` sends weights: one folder in shared memory on each host, which all its workers load.

    With `adapter` it is the adapter alone, for workers whose engine applies one (vLLM with `adapter_rank`). A collector
    that registers the scheme as its receiver loads the folder that it is offered.
    """

    def __init__(self, *, adapter: bool = False) -> None:
        self.adapter = adapter
        self._offered: tuple[Path, PolicyVersionLabel] | None = None

    def offer(self, folder: Path, version: PolicyVersionLabel) -> None:
        """Note the weights of `version`, which `receive` brings."""
        self._offered = (folder, version)

    def receive(self, collector: Any) -> None:
        """Have `collector` load the last offer, once; does nothing without one."""
        offered, self._offered = self._offered, None
        if offered is not None:
            collector.take_up(*offered, adapter=self.adapter)
