"""LLMCollector as the documents show it: of an environment or its maker, and any callable as a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from tensordict import TensorDictBase

from rlpost.collectors import llm
from rlpost.envs.base import EnvBase
from rlpost.policies.base import Policy
from rlpost.torchrl.chat_envs import CalledPolicy

Called = Policy | Callable[[TensorDictBase], TensorDictBase]


class LLMCollector(llm.LLMCollector):
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

    Raises TypeError, ValueError or RuntimeError for combinations that contradict each other, TypeError for
    an environment that is not an EnvBase.

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
        policy: Called | None = None,
        policy_factory: Callable[[], Called] | None = None,
        async_envs: bool | None = None,
        **options: Any,
    ) -> None:
        if (policy is None) == (policy_factory is None):
            raise TypeError("LLMCollector takes exactly one of policy and policy_factory")
        if async_envs:
            raise RuntimeError(
                "async_envs=True is for a pool of environments (rlpost.envs.AsyncEnvPool) in a Collector: the "
                "conversations of one language environment wait for one another in no pool; raise its num_envs instead"
            )
        played = _language_env(env)
        made = policy if policy is not None else policy_factory()  # type: ignore[misc]
        super().__init__(played, made if isinstance(made, Policy) else CalledPolicy(made, cast(Any, played)), **options)


def _language_env(env: Any) -> EnvBase:
    """`env`, or the one it makes. Raises TypeError if that has no conversations."""
    built = env() if callable(env) and not isinstance(env, EnvBase) else env
    if not isinstance(built, EnvBase):
        raise TypeError(
            f"LLMCollector plays conversations, and {type(built).__name__} is no rlpost.envs.EnvBase: for any other "
            "environment of TensorDicts there is rlpost.collectors.Collector"
        )
    return built
