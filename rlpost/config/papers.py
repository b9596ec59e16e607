"""What the papers used, for the keys that correspond to one of their numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A publication, by its short name and arXiv number."""

    name: str
    arxiv: str


@dataclass(frozen=True)
class PaperValue:
    """The value a paper gives a key; `where` is the place in it, with a remark where the units need one."""

    value: str
    paper: Paper
    where: str


ADAM = Paper("Adam", "1412.6980")
PPO = Paper("PPO", "1707.06347")
GRPO = Paper("DeepSeekMath (GRPO)", "2402.03300")
DAPO = Paper("DAPO", "2503.14476")
DR_GRPO = Paper("Dr. GRPO", "2503.20783")
RLOO = Paper("RLOO", "2402.14740")
REINFORCE_PP = Paper("REINFORCE++", "2501.03262")
LITE_PPO = Paper("Lite PPO", "2508.08221")
DEEPSEEK_R1 = Paper("DeepSeek-R1", "2501.12948")
GSPO = Paper("GSPO", "2507.18071")
CISPO = Paper("MiniMax-M1 (CISPO)", "2506.13585")
INTELLECT_2 = Paper("INTELLECT-2", "2505.07291")
DUAL_CLIP = Paper("dual-clip PPO", "1912.09729")

GRPO_TRAINING = "section 4.2"
DAPO_TRAINING = "section 4.1"

PAPER_VALUES: dict[str, tuple[PaperValue, ...]] = {
    "group_size": (PaperValue("64", GRPO, GRPO_TRAINING), PaperValue("16", DAPO, DAPO_TRAINING)),
    "prompts_per_step": (PaperValue("512", DAPO, DAPO_TRAINING),),
    "minibatch_size": (
        PaperValue("null", GRPO, f"{GRPO_TRAINING}: one update for each exploration"),
        PaperValue("512", DAPO, f"{DAPO_TRAINING}: 16 updates for each exploration"),
    ),
    "passes": (PaperValue("1", GRPO, f"{GRPO_TRAINING}: one update for each exploration"),),
    "env.max_completion_tokens": (
        PaperValue("1024", GRPO, GRPO_TRAINING),
        PaperValue("20480", DAPO, f"{DAPO_TRAINING}: 16384 expected, 4096 more with a penalty"),
    ),
    "advantage.estimator": (
        PaperValue("grpo", GRPO, "section 4.1.2"),
        PaperValue("grpo", DAPO, "section 3, eq. 9"),
        PaperValue("dr_grpo", DR_GRPO, "section 3.2"),
        PaperValue("rloo", RLOO, "section 3"),
        PaperValue("reinforce_pp", REINFORCE_PP, "the form without a critic"),
        PaperValue("lite_ppo", LITE_PPO, "group-level mean, batch-level std"),
    ),
    "dynamic.enabled": (PaperValue("true", DAPO, "section 3.2"),),
    "overlong.mask": (PaperValue("true", DAPO, "section 3.4: overlong filtering, apart from the penalty"),),
    "overlong.penalty_tokens": (PaperValue("4096", DAPO, f"{DAPO_TRAINING}: of 20480"),),
    "loss.aggregation": (
        PaperValue("sequence_mean", GRPO, "eq. 3"),
        PaperValue("token_mean", DAPO, "section 3.3"),
        PaperValue("constant_length", DR_GRPO, "section 3.2"),
        PaperValue("sequence_mean", GSPO, "its ratio is a completion's"),
        PaperValue("token_mean", CISPO, "as DAPO"),
    ),
    "loss.clip_low": (
        PaperValue("0.2", PPO, "section 6.1, table 1"),
        PaperValue("0.2", DAPO, DAPO_TRAINING),
        PaperValue("3e-4", GSPO, "of a completion's ratio"),
        PaperValue("0.2", INTELLECT_2, "two-sided clipping"),
    ),
    "loss.clip_high": (
        PaperValue("0.2", PPO, "section 6.1, table 1"),
        PaperValue("0.28", DAPO, DAPO_TRAINING),
        PaperValue("4e-4", GSPO, "of a completion's ratio"),
        PaperValue("0.2", INTELLECT_2, "two-sided clipping"),
    ),
    "loss.max_ratio": (
        PaperValue("4", INTELLECT_2, "delta of two-sided clipping"),
        PaperValue("3", DUAL_CLIP, "c of dual clip"),
    ),
    "loss.kl_estimator": (PaperValue("k3", GRPO, "eq. 4"),),
    "loss.kl_in": (PaperValue("loss", GRPO, "section 4.1.1"), PaperValue("reward", REINFORCE_PP, "token by token")),
    "loss.kl_coef": (
        PaperValue("0.04", GRPO, GRPO_TRAINING),
        PaperValue("0.001", DEEPSEEK_R1, "the training of R1-Zero"),
        PaperValue("0.001", INTELLECT_2, "of its run"),
        PaperValue("0", DAPO, "section 2.3: no KL term"),
        PaperValue("0", DR_GRPO, "no KL term"),
    ),
    "optim.lr": (PaperValue("1e-6", GRPO, GRPO_TRAINING), PaperValue("1e-6", DAPO, DAPO_TRAINING)),
    "optim.schedule": (PaperValue("constant", DAPO, DAPO_TRAINING),),
    "optim.warmup_steps": (PaperValue("320", DAPO, f"{DAPO_TRAINING}: 20 explorations of 16 updates"),),
    "optim.beta1": (PaperValue("0.9", ADAM, "algorithm 1"),),
    "optim.beta2": (PaperValue("0.999", ADAM, "algorithm 1"),),
    "optim.eps": (PaperValue("1e-8", ADAM, "algorithm 1"),),
}
