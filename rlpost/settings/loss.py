"""The losses, each a settings class with a row in rlpost/catalog.py; advantage estimators; which completions count.

To add a loss on sampled completions: a function in rlpost/objectives/variants.py, here a class, described by its first
line, and a row. A class that adds no field of its own needs no @dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Self

from rlpost.errors import ConfigError
from rlpost.settings.base import Choice, Settings, doc


class Aggregation(Enum):
    """How a loss averages over the tokens of a minibatch: the sum is divided as listed."""

    token_mean = "token_mean"  # by the number of tokens: each token weighs the same
    sequence_mean = "sequence_mean"  # by length per completion, then by completions: each completion weighs the same
    constant_length = "constant_length"  # by completions x env.max_completion_tokens, whatever their lengths


class KLEstimator(Enum):
    """Estimators of the KL divergence from one sampled token; d is the difference of its log-probs."""

    k1 = "k1"  # d
    k2 = "k2"  # d² / 2
    k3 = "k3"  # exp(-d) - 1 + d
    k3_k2grad = "k3_k2grad"  # k3's value with the gradient of k2, the divergence's true gradient
    k3_rho = "k3_rho"  # k3 times the policy ratio: the true gradient after several updates too


class KLPlace(Enum):
    """The place of the KL penalty to the reference."""

    loss = "loss"  # a term of the loss
    reward = "reward"  # subtracted from the reward; reaches the loss through the advantage


class SamplerCorrection(Enum):
    """Importance-sampling corrections for sampler and trainer differing; w = π_old / µ."""

    none = "none"  # no correction; the gap is still measured
    tis_token = "tis_token"  # weight each token by w, truncated
    tis_sequence = "tis_sequence"  # weight each completion by the product of its w, truncated
    mis_token = "mis_token"  # as tis_token, but tokens out of bounds weigh 0
    mis_sequence = "mis_sequence"  # as tis_sequence, but completions out of bounds weigh 0
    icepop = "icepop"  # mis_token with the bounds of IcePop
    geo_mask = "geo_mask"  # completions whose geometric mean of w is out of bounds weigh 0, all others 1
    geo_mask_tis = "geo_mask_tis"  # as geo_mask, and tokens of the others weigh w, truncated at 2


class RatioTo(Enum):
    """The policy that the ratio of a loss compares with."""

    old = "old"  # the trainer's model before the step's first update
    sampler = "sampler"  # the engine as it sampled: one ratio for stale weights and the engine's own differences


@dataclass
class LossSettings(Settings, group="loss"):
    """Base of all loss settings."""

    compares: ClassVar[bool] = False  # whether it always reads the log-probs of a reference

    @property
    def needs_reference(self) -> bool:
        """Whether it reads the log-probs of the starting model, or of a teacher."""
        return self.compares or getattr(self, "kl_coef", 0.0) > 0


@dataclass
class PolicyLossSettings(LossSettings):
    """Settings of every policy-gradient loss. Keys that a derived class adds are its function's coefficients."""

    usual_aggregation: ClassVar[Aggregation] = Aggregation.token_mean  # how its paper averages
    takes_token_advantages: ClassVar[bool] = True  # whether the tokens of a completion may differ in advantage

    aggregation: Aggregation | None = doc(None, "how the loss averages over tokens; null: as in the variant's paper")
    kl_coef: float = doc(0.0, "weight of the KL penalty (beta); 0 loads no reference model", at_least=0.0)
    kl_estimator: KLEstimator = doc(KLEstimator.k3_k2grad, "how the KL penalties are estimated")
    kl_in: KLPlace = doc(KLPlace.loss, "where the KL penalty counts: in the loss or in the reward")
    sampler_kl_coef: float = doc(0.0, "weight of the KL penalty to the sampler, always in the loss", at_least=0.0)
    ref_sync_every: int = doc(0, "steps between two moves of the reference to the model; 0: it stays", at_least=0)
    ref_sync_share: float = doc(0.6, "share of the model in a moved reference", above=0.0, at_most=1.0)
    entropy_coef: float = doc(0.0, "weight of the entropy bonus", at_least=0.0)
    entropy_target: float | None = doc(None, "adapt entropy_coef to keep the entropy above this (nats)", above=0.0)
    entropy_step: float = doc(0.005, "by how much a step changes an adapted entropy_coef", above=0.0)
    right_nll_coef: float = doc(0.0, "weight of the cross entropy of right completions", at_least=0.0)
    ratio_to: RatioTo = doc(RatioTo.old, "the policy that the ratio compares with")
    off_policy_mask: float | None = doc(
        None,
        "drop a bad completion whose mean log-prob fell by more than this since it was sampled; null: none",
        above=0.0,
    )
    sampler_correction: SamplerCorrection | None = doc(
        None, "weights pi_old / mu; null: tis_token if max_policy_lag > 0"
    )
    sampler_ratio_low: float | None = doc(
        None, "mask pi_old / mu below this; null: 0, icepop 0.5, geo_mask 0.99", 0.0, 1.0
    )
    sampler_ratio_high: float | None = doc(
        None, "truncate (tis, default 2) or mask (mis 3, icepop 5, geo_mask 1.01) above this pi_old / mu", at_least=1.0
    )

    @property
    def reward_kl_coef(self) -> float:
        """`kl_coef` where the KL to the reference lowers the reward, else 0."""
        return self.kl_coef if self.kl_in is KLPlace.reward else 0.0

    def corrected(self, *, stale: bool) -> Self:
        """These settings with `sampler_correction` filled in: on if completions can be `stale`.

        Raises ConfigError for bounds of a correction that is off.
        """
        corrects = stale and self.ratio_to is RatioTo.old
        usual = SamplerCorrection.tis_token if corrects else SamplerCorrection.none
        return replace(self, sampler_correction=self.sampler_correction or usual)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_in is KLPlace.reward and not self.kl_coef:
            raise ConfigError(
                "loss.kl_in=reward takes nothing from the reward while loss.kl_coef=0: add loss.kl_coef=0.01"
            )
        if self.ref_sync_every and not self.needs_reference:
            raise ConfigError(
                f"loss.ref_sync_every={self.ref_sync_every} moves a reference that nothing reads while loss.kl_coef=0: "
                "add loss.kl_coef=0.01"
            )
        self._check_sampler_ratio()

    def _check_sampler_ratio(self) -> None:
        correction = self.sampler_correction
        if self.ratio_to is RatioTo.sampler and correction not in (None, SamplerCorrection.none):
            raise ConfigError(
                f"loss.ratio_to=sampler corrects for the sampler in the ratio, and so would loss.sampler_correction="
                f"{correction.name}: leave one out"
            )
        low, high = self.sampler_ratio_low, self.sampler_ratio_high
        if self.sampler_correction is None:  # resolved where max_policy_lag is known
            return
        for key, bound in (("loss.sampler_ratio_low", low), ("loss.sampler_ratio_high", high)):
            if bound is not None and self.sampler_correction is SamplerCorrection.none:
                raise ConfigError(
                    f"{key}={bound} bounds nothing while loss.sampler_correction=none: choose a correction, "
                    "loss.sampler_correction=tis_token say"
                )


