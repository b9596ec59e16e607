"""Everything one command can say: the root of each composed configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from rlpost.errors import ConfigError
from rlpost.settings.advantage import AdvantageSettings, DynamicSamplingSettings, Estimator, OverlongSettings
from rlpost.settings.checks import MISSING, Settings, limited
from rlpost.settings.cluster import ClusterSettings, RayClusterSettings, Sharding
from rlpost.settings.code import CODE
from rlpost.settings.collector import MAX_RESTARTS, AsyncCollectorSettings, CollectorSettings
from rlpost.settings.diagnosis import DiagnosisSettings
from rlpost.settings.env import EnvSettings
from rlpost.settings.evaluation import EvalDuringTrainingSettings
from rlpost.settings.gate import GateSettings
from rlpost.settings.learning import GRPO_RATES, SFT_RATES, AdamW8bitSettings, OptimSettings, UsualRates
from rlpost.settings.lora import LoRASettings, Push
from rlpost.settings.loss import KLPlace, PolicyLossSettings, SamplerCorrection
from rlpost.settings.model import ModelSettings
from rlpost.settings.policy import PolicySettings, TrainSamplingSettings
from rlpost.settings.tools import ToolsSettings, check_turns
from rlpost.settings.tracking import TrackingSettings
from rlpost.text import counted


@dataclass
class CheckpointSettings(Settings, group="checkpoint"):
    """When training is saved; the last step always is."""

    every: int = limited(30, at_least=0)  # steps; 0: none for their number
    every_minutes: float = limited(5.0, at_least=0.0)  # the most training a crash can lose; 0: none for the time
    keep_last: int = limited(2, at_least=1)  # checkpoints, no older ones; all but the newest keep the model alone


@dataclass
class TrainingSettings(Settings):
    """What every training has."""

    usual_rates: ClassVar[UsualRates] = SFT_RATES

    model: ModelSettings = MISSING  # what is trained
    env: EnvSettings = MISSING  # what is asked, and how replies are scored
    policy: PolicySettings = MISSING  # what samples the completions
    lora: LoRASettings = field(default_factory=LoRASettings)  # what is trained in the place of all weights
    optim: OptimSettings = MISSING  # what turns gradients into an update
    cluster: ClusterSettings = MISSING  # whose machines train and sample
    tracking: TrackingSettings = MISSING  # where figures go beside metrics.jsonl
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)  # when training is saved
    diagnosis: DiagnosisSettings = field(default_factory=DiagnosisSettings)  # what is done about signs of a sick run
    plugin: list[str] = field(
        default_factory=list, metadata=CODE
    )  # Python files that register environments and rewards
    seed: int = limited(0, at_least=0)  # of prompts, sampling and all else that is drawn
    tokens_per_microbatch: int | None = limited(
        None, at_least=1
    )  # of one forward and backward; None: 384 to 2048 on a CPU, 16384 on a GPU
    deterministic: bool = False  # bitwise equal runs; needs policy=transformers

    @property
    def uses_policy(self) -> bool:
        """Whether completions are sampled at all."""
        return True

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the log-probs of the starting model."""
        loss: Any = getattr(self, "loss")  # noqa: B009  that of each training
        return loss.needs_reference

    def unusual_rate(self) -> str | None:
        """What to say of a learning rate that nobody is known to use; None of any other."""
        return self.usual_rates.question(self.optim.lr, adapter=self.lora.enabled)

    def __post_init__(self) -> None:
        super().__post_init__()
        shares_weights = getattr(self.policy, "shares_weights", False)  # of none while the policy is MISSING
        is_divided = isinstance(self.cluster, ClusterSettings) and self.cluster.sharding is Sharding.full
        if is_divided and isinstance(self.optim, AdamW8bitSettings):
            raise ConfigError("optim=adamw_8bit cannot divide its state among ranks: take optim=adamw")
        if shares_weights and self.lora.push is Push.adapter:
            raise ConfigError("lora.push=adapter is a way into vLLM: add policy=vllm, or leave it out")
        if self.deterministic and self.uses_policy and not shares_weights:
            raise ConfigError(
                "deterministic=true promises bitwise equal runs, which vLLM cannot keep: add policy=transformers"
            )

    def _check_split(self, measured: bool) -> None:
        """Raise ConfigError for training on the split that an evaluation measures on."""
        if isinstance(self.env, EnvSettings) and self.env.split == "test" and measured:
            raise ConfigError(
                "env.split=test would train on what is held out to measure it: leave it out, or add eval.enabled=false"
            )


