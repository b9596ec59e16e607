"""The actors of a RayCollector: placed within a deadline, asked with one, and named when they are lost."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from rlpost import cluster
from rlpost.collectors.async_plan import unsendable
from rlpost.collectors.ray_host import RayHost
from rlpost.collectors.ray_plan import Order
from rlpost.data.conversation import PolicyVersionLabel
from rlpost.errors import PolicyError
from rlpost.extras import require

log = logging.getLogger("rlpost")
DEFAULTS = {"num_cpus": 1, "memory": 2 * 1024**3}  # of an actor, as the documents have them
LEASE_SECONDS = 30.0  # for which a worker stays paused where the driver says nothing any more
LOOK_SECONDS = 1.0  # in which a worker that is lost says so
GPU_SHARE = 0.2  # of a GPU, likewise, where the cluster has any


@dataclass
class Member:
    """One worker, as the driver knows it."""

    actor: Any
    frames_per_batch: int = 0
    is_language: bool = False
    first_version: PolicyVersionLabel | None = None
    storing_device: torch.device | None = None
    policy_device: torch.device | None = None


class Crew:
    """The workers of a RayCollector, by their numbers from 0. What is asked of one is done in the order it comes."""

    def __init__(self, ray: Any, *, wait_seconds: float, place_seconds: float) -> None:
        self._ray = ray
        self.wait_seconds = wait_seconds
        self.place_seconds = place_seconds
        self.members: dict[int, Member] = {}
        self.lost: dict[int, str] = {}  # how each was lost
        self.next_number = 0

    def add(self, orders: Sequence[Order], policy: Any, delivery: Any) -> list[int]:
        """Start a worker for each order; their numbers. `policy` and `delivery` are as `RayHost.build` says.

        Raises PolicyError where they find no place in time, TypeError for what cannot be sent, and what building
        raises; none of them is left then.
        """
        plans = [self._plan(order) for order in orders]
        numbers = list(range(self.next_number, self.next_number + len(orders)))
        configs = [self._config(order.remote_config) for order in orders]
        made: dict[int, Member] = {}
        try:
            for number, order, config in zip(numbers, orders, configs, strict=True):
                threads = max(1, int(config.get("num_cpus") or 1))
                actor = self._ray.remote(**config)(RayHost).remote(number, threads)
                made[number] = Member(actor, storing_device=order.storing_device, policy_device=order.policy_device)
            self._place([member.actor for member in made.values()], configs)
            self.members |= made
            asked = {
                number: made[number].actor.build.remote(plan, policy, delivery)
                for number, plan in zip(numbers, plans, strict=True)
            }
            for number, about in self.results(asked, "its collector to be built").items():
                member = made[number]
                member.frames_per_batch, member.is_language, member.first_version = about
            if len({member.is_language for member in self.members.values()}) > 1:
                raise ValueError("some collectors play conversations and others frames, which make no batch together")
        except BaseException:
            for number, member in made.items():
                self._ray.kill(member.actor)
                self.members.pop(number, None)
                self.lost.pop(number, None)
            raise
        self.next_number += len(orders)
        return numbers

    def _plan(self, order: Order) -> bytes:
        try:
            return cloudpickle.dumps(order.plan)
        except Exception:  # noqa: BLE001  told by what cannot be sent
            return pickled(unsendable(order.plan), order.plan)

    def _config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        gpus = GPU_SHARE if cluster.has_gpus(self._ray) else 0
        return {**DEFAULTS, "num_gpus": gpus, **given, "max_restarts": 0}

    def _place(self, actors: Sequence[Any], configs: Sequence[Mapping[str, Any]]) -> None:
        ready = [actor.__ray_ready__.remote() for actor in actors]
        placed, waiting = self._ray.wait(ready, num_returns=len(ready), timeout=self.place_seconds)
        if waiting:
            asked = {n: v for n, v in configs[0].items() if n in ("num_cpus", "num_gpus", "memory", "resources") and v}
            raise PolicyError(
                f"{len(waiting)} of {len(actors)} collectors found no place within {self.place_seconds:.0f} s: each "
                f"asks for {asked}, and {cluster.what_there_is(self._ray)}; ask for less in remote_configs, or add a "
                "node"
            )
        self._ray.get(placed, timeout=self.wait_seconds)  # or what a constructor raised

    # Asking

    def submit(self, number: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Ask worker `number`, without waiting; the reference of its answer."""
        return getattr(self.members[number].actor, method).remote(*args, **kwargs)

    def result(self, number: int, reference: Any, waited_for: str, seconds: float | None = None) -> Any:
        """What worker `number` has answered.

        Raises what it raised, PolicyError where it was lost, or has not answered in time.
        """
        within = self.wait_seconds if seconds is None else seconds
        try:
            return self._ray.get(reference, timeout=within)
        except self._ray.exceptions.GetTimeoutError:
            raise PolicyError(
                f"waited {within:.0f} s for {waited_for}, of worker {number}: its policy or environment may hang"
            ) from None
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else RuntimeError(str(error))
            cause.add_note(f"raised in worker {number}:\n{error}")
            raise cause from None
        except self._ray.exceptions.RayActorError as error:
            self.lost[number] = _how(error)
            self.check()
            raise

    def look(self, numbers: Iterable[int]) -> None:
        """Notice which of these workers are lost."""
        for number in numbers:
            with contextlib.suppress(Exception):  # what else is wrong with it is told by the next that asks it
                self.result(number, self.submit(number, "is_held"), "a sign of life", LOOK_SECONDS)

    def results(self, asked: Mapping[int, Any], waited_for: str, seconds: float | None = None) -> dict[int, Any]:
        """What each has answered, by its number. Raises as `result` does, as soon as the first of them fails."""
        got: dict[int, Any] = {}
        while len(got) < len(asked):
            number = self.first({n: ref for n, ref in asked.items() if n not in got}, waited_for, seconds)
            got[number] = self.result(number, asked[number], waited_for, seconds)
        return {number: got[number] for number in asked}

    def first(self, asked: Mapping[int, Any], waited_for: str, seconds: float | None = None) -> int:
        """The number of the first that answers, or fails. Raises PolicyError where none does in time."""
        within = self.wait_seconds if seconds is None else seconds
        ready, _ = self._ray.wait(list(asked.values()), num_returns=1, timeout=within)
        if not ready:
            names = ", ".join(map(str, asked))
            raise PolicyError(
                f"waited {within:.0f} s for {waited_for}, of worker {names}: its policy or environment may hang"
            )
        return next(number for number, reference in asked.items() if reference == ready[0])

    def of_all(self, method: str, *args: Any, **kwargs: Any) -> dict[int, Any]:
        """What a method of each worker's collector returns, named by its path."""
        self.check()
        asked = {n: self.submit(n, "cascade_execute", method, *args, **kwargs) for n in self.members}
        return self.results(asked, method)

    def check(self) -> None:
        """Raise PolicyError for the first worker that was lost."""
        for number, how in self.lost.items():
            raise PolicyError(f"worker {number} of the RayCollector was lost: {how}")

    def moved(self, number: int, batch: Any) -> Any:
        """A batch of worker `number` on the device where it is to be stored."""
        device = self.members[number].storing_device
        return batch if device is None or isinstance(batch, int) else batch.to(device)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A block in which no worker collects, unless it hears nothing from here for `LEASE_SECONDS`."""
        over = threading.Event()
        try:
            asked = {number: self.submit(number, "pause_begin", LEASE_SECONDS) for number in self.members}
            self.results(asked, "its batch under way to end")
            threading.Thread(target=self._renew, args=(over,), daemon=True).start()
            yield
        finally:
            over.set()
            for number in self.members.keys() - self.lost.keys():
                self.submit(number, "pause_end")

    def _renew(self, over: threading.Event) -> None:
        while not over.wait(LEASE_SECONDS / 3):
            self._tell_that_it_lives()

    def _tell_that_it_lives(self) -> None:
        for number in self.members.keys() - self.lost.keys():
            self.submit(number, "pause_renew", LEASE_SECONDS)

    # The end

    def leave(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self._ray.shutdown()

    def end(self, seconds: float) -> None:
        """Close every worker's collector, `seconds` at most, and end them all; what goes wrong is logged."""
        with contextlib.suppress(self._ray.exceptions.RayError, RuntimeError):  # the cluster may be gone already
            asked = {n: self.submit(n, "finish") for n in self.members if n not in self.lost}
            if asked:
                ready, _ = self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=seconds)
                for number, reference in asked.items():
                    self._tell_end(number, reference, reference in ready)
        for member in self.members.values():
            with contextlib.suppress(Exception):  # it may be gone already
                self._ray.kill(member.actor)

    def _tell_end(self, number: int, reference: Any, is_ready: bool) -> None:
        try:
            if not is_ready:
                raise PolicyError("it had not ended in time and was killed")
            self.result(number, reference, "its end")
        except Exception as error:  # noqa: BLE001  whatever a collector raises while it is closed
            log.warning("worker %d was shut down after an error: %s", number, error)


def connected(init: Mapping[str, Any] | None) -> Any:
    """Ray, connected to a cluster: to the one it is connected to, or else as `init`, for `ray.init`, says."""
    require("ray", "ray", "RayCollector")
    import ray

    if ray.is_initialized():
        return ray
    options = dict(init or {})
    return cluster.connect(options.pop("address", None) or cluster.AUTO, **options)


def pickled(name: str, part: Any) -> bytes:
    """`part` as bytes. Raises TypeError, by its `name`, where it cannot be sent."""
    try:
        return cloudpickle.dumps(part)
    except Exception as error:
        raise TypeError(
            f"{name} cannot be sent to a collector's actor ({error}): build what it needs in create_env_fn or in "
            "policy_factory, which are called there"
        ) from error


def _how(error: BaseException) -> str:
    """The line of Ray's report that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("The actor is dead because")]
    return (telling or lines or [type(error).__name__])[0]
