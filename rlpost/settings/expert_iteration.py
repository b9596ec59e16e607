"""Everything `rlpost train expert-iteration` can say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from rlpost.errors import ConfigError
from rlpost.settings.checks import MISSING, Settings, limited
from rlpost.settings.code import CODE
from rlpost.settings.commands import CheckpointSettings
from rlpost.settings.env import EnvSettings
from rlpost.settings.evaluation import EvalDuringTrainingSettings
from rlpost.settings.learning import OptimSettings
from rlpost.settings.lora import LoRASettings, check_push
from rlpost.settings.model import ModelSettings
from rlpost.settings.policy import PolicySettings, SamplingSettings, ScriptedSettings, TransformersSettings
from rlpost.settings.sft import DemonstrationLossSettings
from rlpost.settings.tools import ToolsSettings, check_turns
from rlpost.settings.tracking import TrackingSettings


@dataclass
class ExpertIterationSettings(Settings):
    """`rlpost train expert-iteration`."""

    must_stay: ClassVar = ("seed", "prompts_per_step", "group_size", "topk_size")  # what a run that goes on keeps

    model: ModelSettings = MISSING  # what is trained
    env: EnvSettings = MISSING  # what is asked, and how replies are scored
    tools: ToolsSettings = field(default_factory=ToolsSettings)  # what the model may call while it answers
    policy: PolicySettings = MISSING  # what samples the completions
    sampling: SamplingSettings = field(default_factory=SamplingSettings)  # how a completion is drawn
    loss: DemonstrationLossSettings = MISSING  # what turns the selected completions into a gradient
    lora: LoRASettings = field(default_factory=LoRASettings)  # what is trained in the place of all weights
    optim: OptimSettings = MISSING  # what turns gradients into an update
    tracking: TrackingSettings = MISSING  # where figures go beside metrics.jsonl
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)  # when training is saved
    eval: EvalDuringTrainingSettings = field(default_factory=EvalDuringTrainingSettings)  # on held-out prompts
    plugin: list[str] = field(
        default_factory=list, metadata=CODE
    )  # Python files that register environments and rewards

    steps: int = limited(30, at_least=1)  # each: sample, reward, select, train on the selection, push the weights
    seed: int = limited(0, at_least=0)  # of prompts, sampling and all else that is drawn
    prompts_per_step: int = limited(8, at_least=1)  # each is answered group_size times
    group_size: int = 8  # completions a prompt
    topk_size: int = limited(4, at_least=1)  # completions a prompt that are trained on, at most
    min_reward: float | None = None  # of a completion that is selected; None: above the median of its prompt's
    minibatch_size: int | None = limited(None, at_least=1)  # selected completions an optimizer step, at most; None: all
    passes: int = limited(1, at_least=1)  # times each step's selection is trained on
    tokens_per_microbatch: int | None = limited(
        None, at_least=1
    )  # of one forward and backward; None: 384 to 2048 on a CPU, 16384 on a GPU
    deterministic: bool = False  # bitwise equal runs; needs policy=transformers
    max_failed_share: float = limited(0.5, 0.0, 1.0)  # of a step's rewards; a step of which more fail stops the run

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size < 2:
            raise ConfigError(f"group_size={self.group_size} leaves nothing to select from: it must be at least 2")
        if self.topk_size > self.group_size:
            raise ConfigError(
                f"topk_size={self.topk_size} is more than the group_size={self.group_size} completions of a prompt: "
                "lower it, or raise group_size"
            )
        check_push(self.lora, self.policy)
        check_turns(self.env, self.tools)
        if self.deterministic and not isinstance(self.policy, (TransformersSettings, ScriptedSettings)):
            raise ConfigError(
                "deterministic=true promises bitwise equal runs, which vLLM cannot keep: add policy=transformers"
            )
        if isinstance(self.sampling, SamplingSettings) and self.sampling.temperature == 0:
            raise ConfigError(
                "sampling.temperature=0 gives every prompt group_size equal completions: selecting needs it above 0"
            )
        if isinstance(self.env, EnvSettings) and self.env.split == "test" and self.eval.enabled:
            raise ConfigError(
                "env.split=test would train on the prompts that are held out to measure it: leave it out, or add "
                "eval.enabled=false"
            )