@dataclass
class ClippedLossSettings(PolicyLossSettings):
    """Losses that clip the policy ratio on both sides."""

    clip_low: float = doc(0.2, "lower clip bound of the policy ratio: 1 - clip_low", above=0.0, at_most=1.0)
    clip_high: float = doc(0.2, "upper clip bound of the policy ratio: 1 + clip_high", above=0.0)


class GRPOLossSettings(ClippedLossSettings):
    """GRPO: a clipped ratio a token and an optional KL penalty, averaged over all tokens.

    arXiv:2402.03300, eq. 3. The paper averages each completion first.
    """


class DrGRPOLossSettings(ClippedLossSettings):
    """Dr. GRPO: GRPO's loss over a constant length, so that long answers weigh no less a token.

    arXiv:2503.20783.
    """

    usual_aggregation: ClassVar = Aggregation.constant_length


@dataclass
class DAPOLossSettings(ClippedLossSettings):
    """DAPO: GRPO's loss with a higher upper clip, averaged over all tokens.

    arXiv:2503.14476.
    """

    clip_high: float = doc(0.28, "upper clip bound of the policy ratio: 1 + clip_high")


@dataclass
class GSPOLossSettings(ClippedLossSettings):
    """GSPO: one clipped ratio a completion instead of one a token.

    arXiv:2507.18071. The ratio is the geometric mean over the tokens of a completion.
    """

    usual_aggregation: ClassVar = Aggregation.sequence_mean
    takes_token_advantages: ClassVar = False

    clip_low: float = doc(3e-4, "lower clip bound of a completion's ratio to the old policy: 1 - clip_low")
    clip_high: float = doc(4e-4, "upper clip bound of a completion's ratio to the old policy: 1 + clip_high")


