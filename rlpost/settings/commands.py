"""The root settings of each command, and the request for one run.

An algorithm's settings derive from `SampledSettings`, or from those of a shipped training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlpost.errors import ConfigError
from rlpost.settings.base import CODE, MISSING, Settings, doc
from rlpost.settings.env import DatasetSettings, EnvSettings, ToolsSettings, check_tools
from rlpost.settings.loss import (
    AdvantageSettings,
    DemonstrationLossSettings,
    DifficultySettings,
    DistillationLossSettings,
    DynamicSamplingSettings,
    LossSettings,
    OverlongSettings,
    PairLossSettings,
    PolicyLossSettings,
    SamplerCorrection,
)
from rlpost.settings.model import DType, LoRASettings, ModelSettings
from rlpost.settings.policy import (
    MAX_RESTARTS,
    AsyncCollectorSettings,
    ClusterSettings,
    CollectorSettings,
    DrawSettings,
    NoClusterSettings,
    PolicySettings,
    Sharding,
    TrainSamplingSettings,
)
from rlpost.settings.training import (
    DPO_RATES,
    GRPO_RATES,
    RATES_OF_DEMONSTRATIONS,
    RATES_OF_REWARDS,
    SFT_RATES,
    DiagnosisSettings,
    GateSettings,
    OptimSettings,
    RatesBySize,
    ReportSettings,
    TrackingSettings,
    UsualRates,
)

LONG_PRODUCT = 64  # tokens beyond which a product of their ratios is questioned


def samples_per_prompt(k: Sequence[int], samples: int | None) -> int:
    """Completions per prompt: `samples`, or the largest of `k` if it is None."""
    return max(k) if samples is None else samples


@dataclass
class AttemptsSettings(Settings, group="eval"):
    """Attempts per prompt, and the figures made of them."""

    k: list[int] = doc([1], "pass@k, avg@k and maj@k for each of these")
    samples: int | None = doc(None, "completions per prompt; null: the largest of eval.k")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.k or min(self.k) < 1:
            raise ConfigError(f"eval.k={self.k}: give numbers of attempts from 1 up, as in 'eval.k=[1,8]'")
        if self.samples is not None and self.samples < max(self.k):
            raise ConfigError(
                f"eval.samples={self.samples} is fewer than the {max(self.k)} attempts that eval.k={self.k} asks for: "
                "raise it, or leave it out"
            )


@dataclass
class HeldOutSettings(Settings, group="eval"):
    """Evaluations during training and early stopping: one half of the prompts decides, the other is reported."""

    enabled: bool = doc(True, "false: no evaluation at all")
    every: int = doc(0, "evaluate every N steps; 0: before and after training only", at_least=0)
    limit: int | None = doc(None, "held-out prompts per evaluation; null: env.eval_limit", at_least=1)
    stop_at_accuracy: float | None = doc(None, "stop when an evaluation reaches this lenient accuracy", 0.0, 1.0)
    stop_at_reward: float | None = doc(None, "stop when an evaluation reaches this mean reward")
    patience: int | None = doc(None, "stop after N evaluations in a row without a new best", at_least=1)

    @property
    def stops(self) -> list[str]:
        """The early-stopping keys that are set, as typed."""
        names = ("stop_at_accuracy", "stop_at_reward", "patience")
        return [f"eval.{name}" for name in names if getattr(self, name) is not None]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stops and not (self.enabled and self.every):
            raise ConfigError(
                f"{self.stops[0]} needs evaluations between the first step and the last: give eval.every=10, say, and "
                "leave eval.enabled=false out"
            )


@dataclass
class EvalDuringTrainingSettings(HeldOutSettings, AttemptsSettings):
    """Evaluations on held-out prompts: before the first step, after the last, and between.

    One completion a prompt is greedy; several are drawn as `sampling` says.
    """


@dataclass
class EvalSamplingSettings(DrawSettings):
    """Sampling in `rlpost eval`."""

    temperature: float | None = doc(None, "0: greedy; null: 0 for one completion, 1 for several", at_least=0.0)


@dataclass
class EvalSettings(Settings):
    """`rlpost eval`: scores of sampled replies, or the loss of demonstrated ones where the rows have no reward."""

    elsewhere: ClassVar[str] = ""
    trains: ClassVar[bool] = False
    learns_from_own: ClassVar[bool] = False
    learns_from_pairs: ClassVar[bool] = False

    model: ModelSettings = doc(MISSING, "the model to evaluate")
    env: EnvSettings = doc(MISSING, "the environment: prompts and rewards")
    tools: ToolsSettings = doc(ToolsSettings, "tools that the model may call")
    policy: PolicySettings = doc(MISSING, "the engine that samples")
    sampling: EvalSamplingSettings = doc(EvalSamplingSettings, "how completions are sampled")
    eval: AttemptsSettings = doc(AttemptsSettings, "attempts per prompt and the figures made of them")
    plugin: list[str] = doc([], "Python files that register environments, rewards or tools", runs=CODE)
    seed: int = doc(0, "random seed for sampling; env.seed orders the prompts", at_least=0)
    max_tokens: int = doc(1024, "most tokens of a demonstration whose loss is measured", at_least=2)

    @property
    def sampler(self) -> PolicySettings | None:
        """The engine that samples; None: nothing does."""
        return self.policy if self.env.scores else None

    @property
    def completions_at_once(self) -> tuple[int, str]:
        """The most completions that are sampled together, and which these are."""
        return 10**9, "an evaluation's completions"

    def check(self) -> None:
        """See `Settings.check`."""
        super().check()
        check_tools(self.env, self.tools)
        count = samples_per_prompt(self.eval.k, self.eval.samples)
        if count > 1 and self.sampling.temperature == 0:
            raise ConfigError(
                f"sampling.temperature=0 gives the same completion {count} times, and that says no more than one "
                "sample a prompt: raise it, or leave it out"
            )


@dataclass
class CheckpointSettings(Settings, group="checkpoint"):
    """When to save checkpoints; the last step is always saved."""

    every: int = doc(30, "save every N steps; 0: not by steps", at_least=0)
    every_minutes: float = doc(5.0, "save at least every N minutes; 0: not by time", at_least=0.0)
    keep_last: int = doc(2, "checkpoints to keep; only the newest keeps optimizer and state", at_least=1)


@dataclass
class TrainingSettings(Settings):
    """Settings of every training."""

    usual_rates: ClassVar[UsualRates] = SFT_RATES
    rates_by_size: ClassVar[RatesBySize] = RATES_OF_DEMONSTRATIONS
    trains: ClassVar[bool] = True
    learns_from_own: ClassVar[bool] = False  # whether it trains on completions of its own policy
    learns_from_pairs: ClassVar[bool] = False  # whether it trains on pairs of a chosen and a rejected reply
    learns_from_rewards: ClassVar[bool] = False  # whether rewards decide what is learned
    waits_for: ClassVar[str]  # while it loads, as the screen says it
    ends_by: ClassVar[str] = "steps"  # the keys that say how long it trains

    model: ModelSettings = doc(MISSING, "the model to train")
    env: EnvSettings = doc(MISSING, "the environment: prompts and rewards")
    policy: PolicySettings = doc(MISSING, "the engine that samples")
    lora: LoRASettings = doc(LoRASettings, "an adapter to train instead of all weights")
    loss: LossSettings = doc(MISSING, "the loss")
    optim: OptimSettings = doc(MISSING, "the optimizer")
    cluster: ClusterSettings = doc(MISSING, "the machines that train and sample")
    tracking: TrackingSettings = doc(MISSING, "the tracker that gets the figures besides metrics.jsonl")
    checkpoint: CheckpointSettings = doc(CheckpointSettings, "when to save a checkpoint")
    diagnosis: DiagnosisSettings = doc(DiagnosisSettings, "what to do when a run shows symptoms")
    report: ReportSettings = doc(ReportSettings, "the HTML page about the finished run")
    plugin: list[str] = doc(
        [],
        "Python files that register environments, rewards, tools, losses, advantage estimators, algorithms or watchers",
        runs=CODE,
    )
    seed: int = doc(0, "random seed for prompt order, sampling and dropout", at_least=0)
    tokens_per_microbatch: int | None = doc(
        None, "most tokens per forward and backward; null: 384 to 2048 on a CPU, up to 32768 on a GPU", at_least=1
    )
    deterministic: bool = doc(False, "bitwise equal runs; needs policy=transformers")

    @property
    def microbatch_tokens(self) -> int | None:
        """Most tokens in one forward and backward; None: chosen for the device."""
        return self.tokens_per_microbatch

    @property
    def sampler(self) -> PolicySettings | None:
        """The engine that samples; None: nothing does."""
        return self.policy

    @property
    def elsewhere(self) -> str:
        """The setting by which other processes than the training's sample, as typed; empty where none do."""
        return ""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the log-probs of the starting model."""
        return self.loss.needs_reference

    def doubts(self) -> list[str]:
        """Questions about settings that may be a mistake, such as an unusual learning rate."""
        question = self.usual_rates.question(self.optim.rate, adapter=self.lora.enabled)
        return [] if question is None else [question]

    @property
    def moves_reference(self) -> bool:
        """Whether the reference changes during the run."""
        return False

    @property
    def reference_path(self) -> str | None:
        """The model that the loss compares with, as a value of `model.path`; None: the starting model."""
        return None

    @property
    def reference_hint(self) -> str | None:
        """A text with fields of the task: the trained model itself is the reference, and reads it in its prompt."""
        return None

    def check(self) -> None:
        """See `Settings.check`."""
        super().check()
        is_divided = self.cluster.sharding is Sharding.full
        if self.model.dtype is DType.float16:
            raise ConfigError(
                "model.dtype=float16 cannot be trained: small gradients and AdamW's eps are 0 in it; take bfloat16, or "
                "float32"
            )
        if is_divided and self.optim.eight_bit:
            raise ConfigError("optim=adamw_8bit cannot divide its state among ranks: take optim=adamw")
        if is_divided and self.lora.use_dora:
            raise ConfigError("lora.use_dora=true reads whole rows, which cluster.sharding=full divides: leave one out")
        if self.deterministic and self.sampler is not None and not self.sampler.shares_weights:
            raise ConfigError(
                "deterministic=true promises bitwise equal runs, which vLLM cannot keep: add policy=transformers"
            )

    def _check_split(self, measured: bool) -> None:
        """Raise ConfigError for training on the split that evaluations use."""
        if self.env.split == "test" and measured:
            raise ConfigError(
                "env.split=test would train on what is held out to measure it: leave it out, or add eval.enabled=false"
            )


@dataclass
class SampledSettings(TrainingSettings):
    """Settings of trainings on groups of completions of their own policy."""

    # the keys that a resumed run cannot change
    must_stay: ClassVar[tuple[str, ...]] = ("seed", "prompts_per_step", "group_size")
    rates_by_size: ClassVar[RatesBySize] = RATES_OF_REWARDS
    learns_from_own: ClassVar[bool] = True
    learns_from_rewards: ClassVar[bool] = True
    smallest_group: ClassVar[int] = 2  # completions per prompt that it needs at least
    waits_for: ClassVar[str] = "loading the model, starting the policy"
    leaves_out: ClassVar[str] = "max_policy_lag"  # the keys that can leave no token to train on

    collector: CollectorSettings = doc(MISSING, "sample in turn with training (sync) or beside it (async)")
    tools: ToolsSettings = doc(ToolsSettings, "tools that the model may call")
    sampling: TrainSamplingSettings = doc(TrainSamplingSettings, "how completions are sampled")
    gate: GateSettings = doc(GateSettings, "checks that sampler and trainer compute the same")
    eval: EvalDuringTrainingSettings = doc(EvalDuringTrainingSettings, "evaluations on held-out prompts")
    prompts_per_step: int = doc(8, "prompts per step; each gets group_size completions", at_least=1)
    group_size: int = doc(8, "completions per prompt, G in the paper")
    minibatch_size: int | None = doc(None, "completions per optimizer step; null: all of a step's", at_least=1)
    passes: int = doc(1, "how often each step's completions are trained on", at_least=1)
    max_policy_lag: int | None = doc(
        None, "how many weight updates old a trained completion may be; null: 0, with collector=async 1", at_least=0
    )
    max_failed_share: float = doc(0.5, "the run stops when more than this share of a step's rewards fail", 0.0, 1.0)
    steps: int = doc(60, "training steps: sample, reward, update, push the weights", at_least=1)

    def lengths(self, prompt_tokens: int) -> tuple[int, int, int]:
        """(tokens of the longest row, rows of a step, tokens of the largest group of rows that share a prompt).

        A prompt is taken to have at most `prompt_tokens`.
        """
        longest = self.env.longest_conversation(prompt_tokens)
        sampled = longest - min(self.env.max_prompt_tokens, prompt_tokens)
        return longest, self.prompts_per_step * self.group_size, longest + (self.group_size - 1) * sampled

    @property
    def completions_at_once(self) -> tuple[int, str]:
        """The most completions that are sampled together, and which these are."""
        of_step = self.prompts_per_step * self.group_size
        prompts = (self.eval.limit or self.env.eval_limit) if self.eval.enabled else 0
        evaluated = prompts * samples_per_prompt(self.eval.k, self.eval.samples)
        if of_step >= evaluated:
            return of_step, f"{of_step} completions a step"
        return evaluated, f"{evaluated} completions an evaluation"

    @property
    def lag(self) -> int:
        """`max_policy_lag`, or its default."""
        return self.collector.usual_lag if self.max_policy_lag is None else self.max_policy_lag

    @property
    def elsewhere(self) -> str:
        """See `TrainingSettings.elsewhere`."""
        return self.cluster.elsewhere or self.collector.elsewhere

    def check(self) -> None:
        """See `Settings.check`."""
        super().check()
        self._check_collector()
        if self.group_size < self.smallest_group:
            nothing = "leaves nothing to compare a completion with" if self.smallest_group > 1 else "samples nothing"
            raise ConfigError(f"group_size={self.group_size} {nothing}: it must be at least {self.smallest_group}")
        check_tools(self.env, self.tools)
        if self.sampling.temperature == 0:
            raise ConfigError(
                "sampling.temperature=0 gives every prompt group_size equal completions: training needs it above 0"
            )
        self._check_split(self.eval.enabled)

    def _check_minibatch(self) -> None:
        """Raise ConfigError unless the minibatches of a step are of whole groups and of equal size."""
        completions = self.prompts_per_step * self.group_size
        if self.minibatch_size is not None and (
            self.minibatch_size % self.group_size or completions % self.minibatch_size
        ):
            raise ConfigError(
                f"minibatch_size={self.minibatch_size} does not fit: it must be a multiple of "
                f"group_size={self.group_size} and divide prompts_per_step x group_size = {completions}"
            )

    def _check_filters(self) -> None:
        """Raise ConfigError for sampling from a part of the distribution, where the loss reads probabilities of it."""
        if filters := self.sampling.filters:
            key, value = next(iter(filters.items()))
            raise ConfigError(
                f"sampling.{key}={value:g} draws from a part of the distribution, and the gradient is that of the "
                "whole: tokens would be weighed by probabilities they were not drawn with; leave it out, or lower "
                "sampling.temperature (rlpost eval, rlpost chat and train expert-iteration take it)"
            )

    def _check_collector(self) -> None:
        if self.elsewhere and self.deterministic:
            raise ConfigError(
                f"deterministic=true promises bitwise equal runs, and with {self.elsewhere} groups come in the order "
                "in which they happen to end: leave one out"
            )
        if not isinstance(self.collector, AsyncCollectorSettings):
            return
        own = self.collector.gpus or self.collector.players > 1 or self.collector.max_restarts != MAX_RESTARTS
        if self.cluster.elsewhere and own:
            raise ConfigError(
                "collector.gpus, collector.players and collector.max_restarts are of one machine's samplers: with "
                "cluster=ray they are cluster.gpus_per_worker, cluster.rollout_workers and cluster.max_restarts"
            )


@dataclass
class GRPOSettings(SampledSettings):
    """`rlpost train grpo`."""

    usual_rates: ClassVar[UsualRates] = GRPO_RATES
    leaves_out: ClassVar = "loss.clip_low, loss.clip_high, overlong.mask and max_policy_lag"

    advantage: AdvantageSettings = doc(AdvantageSettings, "how rewards become advantages")
    dynamic: DynamicSamplingSettings = doc(DynamicSamplingSettings, "drops groups that cannot teach and draws more")
    difficulty: DifficultySettings = doc(DifficultySettings, "draws prompts by how their last groups did")
    overlong: OverlongSettings = doc(OverlongSettings, "completions near or at the token limit")
    loss: PolicyLossSettings = MISSING  # pyright: ignore[reportIncompatibleVariableOverride]

    def check(self) -> None:
        """See `Settings.check`."""
        super().check()
        self._check_minibatch()
        self._check_advantage()
        self.loss.corrected(stale=self.lag > 0)  # raises for bounds of a correction that is off
        self._check_filters()

    @property
    def moves_reference(self) -> bool:
        """See `TrainingSettings.moves_reference`."""
        return self.loss.ref_sync_every > 0

    def doubts(self) -> list[str]:
        """See `TrainingSettings.doubts`."""
        correction, longest = self.loss.corrected(stale=self.lag > 0).sampler_correction, self.env.longest_sampled
        products = (SamplerCorrection.tis_sequence, SamplerCorrection.mis_sequence)
        if correction not in products or longest <= LONG_PRODUCT:
            return super().doubts()
        return [
            *super().doubts(),
            f"loss.sampler_correction={correction.name} multiplies the pi_old / mu of up to {longest} tokens, and that "
            "product says more about the length of a completion than about the sampler; geo_mask takes their geometric "
            "mean",
        ]

    def _check_advantage(self) -> None:
        if self.overlong.penalty_tokens > self.env.max_completion_tokens:
            raise ConfigError(
                f"overlong.penalty_tokens={self.overlong.penalty_tokens} is more than a completion can have: it must "
                f"be at most env.max_completion_tokens={self.env.max_completion_tokens}"
            )
        if self.difficulty.enabled and self.env.repeats_with_limit and self.env.limit is None:
            raise ConfigError(
                "difficulty.enabled=true weighs a prompt by its last group, and here every prompt is new: add "
                "env.limit=200, say, so that prompts come again"
            )
        loss, estimator = self.loss, self.advantage.estimator
        in_reward = loss.reward_kl_coef
        if in_reward and estimator == "gdpo":
            raise ConfigError(
                "advantage.estimator=gdpo compares each part of a reward, and a KL penalty is none of them: leave "
                "loss.kl_in=reward out"
            )
        is_divided = self.cluster.sharding is Sharding.full
        if loss.ref_sync_every and (self.lora.enabled or is_divided):
            without = "lora.enabled=true" if self.lora.enabled else "cluster.sharding=full"
            raise ConfigError(
                f"loss.ref_sync_every needs a whole reference model, and {without} has none: leave one out"
            )
        if in_reward and estimator == "reinforce_pp" and not loss.takes_token_advantages:
            raise ConfigError(
                "advantage.estimator=reinforce_pp with loss.kl_in=reward gives each token an advantage of its own, and "
                "this loss weighs whole completions: take loss=gspo_token"
            )


@dataclass
class RowEvalSettings(HeldOutSettings):
    """The loss on held-out rows: before the first step, after the last, and between; accuracy on request."""

    accuracy: bool = doc(False, "also sample greedy replies to held-out prompts and score them")

    def __post_init__(self) -> None:
        if self.stops and not self.accuracy:
            raise ConfigError(f"{self.stops[0]} needs replies to be scored: add eval.accuracy=true")
        super().__post_init__()


@dataclass
class FineTuningSettings(TrainingSettings):
    """Settings of trainings on rows that were there before: demonstrations, or pairs of replies."""

    waits_for: ClassVar = "reading the data, loading the model"
    ends_by: ClassVar = "steps or epochs"
    look: ClassVar[str] = "look at the rows"  # what to do where nothing is learned
    must_stay: ClassVar = ("seed", "minibatch_size")  # the keys that a resumed run cannot change

    policy: PolicySettings = doc(MISSING, "samples the replies of eval.accuracy")
    cluster: NoClusterSettings = doc(MISSING, "the machines that train")  # pyright: ignore[reportIncompatibleVariableOverride]
    eval: RowEvalSettings = doc(RowEvalSettings, "evaluations on held-out rows")
    steps: int | None = doc(None, "optimizer steps; null: as many as epochs needs", at_least=1)
    epochs: int | None = doc(None, "passes over the samples; null: 1, unless steps is set", at_least=1)
    seed: int = doc(0, "random seed for the order of the samples")
    minibatch_size: int = doc(32, "samples per optimizer step", at_least=1)
    packing: bool = doc(True, "pack several samples into a row of the forward; they do not see each other")
    max_tokens: int = doc(1024, "most tokens per sample; a row whose reply does not fit is bad", at_least=2)
    max_bad_share: float = doc(0.1, "the run stops when more than this share of the rows is bad", 0.0, 1.0)
    deterministic: bool = doc(False, "bitwise equal runs; with eval.accuracy it needs policy=transformers")

    @property
    def microbatch_tokens(self) -> int | None:
        """See `TrainingSettings.microbatch_tokens`; without packing it holds one sample."""
        return self.tokens_per_microbatch if self.packing else 1

    @property
    def sampler(self) -> PolicySettings | None:
        """See `TrainingSettings.sampler`; it samples for the accuracy alone."""
        return self.policy if self.eval.accuracy else None

    @property
    def completions_at_once(self) -> tuple[int, str]:
        """The most completions that are sampled together, and which these are."""
        evaluated = (self.eval.limit or self.env.eval_limit) if self.eval.enabled else 0
        return evaluated, f"{evaluated} completions an evaluation"

    def lengths(self, prompt_tokens: int) -> tuple[int, int, int]:
        """See `SampledSettings.lengths`; rows share no prompt."""
        return self.max_tokens, self.minibatch_size, self.max_tokens

    def check(self) -> None:
        """See `Settings.check`."""
        super().check()
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"steps={self.steps} and epochs={self.epochs} both say when training ends: take one of them out"
            )
        self._check_split(self.eval.enabled)


@dataclass
class SFTSettings(FineTuningSettings):
    """`rlpost train sft`."""

    look: ClassVar = "look at the rows with rlpost data preview"

    env: EnvSettings = doc(MISSING, "the environment whose demonstrations are learned, or your own rows")
    loss: DemonstrationLossSettings = MISSING  # pyright: ignore[reportIncompatibleVariableOverride]


@dataclass
class DPOSettings(FineTuningSettings):
    """`rlpost train dpo`."""

    usual_rates: ClassVar[UsualRates] = DPO_RATES
    rates_by_size: ClassVar[RatesBySize] = RATES_OF_REWARDS
    learns_from_pairs: ClassVar[bool] = True

    env: DatasetSettings = doc(MISSING, "your rows of pairs")  # pyright: ignore[reportIncompatibleVariableOverride]
    loss: PairLossSettings = MISSING  # pyright: ignore[reportIncompatibleVariableOverride]
    minibatch_size: int = doc(32, "pairs per optimizer step")
    max_tokens: int = doc(1024, "most tokens of a prompt with one of its replies; a longer pair is bad")

    def lengths(self, prompt_tokens: int) -> tuple[int, int, int]:
        """See `SampledSettings.lengths`; a pair's two rows are read together."""
        return self.max_tokens, 2 * self.minibatch_size, 2 * self.max_tokens


