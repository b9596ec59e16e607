"""LLMCollector: plays an environment with a policy and delivers what happened."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import ceil
from queue import Empty
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rlpost.collectors.base import postprocessed
from rlpost.collectors.player import Player
from rlpost.collectors.weights import WeightsCollector
from rlpost.data.conversation import Conversation
from rlpost.data.replay_buffer import ReplayBuffer
from rlpost.envs.base import EnvBase
from rlpost.envs.transforms.policy_version import PolicyVersion
from rlpost.errors import CheckpointError
from rlpost.policies.base import Policy
from rlpost.weight_sync.base import WeightUpdater


class LLMCollector(WeightsCollector):
    """Iterates over batches of dialog turns, or fills a replay buffer with them.

    One *turn* is one reply of the model and the environment's answer to it. `dialog_turns_per_batch`
    is rounded up to a multiple of the environment's size B, which it is where it is left out.

    Plain mode delivers every turn as it comes, stacked to (B, T), or (B*T,) with `flatten_data`; a
    conversation goes on in the next batch unless `reset_at_each_iter`.
    `yield_completed_trajectories` delivers whole trajectories, one after the other on a single
    dimension, until a batch has its turns; what is complete beyond it waits for the
    next, and so does what is under way, unless `reset_at_each_iter` abandons the latter.
    `yield_only_last_steps` delivers the last turn of each, which holds the whole conversation, and
    counts those alone. With `begin_ahead` a place whose conversation is over begins one for a later
    batch at once; without, only as many begin as the batch still lacks, so that none of it is sampled
    under weights that will be old when it is delivered. Iteration ends once `total_dialog_turns` are
    delivered; -1: never.

    With `replay_buffer` the batch goes there, and with `queue` it is put there, a full queue losing
    its oldest batch with a warning; iteration then yields None. `start` fills the buffer from a
    thread of its own, until `shutdown`, the end of a `with` block or the collector's; it rests while as many
    rows as `batches_ahead` batches have wait there for somebody to take them (None: never).

    `weight_updater` is how the trainer's weights reach the policy; left out, it is the policy's own way:
    `SharedWeights` for one that samples from the trainer's tensors, `vLLMUpdater` for vLLM.

    Beside what `rlpost.data.batch` says, a batch has `("collector", "traj_ids")`, int64 a row: the
    number of its trajectory among those this collector has begun.

    `policy` is one of rlpost.policies, or any callable on TensorDicts, a TensorDictModule for one, which is
    shown what the environment's `reset` and `step` show and writes its turn as `step` takes it.

    Raises TypeError, ValueError or RuntimeError for combinations that contradict each other, TypeError for
    an environment that is no EnvBase.

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

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        *,
        policy: Policy | Callable[[TensorDictBase], TensorDictBase] | None = None,
        policy_factory: Callable[[], Policy | Callable[[TensorDictBase], TensorDictBase]] | None = None,
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
        if (policy is None) == (policy_factory is None):
            raise TypeError("LLMCollector takes exactly one of policy and policy_factory")
        if queue is not None and replay_buffer is not None:
            raise RuntimeError("LLMCollector delivers into a queue or into a replay_buffer, not into both")
        if async_envs:
            raise RuntimeError(
                "async_envs=True is for a pool of environments (rlpost.envs.AsyncEnvPool) in a Collector: the "
                "conversations of one language environment wait for one another in no pool; raise its num_envs instead"
            )
        last_only = bool(yield_only_last_steps)
        if last_only and yield_completed_trajectories is False:
            raise TypeError("yield_only_last_steps=True contradicts yield_completed_trajectories=False")
        if last_only and (flatten_data or reset_at_each_iter):
            raise TypeError("yield_only_last_steps excludes flatten_data and reset_at_each_iter")
        completed = last_only if yield_completed_trajectories is None else yield_completed_trajectories
        if batches_ahead is not None and batches_ahead < 1:
            raise ValueError(
                f"batches_ahead={batches_ahead} lets start() collect nothing: it must be at least 1, or None"
            )

        super().__init__(_language_env(env), replay_buffer, wait_seconds=wait_seconds)
        self.policy = _policy(policy if policy is not None else policy_factory(), self.env)  # type: ignore[misc]
        size = self.env.numel()
        self.dialog_turns_per_batch = ceil(turns_per_batch(dialog_turns_per_batch, 1) / size) * size
        self.total_dialog_turns = total_dialog_turns
        self.yield_completed_trajectories = completed
        self.yield_only_last_steps = last_only
        self.reset_at_each_iter = reset_at_each_iter
        self.flatten_data = (replay_buffer is not None) if flatten_data is None else flatten_data
        self.postproc = postproc
        self.queue = queue
        self.verbose = verbose
        self.begin_ahead = begin_ahead
        self.policy_version_tracker = self._version_tracker(track_policy_version)
        self.player = Player(self.env, self.policy)
        self.weight_updater = self._updater(weight_updater)
        self.batches_ahead = batches_ahead
        if replay_buffer is not None:
            self._become_source_of(replay_buffer)
        self._live: list[list[Conversation]] = [[] for _ in range(size)]  # turns of what is under way in each place
        self._ready: deque[list[Conversation]] = deque()  # complete trajectories not yet delivered
        self._turns_delivered = 0
        self._trajectories_begun = 0

    @property
    def plays_conversations(self) -> bool:
        """See `CollectorBase.plays_conversations`."""
        return True

    @property
    def frames_per_batch(self) -> int:
        """`dialog_turns_per_batch`: a frame is a turn."""
        return self.dialog_turns_per_batch

    def rollout(self) -> TensorDictBase:
        """One batch, whatever it is delivered into."""
        self._check_foreground("take a rollout of")
        return self._collected()

    def show(self, on_phase: Callable[[str, str], None], on_sampled: Callable[[int, int, int], None]) -> None:
        """Tell `on_phase` and `on_sampled` what is under way, as `Player` says."""
        self.player.on_phase, self.player.on_sampled = on_phase, on_sampled

    def begin_step(self) -> None:
        """A step of a training begins."""

    def take_seconds(self) -> dict[str, float]:
        """See `Player.take_seconds`."""
        return self.player.take_seconds()

    def counts(self) -> dict[str, float]:
        """What it has to say in a step's metrics beside the buffer's counts: nothing."""
        return {}

    # State

    def reset(self, index: int | Sequence[int] | None = None, **kwargs: Any) -> None:
        """Abandon the conversations under way, or those in the places `index`; complete ones are still delivered.

        Raises TypeError for anything else: conversations begin in one way.
        """
        if kwargs:
            raise TypeError(f"reset takes the places to begin anew, and no {', '.join(kwargs)}: leave it out")
        with self.pause():
            if index is None:
                self._abandon()
                return
            places = [index] if isinstance(index, int) else list(index)
            abandoned = [self._live[place][-1] for place in places if self._live[place]]
            for place in places:
                self._live[place] = []
            for transform in self.env.transforms:
                transform.on_end(abandoned)

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Set the postprocessing of batches. Raises RuntimeError if there is one already."""
        if self.postproc is not None:
            raise RuntimeError("this collector has a postproc already")
        self.postproc = postproc

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the order of the environment's tasks and the randomness of completions.

        What is under way is abandoned, and the draws that follow have numbers that none had before. Returns the
        seed for the next collector of a chain: `seed + 1`, with `static_seed` the same. A policy that several
        collectors sample with has the seed that was set last.
        """
        with self.pause():
            self._abandon()
            self._ready.clear()
            self.env.set_seed(seed)
            self.policy.seed = seed
        return seed if static_seed else seed + 1

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what is collected next, as JSON-compatible values; no weights.

        `env_state_dict` is the environment's, `policy_state_dict` the seed and version of the policy. While the
        background collects, what is saved beside it, as the buffer is, belongs into the same block of `pause`.
        """
        with self.pause():
            return {
                "env_state_dict": self.env.state_dict(),
                "policy_state_dict": {"seed": self.policy.seed, "version": self.policy.version},
                "live": [[asdict(turn) for turn in turns] for turns in self._live],
                "ready": [[asdict(turn) for turn in turns] for turns in self._ready],
                "turns_delivered": self._turns_delivered,
                "trajectories_begun": self._trajectories_begun,
            }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Go on where `state_dict` was taken; the weights of the policy's version are there already.

        Without `strict` a part that is not there stays as it is. Raises CheckpointError for such a part otherwise,
        and if conversations were under way and the environment's size was another.
        """
        own = ("env_state_dict", "policy_state_dict", "live", "ready", "turns_delivered", "trajectories_begun")
        if strict and (missing := [name for name in own if name not in state_dict]):
            raise CheckpointError(f"this is no whole state of an LLMCollector: it has no {' and no '.join(missing)}")
        live = [[Conversation(**turn) for turn in turns] for turns in state_dict.get("live", [])]
        if any(live) and len(live) != len(self._live):
            raise CheckpointError(
                f"the saved collector had {len(live)} conversations under way at once, and this environment has "
                f"{len(self._live)}: resume with the prompts_per_step and group_size the run began with"
            )
        with self.pause():
            if "env_state_dict" in state_dict:
                self.env.load_state_dict(state_dict["env_state_dict"])
            if "policy_state_dict" in state_dict:
                self.policy.seed = state_dict["policy_state_dict"]["seed"]
                self.weight_updater.restore_version(state_dict["policy_state_dict"]["version"])
            if "live" in state_dict:
                self._live = live if any(live) else [[] for _ in self._live]
            if "ready" in state_dict:
                self._ready = deque([Conversation(**turn) for turn in turns] for turns in state_dict["ready"])
            self._turns_delivered = state_dict.get("turns_delivered", self._turns_delivered)
            self._trajectories_begun = state_dict.get("trajectories_begun", self._trajectories_begun)

    # Collecting

    @property
    def wants_more(self) -> bool:
        """See `CollectorBase.wants_more`: until `total_dialog_turns`, where there is an end."""
        return self.total_dialog_turns < 0 or self._turns_delivered < self.total_dialog_turns

    @property
    def is_ahead(self) -> bool:
        """See `CollectorBase.is_ahead`."""
        if self.replay_buffer is None or self.batches_ahead is None:
            return False
        return self.replay_buffer.num_rows >= self.batches_ahead * self.dialog_turns_per_batch

    def _collected(self) -> TensorDictBase:
        batch = self._completed_batch() if self.yield_completed_trajectories else self._plain_batch()
        self._turns_delivered += batch.numel()
        return postprocessed(batch, self.postproc)

    def give_back(self, count: int) -> None:
        """See `CollectorBase.give_back`."""
        self._turns_delivered -= count

    def collect_round(self) -> TensorDictBase | None:
        """See `CollectorBase.collect_round`."""
        batch = self._collected()
        if self.verbose:
            print(f"collected {batch.numel()} turns, {self._turns_delivered} in all", flush=True)
        if self.replay_buffer is not None:
            self.replay_buffer.extend(batch)
            return None
        if self.queue is not None:
            self._put(self.queue, batch)
            return None
        return batch

    def _put(self, queue: Any, batch: TensorDictBase) -> None:
        if queue.full():
            with contextlib.suppress(Empty):  # the reader may have been faster
                queue.get_nowait()
                warnings.warn("the collector's queue is full: its oldest batch is lost", stacklevel=4)
        queue.put(batch)

    def _plain_batch(self) -> TensorDictBase:
        if self.reset_at_each_iter:
            self._abandon()
        steps = [self._play_turn() for _ in range(self.dialog_turns_per_batch // len(self._live))]
        if self.flatten_data:
            return self._batch([step[i] for i in range(len(self._live)) for step in steps])
        return LazyStackedTensorDict.lazy_stack([self._batch(step) for step in steps], -1)

    def _completed_batch(self) -> TensorDictBase:
        if self.reset_at_each_iter:
            self._abandon()
        chosen: list[Conversation] = []
        while len(chosen) < self.dialog_turns_per_batch:
            while not self._ready:
                self._play_turn(self._wanted(len(chosen)))
            chosen += self._ready.popleft()
        return self._batch(chosen)

    def _wanted(self, turns_chosen: int) -> int:
        """How many conversations to begin: in every place, or as many as the batch lacks with those under way."""
        if self.begin_ahead:
            return len(self._live)
        expected = sum(1 if self.yield_only_last_steps else len(turns) + 1 for turns in self._live if turns)
        return max(0, self.dialog_turns_per_batch - turns_chosen - expected)

    def _batch(self, conversations: Sequence[Conversation]) -> TensorDictBase:
        """The batch of `conversations` (B,), with the numbers of their trajectories."""
        batch = self.env.build_batch(conversations)
        return batch.set(("collector", "traj_ids"), torch.tensor([c.trajectory for c in conversations]))

    def _abandon(self) -> None:
        self._live = [[] for _ in self._live]
        self.env.abandon()

    def _play_turn(self, most_begun: int | None = None) -> list[Conversation]:
        """Let every conversation take one turn, a fresh one in each free place, or `most_begun` of them; snapshots."""
        free = [i for i, turns in enumerate(self._live) if not turns][:most_begun]
        drawn = self.env.draw(len(free)) if free else []
        for conversation in drawn:
            conversation.trajectory = self._trajectories_begun
            self._trajectories_begun += 1
        fresh = dict(zip(free, drawn, strict=True))
        places = [i for i, turns in enumerate(self._live) if turns or i in fresh]
        conversations = [fresh[i] if i in fresh else self._live[i][-1].copy() for i in places]
        self.player.turn(conversations)
        self.player.on_phase("building", "the batch")
        keeps_turns = self.yield_completed_trajectories and not self.yield_only_last_steps
        for i, conversation in zip(places, conversations, strict=True):
            trajectory = [*self._live[i], conversation] if keeps_turns else [conversation]
            if self.yield_completed_trajectories and conversation.done:
                self._ready.append(trajectory)
            self._live[i] = [] if conversation.done else trajectory
        return conversations


def turns_per_batch(given: int | None, default: int) -> int:
    """`given`, or `default` for None. Raises ValueError below 1."""
    if given is not None and given < 1:
        raise ValueError(f"dialog_turns_per_batch={given} makes no batch: it must be at least 1")
    return default if given is None else given


def _language_env(env: Any) -> EnvBase:
    """`env`, or what it makes. Raises TypeError where that has no conversations."""
    built = env() if callable(env) and not isinstance(env, EnvBase) else env
    if not isinstance(built, EnvBase):
        raise TypeError(
            f"LLMCollector plays conversations, and {type(built).__name__} is no rlpost.envs.EnvBase: for any other "
            "environment of TensorDicts there is rlpost.collectors.Collector"
        )
    return built


def _policy(policy: Any, env: EnvBase) -> Policy:
    """`policy`, or the callable as one."""
    if isinstance(policy, Policy):
        return policy
    from rlpost.torchrl.called import CalledPolicy

    return CalledPolicy(policy, env)