class GSPOTokenLossSettings(GSPOLossSettings):
    """GSPO-token: GSPO's ratio with advantages that may differ from token to token.

    arXiv:2507.18071.
    """

    takes_token_advantages: ClassVar = True


@dataclass
class CISPOLossSettings(ClippedLossSettings):
    """CISPO: every token keeps its gradient, weighted by a ratio that is bounded above.

    arXiv:2506.13585: the ratio carries no gradient. As in the paper the bounds are 1 ± ε; some implementations give the
    largest weight itself, so that their 5 is clip_high=4 here. The paper trains without a lower bound, clip_low=1.
    """

    clip_low: float = doc(1.0, "lower bound of a token weight, the ratio to the old policy: 1 - clip_low")
    clip_high: float = doc(4.0, "upper bound of a token weight, the ratio to the old policy: 1 + clip_high")


@dataclass
class TwoSidedLossSettings(ClippedLossSettings):
    """INTELLECT-2: GRPO's loss with the ratio bounded for negative advantages too.

    arXiv:2505.07291, whose delta is max_ratio.
    """

    max_ratio: float = doc(4.0, "upper bound of the ratio to the old policy for negative advantages")


@dataclass
class DualClipLossSettings(TwoSidedLossSettings):
    """Dual-clip PPO: GRPO's loss, bounded where the advantage is negative.

    arXiv:1912.09729, whose c is max_ratio.
    """

    max_ratio: float = doc(3.0, "dual clip: a negative advantage costs at most this times its size")