@dataclass
class ExpertIterationSettings(SampledSettings):
    """`rlpost train expert-iteration`."""

    must_stay: ClassVar = (*SampledSettings.must_stay, "topk_size")

    loss: DemonstrationLossSettings = MISSING  # pyright: ignore[reportIncompatibleVariableOverride]
    steps: int = doc(30, "training steps: sample, reward, select, train, push the weights", at_least=1)
    topk_size: int = doc(4, "most completions per prompt to train on", at_least=1)
    min_reward: float | None = doc(
        None, "select completions with at least this reward; null: above their prompt's median"
    )

    def check(self) -> None:
        """See `Settings.check`."""
        super().check()
        if self.topk_size > self.group_size:
            raise ConfigError(
                f"topk_size={self.topk_size} is more than the group_size={self.group_size} completions of a prompt: "
                "lower it, or raise group_size"
            )


@dataclass
class DistillSettings(SampledSettings):
    """`rlpost train distill`."""

    usual_rates: ClassVar[UsualRates] = SFT_RATES
    rates_by_size: ClassVar[RatesBySize] = RATES_OF_DEMONSTRATIONS
    learns_from_rewards: ClassVar = False
    smallest_group: ClassVar = 1
    must_stay: ClassVar = (*SampledSettings.must_stay, "teacher", "hint")
    leaves_out: ClassVar = "loss.drop_low and max_policy_lag"

    loss: DistillationLossSettings = MISSING  # pyright: ignore[reportIncompatibleVariableOverride]
    teacher: str | None = doc(None, "the model to learn from: folder, run, checkpoint, hub id; or give a hint")
    hint: str | None = doc(None, 'what the model as its own teacher reads besides the prompt: "It is {answer}."')
    prompts_per_step: int = doc(16, "prompts per step; each gets group_size completions")
    group_size: int = doc(4, "completions per prompt; 1 will do")
    steps: int = doc(60, "training steps: sample, compare with the teacher, update, push the weights", at_least=1)

    @property
    def reference_path(self) -> str | None:
        """See `TrainingSettings.reference_path`."""
        return self.teacher

    @property
    def reference_hint(self) -> str | None:
        """See `TrainingSettings.reference_hint`."""
        return self.hint

    def check(self) -> None:
        """See `Settings.check`."""
        super().check()
        self._check_minibatch()
        if (self.teacher is None) == (self.hint is None):
            given = "teacher and hint are two teachers" if self.teacher else "there is no teacher"
            raise ConfigError(
                f"{given}: give teacher=runs/NAME (or a folder, or a hub id), or a hint with which the model teaches "
                'itself, as hint="{question} equals {answer}."'
            )
        if self.loss.reads_sampler:
            self._check_filters()
        divided = self.cluster.sharding is Sharding.full
        if self.loss.whole_vocabulary and divided:
            raise ConfigError("cluster.sharding=full divides the head that loss=jsd compares: take loss=opd")


@dataclass(frozen=True)
class RunRequest:
    """A run as the command line requested it.

    `resume` is None (a new run), "auto" (go on where there is a checkpoint, else begin), "latest"
    (go on from the newest checkpoint) or the path of a checkpoint or run folder. `overrides` are
    the recipe's and the user's settings as `key=value` words that compose to the same settings
    again; `command` has the typed words, `config_yaml` the composed configuration. `plain` asks for one
    line a step where there would be a live picture. `kept` are values by key of the run that is resumed or done again:
    see `rlpost.train.resolve`. A run may end, as after a signal, with the step `stops_after`.
    """

    folder: Path
    resume: str | None
    overrides: list[str]
    command: list[str]
    config_yaml: str
    plain: bool = False
    kept: Mapping[str, Any] | None = None
    stops_after: int | None = None
