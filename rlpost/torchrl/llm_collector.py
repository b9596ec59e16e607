"""LLMCollector, which delivers turns of conversations, one by one or whole trajectories."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from queue import Empty
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rlpost.collectors.sync import SyncCollector
from rlpost.data.conversation import Conversation
from rlpost.envs.base import EnvBase
from rlpost.envs.transforms.training import PolicyVersion
from rlpost.policies.base import Policy
from rlpost.torchrl.chat_envs import CalledPolicy
from rlpost.torchrl.collector_base import WeightsCollector, postprocessed
from rlpost.torchrl.frames import TRAJ_IDS
from rlpost.torchrl.replay_buffer import ReplayBuffer
from rlpost.weight_sync.base import WeightUpdater

Called = Policy | Callable[[TensorDictBase], TensorDictBase]


class LLMCollector(WeightsCollector, SyncCollector):
    """Iterates over batches of dialog turns, or fills a replay buffer with them.

    One *turn* is one reply of the model and the environment's answer to it. `dialog_turns_per_batch`
    is rounded up to a multiple of the environment's size B (default: B).

    Plain mode delivers every turn as it comes, stacked to (B, T), or (B*T,) with `flatten_data`; a
    conversation goes on in the next batch unless `reset_at_each_iter`.
    `yield_completed_trajectories` delivers whole trajectories, one after the other on a single
    dimension, until a batch has its turns; further complete ones wait for the next batch, and so do
    those in flight, unless `reset_at_each_iter` abandons them.
    `yield_only_last_steps` delivers the last turn of each, which holds the whole conversation, and
    counts those alone. With `begin_ahead` a place whose conversation is over begins one for a later
    batch at once; without, only as many begin as the batch still lacks, so that none is sampled
    under weights that will be stale when it is delivered. Iteration ends once `total_dialog_turns` are
    delivered; -1: never.

    With `replay_buffer` the batch goes there, and with `queue` it is put there, a full queue losing
    its oldest batch with a warning; iteration then yields None. `start` fills the buffer from a
    thread of its own, until `shutdown`, the end of a `with` block or the collector's; it rests while
    `batches_ahead` batches of rows wait there to be taken (None: never).

    `weight_updater` pushes the trainer's weights to the policy; the default is the policy's own:
    `SharedWeights` for one that samples from the trainer's tensors, `vLLMUpdater` for vLLM.

    A batch has the keys of `rlpost.data.batch`, and `("collector", "traj_ids")`, int64 a row: the
    number of its trajectory among those this collector has begun.

    `policy` is one of rlpost.policies, or any callable on TensorDicts, such as a TensorDictModule, which reads
    what the environment's `reset` and `step` return and writes its turn as `step` takes it.

    Raises RuntimeError for `async_envs=True`, ValueError for a `weight_updater` of another policy.

    >>> from rlpost.collectors import LLMCollector
    >>> from rlpost.envs import GSM8KEnv
    >>> from rlpost.models import load_tokenizer, locate_model
    >>> from rlpost.policies import ScriptedPolicy
    >>> from rlpost.settings import SamplingSettings
    >>> env = GSM8KEnv([{"question": "How much is 3 + 4?", "answer": "#### 7"}], repeats=2, group_repeats=True)
    >>> tokenizer = load_tokenizer(locate_model("builtin:tiny"))
    >>> policy = ScriptedPolicy(["<answer>7</answer>", "8"], tokenizer, sampling=SamplingSettings())
    >>> collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=2, yield_completed_trajectories=True)
    >>> batch = next(iter(collector))
    >>> batch["next", "reward"].squeeze(-1).tolist(), batch["group_id"].tolist()
    ([1.0, 0.0], [0, 0])
    """

    plays_conversations = True

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        *,
        policy: Called | None = None,
        policy_factory: Callable[[], Called] | None = None,
        dialog_turns_per_batch: int | None = None,
        yield_only_last_steps: bool | None = None,
        yield_completed_trajectories: bool | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        total_dialog_turns: int = -1,
        async_envs: bool | None = None,
        replay_buffer: ReplayBuffer | None = None,
        reset_at_each_iter: bool = False,
        flatten_data: bool | None = None,
        weight_updater: WeightUpdater | Callable[[], WeightUpdater] | None = None,
        queue: Any | None = None,
        track_policy_version: bool | PolicyVersion = False,
        begin_ahead: bool = True,
        verbose: bool = False,
        batches_ahead: int | None = 2,
        wait_seconds: float = 600.0,
    ) -> None:
        if async_envs:
            raise RuntimeError(
                "async_envs=True is for a pool of environments: one language environment plays all its conversations "
                "together, so raise its num_envs instead"
            )
        last_only = bool(yield_only_last_steps)
        completed = last_only if yield_completed_trajectories is None else yield_completed_trajectories
        built = env() if callable(env) and not isinstance(env, EnvBase) else env
        WeightsCollector.__init__(self, built, replay_buffer, wait_seconds=wait_seconds)
        made = policy if policy is not None else policy_factory()  # type: ignore[misc]
        self.policy = made if isinstance(made, Policy) else CalledPolicy(made, cast(Any, self.env))
        size = self.env.numel()
        self.frames_per_batch = self.dialog_turns_per_batch = ceil((dialog_turns_per_batch or 1) / size) * size
        self.total_dialog_turns = total_dialog_turns
        self.yield_completed_trajectories = completed
        self.yield_only_last_steps = last_only
        self.keeps_turns = completed and not last_only
        self.reset_at_each_iter = reset_at_each_iter
        self.flatten_data = (replay_buffer is not None) if flatten_data is None else flatten_data
        self.postproc = postproc
        self.queue = queue
        self.verbose = verbose
        self.begin_ahead = begin_ahead
        self.batches_ahead = batches_ahead
        self.policy_version_tracker = self._version_tracker(track_policy_version)
        self._play_with(self.env, self.policy)
        self.weight_updater = self._updater(weight_updater)

    # Collecting

    @property
    def wants_more(self) -> bool:
        """See `CollectorBase.wants_more`: until `total_dialog_turns`."""
        return self.total_dialog_turns < 0 or self._turns_delivered < self.total_dialog_turns

    def _collected(self) -> TensorDictBase:
        if self.reset_at_each_iter:
            self._abandon()
        if self.yield_completed_trajectories:
            batch = self._batch(self._completed(self.dialog_turns_per_batch))
        else:
            batch = self._plain_batch()
        self._turns_delivered += batch.numel()
        if self.verbose:
            print(f"collected {batch.numel()} turns, {self._turns_delivered} in all", flush=True)
        return postprocessed(batch, self.postproc)

    def _plain_batch(self) -> TensorDictBase:
        rounds = self.dialog_turns_per_batch // self.env.numel()
        steps = [[turns[-1] for turns in self._play_turn()] for _ in range(rounds)]
        if self.flatten_data:
            return self._batch([turn for place in zip(*steps, strict=True) for turn in place])
        return LazyStackedTensorDict.lazy_stack([self._batch(step) for step in steps], -1)

    def collect_round(self) -> TensorDictBase | None:
        """See `CollectorBase.collect_round`."""
        batch = super().collect_round()
        if self.queue is None or batch is None:
            return batch
        self._put(self.queue, batch)
        return None

    def _put(self, queue: Any, batch: TensorDictBase) -> None:
        if queue.full():
            with contextlib.suppress(Empty):  # the reader may have been faster
                queue.get_nowait()
                warnings.warn("the collector's queue is full: its oldest batch is lost", stacklevel=4)
        queue.put(batch)

    def _batch(self, conversations: Sequence[Conversation]) -> TensorDictBase:
        """The batch of `conversations` (B,), with the numbers of their trajectories."""
        batch = self.env.build_batch(conversations)
        return batch.set(TRAJ_IDS, torch.tensor([c.trajectory for c in conversations]))

    # State

    def reset(self, index: int | Sequence[int] | None = None, **kwargs: Any) -> None:
        """Abandon the conversations in flight, or those in the places `index`; complete ones are still delivered."""
        with self.pause():
            if index is None:
                self._abandon()
                return
            places = [index] if isinstance(index, int) else list(index)
            abandoned = [self._live[place][-1] for place in places if self._live[place]]
            for place in places:
                self._live[place] = []
            self.env.abandon(abandoned)

    def _abandon(self) -> None:
        self._live = [[] for _ in self._live]
        self.env.abandon()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the order of the environment's tasks and the randomness of completions.

        Conversations in flight are abandoned, and later draws get new numbers. Returns the seed for the next
        collector of a chain: `seed + 1`, with `static_seed` the same. A policy that several collectors share has
        the seed that was set last.
        """
        with self.pause():
            self._abandon()
            self._ready.clear()
            self.env.set_seed(seed)
            self.policy.seed = seed
        return seed if static_seed else seed + 1

    def state_dict(self) -> dict[str, Any]:
        """See `SyncCollector.state_dict`. In the background, save the buffer in the same block of `pause`."""
        with self.pause():
            return SyncCollector.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """See `SyncCollector.load_state_dict`; without `strict` a missing part stays as it is."""
        with self.pause():
            kept = {} if strict else SyncCollector.state_dict(self)
            SyncCollector.load_state_dict(self, kept | dict(state_dict))