class ReinforceLossSettings(PolicyLossSettings):
    """REINFORCE: the plain policy gradient, without a ratio or a clip.

    Log-probs weighted by their advantage.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio_to is RatioTo.sampler:
            raise ConfigError(
                "loss=reinforce has no ratio for loss.ratio_to=sampler: correct for the sampler with "
                "loss.sampler_correction=tis_token"
            )


@dataclass
class SAPOLossSettings(PolicyLossSettings):
    """SAPO: a sigmoid of the ratio in place of a clip.

    arXiv:2511.20347. The sigmoid is steeper for negative advantages.
    """

    usual_aggregation: ClassVar = Aggregation.sequence_mean

    tau_good: float = doc(1.0, "steepness of the sigmoid where the advantage is positive", above=0.0)
    tau_bad: float = doc(1.05, "steepness of the sigmoid where the advantage is negative", above=0.0)


@dataclass
class GMPOLossSettings(ClippedLossSettings):
    """GMPO: the geometric mean of a completion's ratios, each clipped.

    arXiv:2507.20673.
    """

    usual_aggregation: ClassVar = Aggregation.sequence_mean
    takes_token_advantages: ClassVar = False

    clip_low: float = doc(0.4, "lower clip bound of a token's log ratio: -clip_low", above=0.0)
    clip_high: float = doc(0.4, "upper clip bound of a token's log ratio")


@dataclass
class DPPOLossSettings(PolicyLossSettings):
    """DPPO (arXiv:2602.04879): tokens whose probability has moved too far are dropped, whatever their ratio."""

    max_ratio: float = doc(20.0, "upper bound of the ratio that weighs a token", at_least=1.0)
    ratio_to: RatioTo = doc(RatioTo.sampler, "the policy that the ratio and the probabilities compare with")
    sampler_kl_coef: float = doc(2e-3, "weight of the KL penalty to the sampler, always in the loss")


@dataclass
class DPPOTVLossSettings(DPPOLossSettings):
    """DPPO: tokens are dropped by the change of their probability, so rare ones are not clipped.

    arXiv:2602.04879: the bound is on the difference of probabilities, their total variation.
    """

    max_fall: float = doc(0.2, "drop a bad token whose probability fell by more than this", above=0.0, at_most=1.0)
    max_rise: float = doc(0.2, "drop a good token whose probability rose by more than this", above=0.0, at_most=1.0)


@dataclass
class DPPOKLLossSettings(DPPOLossSettings):
    """DPPO: tokens are dropped by the divergence of their probability, not by their ratio.

    arXiv:2602.04879: the bound is on the KL divergence between sampling the token and not.
    """

    max_kl: float = doc(0.05, "drop a token that moves away and has more than this divergence (nats)", above=0.0)


class SFTAggregation(Enum):
    """How a loss averages over the trained tokens of a minibatch: the sum is divided as listed."""

    token_mean = "token_mean"  # by the number of tokens: each token weighs the same
    sequence_mean = "sequence_mean"  # by length per sample, then by samples: each sample weighs the same


class DemonstrationLossSettings(LossSettings):
    """Base of the losses on demonstrations."""


@dataclass
class SFTLossSettings(DemonstrationLossSettings):
    """Cross entropy of demonstrated replies, with an optional KL penalty.

    The penalty is the KL divergence to the starting model.
    """

    aggregation: SFTAggregation = doc(SFTAggregation.token_mean, "how the loss averages over tokens")
    kl_coef: float = doc(0.0, "weight of the KL penalty (k3) to the starting model; 0: not loaded", at_least=0.0)


@dataclass
class MinorSFTLossSettings(DemonstrationLossSettings):
    """Demonstrated replies, weighing less the further the model has left its reference (arXiv:2408.10642)."""

    compares: ClassVar = True

    beta: float = doc(0.1, "how fast a sample's weight falls with its distance to the reference model", above=0.0)


@dataclass
class PairLossSettings(LossSettings):
    """Base of the losses on pairs of replies; all compare with the starting model."""

    compares: ClassVar = True

    beta: float = doc(0.1, "how much an implicit reward counts; higher stays closer to the start", above=0.0)
    sft_coef: float = doc(0.0, "weight of the likelihood of the chosen reply (RPO, arXiv:2404.19733)", at_least=0.0)


class DistillationLossSettings(LossSettings):
    """Base of the losses that bring a model nearer to its teacher."""

    compares: ClassVar = True  # with the teacher
    reads_sampler: ClassVar[bool] = False  # whether tokens are weighed by the probabilities they were drawn with
    whole_vocabulary: ClassVar[bool] = False  # whether every token of the vocabulary is compared, not only the sampled


@dataclass
class DPOLossSettings(PairLossSettings):
    """DPO: the chosen of two replies becomes likelier than the rejected one, compared with the starting model.

    arXiv:2305.18290, eq. 7: the log-odds that the chosen reply is better, by log-ratios to the start.
    """

    label_smoothing: float = doc(0.0, "assumed share of pairs the wrong way round (conservative DPO)", 0.0, 0.5)


@dataclass
class DPONormLossSettings(DPOLossSettings):
    """DPO with log-ratios a token, so that the length of a reply does not count.

    arXiv:2411.15124: each log-ratio is divided by its reply's length.
    """

    beta: float = doc(5.0, "as DPO's, for log-ratios a token")


class IPOLossSettings(PairLossSettings):
    """IPO: a squared distance, which stops where the two replies are far enough apart.

    arXiv:2310.12036, eq. 17: a square that holds the difference of log-ratios at 1 / (2 beta).
    """


@dataclass
class OPDLossSettings(DistillationLossSettings):
    """On-policy distillation: each sampled token's advantage is the teacher's log-prob minus the model's.

    A token weighs pi / mu; one that has moved too far from its sampler, and away from it, is dropped. After prime-rl,
    which bounds the lower side alone.
    """

    reads_sampler: ClassVar = True

    drop_low: float | None = doc(0.2, "drop a discouraged token whose pi - mu is below minus this", above=0.0)
    drop_high: float | None = doc(None, "drop an encouraged token whose pi - mu is above this", above=0.0)
    log_ratio_coef: float = doc(1e-3, "weight of (log pi - log mu)^2, on every token", at_least=0.0)


@dataclass
class JSDLossSettings(DistillationLossSettings):
    """Distillation over the whole vocabulary: reverse KL to the teacher, forward KL, or between (loss.beta).

    Generalised Jensen-Shannon divergence at each sampled token (GKD, arXiv:2306.13649).
    """

    whole_vocabulary: ClassVar = True

    beta: float = doc(1.0, "1: KL(student || teacher); 0: KL(teacher || student); between: a mixture", 0.0, 1.0)


_COMPARED_WITH = {  # advantage.estimator -> what it makes of a reward; std is a standard deviation
    "grpo": "minus its group's mean, divided by its group's std",
    "dr_grpo": "minus its group's mean",
    "rloo": "minus the mean of the others in its group",
    "rloo_batch": "minus the mean of the others in the batch",
    "maxrl": "minus its group's mean, divided by that mean",
    "gdpo": "each part of the reward compared within its group, their weighted sum over the batch",
    "reinforce_pp": "minus the batch's mean, divided by the batch's std; with a KL penalty, per token",
    "reinforce_pp_baseline": "minus its group's mean, divided by the batch's std of that",
    "lite_ppo": "minus its group's mean, divided by the std of the batch's rewards",
}
# advantage.estimator -> its row, with its function
ESTIMATORS: dict[str, Choice] = {
    name: Choice(None, words, f"objectives.advantage:{name}") for name, words in _COMPARED_WITH.items()
}


@dataclass
class AdvantageSettings(Settings, group="advantage"):
    """Advantages from the rewards of a group.

    `shuffle_rewards` permutes the rewards within each group before the advantage is taken. It is
    the control experiment: accuracy that still rises, over several seeds, was not learned from the reward.
    """

    estimator: str = doc("grpo", "the baseline that rewards are compared with", names=ESTIMATORS)
    shuffle_rewards: bool = doc(False, "permute rewards within each group, as a control that must not learn")


@dataclass
class DynamicSamplingSettings(Settings, group="dynamic"):
    """DAPO's dynamic sampling (arXiv:2503.14476): groups with equal rewards are redrawn.

    Each step then trains on prompts_per_step groups that differ; `groups/drawn` and `groups/dropped`
    say what that took, and `reward/mean_drawn` is the task's mean before anything was dropped.
    """

    enabled: bool = doc(False, "drop groups with equal rewards and draw more")
    draw_limit: int = doc(32, "rounds of prompts_per_step prompts per step; then the run stops", at_least=1)


@dataclass
class DifficultySettings(Settings, group="difficulty"):
    """Prompts by measured difficulty: one that is solved half of the time is drawn most often.

    m is the mean of a prompt's last group. Its weight is least_weight + (1 - least_weight) 4m(1 - m), and 1 as long as
    it is new. `difficulty/new`, `hard`, `middle` and `easy` are the shares of a step's draws.
    """

    enabled: bool = doc(False, "weigh prompts by their last group's mean accuracy, or reward where none is measured")
    least_weight: float = doc(0.2, "of a prompt that is always or never solved", above=0.0, at_most=1.0)


@dataclass
class OverlongSettings(Settings, group="overlong"):
    """Handling of completions near or at env.max_completion_tokens (DAPO, arXiv:2503.14476)."""

    mask: bool = doc(False, "do not train on truncated completions; their rewards still count in the baseline")
    length_penalty: float = doc(
        0.0,
        "share of its group's mean reward that the longest completion loses, others by their length; 0: none",
        at_least=0.0,
    )
    penalty_tokens: int = doc(0, "penalty rising to 1 over the last N tokens before the limit; 0: none", at_least=0)