@dataclass
class SampledSettings(TrainingSettings):
    """What every training has that learns from groups of completions of its own policy."""

    collector: CollectorSettings = MISSING  # whether completions are sampled in turn with training or beside it
    tools: ToolsSettings = field(default_factory=ToolsSettings)  # what the model may call while it answers
    sampling: TrainSamplingSettings = field(default_factory=TrainSamplingSettings)  # how a completion is drawn
    gate: GateSettings = field(default_factory=GateSettings)  # whether what samples is what learns
    eval: EvalDuringTrainingSettings = field(default_factory=EvalDuringTrainingSettings)  # on held-out prompts
    prompts_per_step: int = limited(8, at_least=1)  # each is answered group_size times
    group_size: int = 8  # completions a prompt, G in the paper
    minibatch_size: int | None = limited(None, at_least=1)  # completions an optimizer step; None: all of a step's
    passes: int = limited(1, at_least=1)  # times each step's completions are trained on
    max_policy_lag: int | None = limited(
        None, at_least=0
    )  # weight pushes a trained completion may be older than the policy; None: 0, and 1 with collector=async
    max_failed_share: float = limited(0.5, 0.0, 1.0)  # of a step's rewards; a step of which more fail stops the run

    @property
    def lag(self) -> int:
        """`max_policy_lag`, chosen where the user left that open."""
        usual = 1 if isinstance(self.collector, AsyncCollectorSettings) else 0
        return usual if self.max_policy_lag is None else self.max_policy_lag

    @property
    def samples_elsewhere(self) -> bool:
        """Whether other processes than the training's sample."""
        return isinstance(self.collector, AsyncCollectorSettings) or self.on_cluster

    @property
    def on_cluster(self) -> bool:
        """Whether workers of a cluster sample."""
        return isinstance(self.cluster, RayClusterSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_collector()
        if self.group_size < 2:
            raise ConfigError(
                f"group_size={self.group_size} leaves nothing to compare a completion with: it must be at least 2"
            )
        check_turns(self.env, self.tools)
        if isinstance(self.sampling, TrainSamplingSettings) and self.sampling.temperature == 0:
            raise ConfigError(
                "sampling.temperature=0 gives every prompt group_size equal completions: training needs it above 0"
            )
        self._check_split(self.eval.enabled)

    def told_of_lag(self) -> list[str]:
        """A line of a plan where completions can be older than the policy: how old, and what is done about it."""
        if not self.lag:
            return []
        older = f"completions may be {counted(self.lag, 'version')} older than the policy"
        return [f"lag     {older}{self.correction_told()}"]

    def correction_told(self) -> str:
        """What is done about completions that are older than the policy, behind how old they may be."""
        return ""

    def _check_collector(self) -> None:
        elsewhere = f"cluster={self.cluster.name}" if self.on_cluster else f"collector={self.collector.name}"
        if self.samples_elsewhere and self.deterministic:
            raise ConfigError(
                f"deterministic=true promises bitwise equal runs, and with {elsewhere} groups come in the order in "
                "which they happen to end: leave one out"
            )
        if self.lag and self.samples_elsewhere and getattr(self.policy, "sleep", False):
            raise ConfigError(
                f"policy.sleep=true has nothing to do while the policy samples beside training (lag {self.lag}): add "
                "max_policy_lag=0, or leave it out"
            )
        if not isinstance(self.collector, AsyncCollectorSettings):
            return
        own = self.collector.gpus or self.collector.players > 1 or self.collector.max_restarts != MAX_RESTARTS
        if self.on_cluster and own:
            raise ConfigError(
                "collector.gpus, collector.players and collector.max_restarts are of one machine's samplers: with "
                "cluster=ray they are cluster.gpus_per_worker, cluster.rollout_workers and cluster.max_restarts"
            )
        if self.collector.depth is not None and self.collector.depth > self.lag:
            raise ConfigError(
                f"collector.depth={self.collector.depth} begins groups that would be too old when they are trained on: "
                f"it must be at most max_policy_lag={self.lag}"
            )


@dataclass
class GRPOSettings(SampledSettings):
    """`rlpost train grpo`."""

    usual_rates: ClassVar[UsualRates] = GRPO_RATES
    must_stay: ClassVar = ("seed", "prompts_per_step", "group_size")  # what a run that goes on cannot change

    advantage: AdvantageSettings = field(default_factory=AdvantageSettings)  # what rewards become
    dynamic: DynamicSamplingSettings = field(default_factory=DynamicSamplingSettings)  # which groups are trained on
    overlong: OverlongSettings = field(default_factory=OverlongSettings)  # completions near or at the token limit
    loss: PolicyLossSettings = MISSING  # what turns advantages into a gradient
    steps: int = limited(60, at_least=1)  # each: sample, reward, update, push the weights

    def __post_init__(self) -> None:
        super().__post_init__()
        completions = self.prompts_per_step * self.group_size
        if self.minibatch_size is not None and (
            self.minibatch_size % self.group_size or completions % self.minibatch_size
        ):
            raise ConfigError(
                f"minibatch_size={self.minibatch_size} does not fit: it must be a multiple of "
                f"group_size={self.group_size} and divide prompts_per_step x group_size = {completions}"
            )
        self._check_advantage()
        if isinstance(self.loss, PolicyLossSettings):
            _ = self.corrected_loss  # bounds of a correction that is off are refused
        if isinstance(self.sampling, TrainSamplingSettings) and (filters := self.sampling.filters):
            key, value = next(iter(filters.items()))
            raise ConfigError(
                f"sampling.{key}={value:g} draws from a part of the distribution, and the gradient is that of the "
                "whole: tokens would be weighed by probabilities they were not drawn with; leave it out, or lower "
                "sampling.temperature (rlpost eval, rlpost chat and train expert-iteration take it)"
            )

    @property
    def corrected_loss(self) -> PolicyLossSettings:
        """`loss` with its sampler's correction chosen where the user left that open: on for completions of any age."""
        usual = SamplerCorrection.tis_token if self.lag else SamplerCorrection.none
        return replace(self.loss, sampler_correction=self.loss.sampler_correction or usual)

    def correction_told(self) -> str:
        """See `SampledSettings.correction_told`."""
        chosen = self.corrected_loss.sampler_correction
        done = "nothing corrects for it" if chosen is SamplerCorrection.none else "pi_old / mu corrects for it"
        return f"; {done} (loss.sampler_correction={chosen and chosen.name})"

    def _check_advantage(self) -> None:
        if isinstance(self.env, EnvSettings) and self.overlong.penalty_tokens > self.env.max_completion_tokens:
            raise ConfigError(
                f"overlong.penalty_tokens={self.overlong.penalty_tokens} is more than a completion can have: it must "
                f"be at most env.max_completion_tokens={self.env.max_completion_tokens}"
            )
        if isinstance(self.env, EnvSettings) and self.overlong.penalty_tokens and self.env.max_turns > 1:
            raise ConfigError(
                "overlong.penalty_tokens measures one completion, and env.max_turns gives several: leave one out"
            )
        loss, estimator = self.loss, self.advantage.estimator
        in_reward = isinstance(loss, PolicyLossSettings) and loss.kl_in is KLPlace.reward and loss.kl_coef > 0
        if in_reward and estimator is Estimator.reinforce_pp and loss.variant == "gspo":
            raise ConfigError(
                "advantage.estimator=reinforce_pp with loss.kl_in=reward gives each token an advantage of its own, and "
                "loss=gspo weighs whole completions: take loss=gspo_token"
            )
