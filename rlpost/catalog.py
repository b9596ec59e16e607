"""One row for each command and each option of a group; `rlpost.config.plugins` adds those of a user.

What a row names is imported when it is asked for. A file `conf/GROUP/NAME.yaml` adds an option that holds values. It
names the row whose settings they are for, `defaults: [ROW_schema, _self_]`, so a YAML file never names code to run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rlpost.errors import ConfigError
from rlpost.settings.base import Choice, opened

if TYPE_CHECKING:
    from rlpost.settings import commands

S = TypeVar("S")


@dataclass(frozen=True, eq=False)
class Command(Generic[S]):
    """A verb that is configured. Its loop is `loop`, or `learn` of rlpost/train/NAME.py.

    `place` is its settings class, or the name of a class of rlpost/settings/commands.py.
    `choices` say which option a group has where none is chosen; a file conf/NAME.yaml says it in their place.
    `without` are keys of shared settings classes that mean nothing to this verb, so nobody can set them;
    `optional` are lists that other verbs need, and this one can leave empty. `short`, `doc` and
    `examples` are the words of its help.
    """

    verb: str
    name: str
    place: str | type[S]
    choices: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    short: str = ""
    doc: str = ""
    examples: tuple[str, ...] = ()
    loop: Callable[[S, commands.RunRequest], int] | None = None  # a plugin's
    rows: str = ""  # the `Kind` of rows that it trains on, under rlpost; empty: it samples what it trains on

    @cached_property
    def settings(self) -> type[S]:
        """The settings class."""
        place: Any = self.place
        return opened(f"settings.commands:{place}") if isinstance(place, str) else place

    @property
    def kind(self) -> Any:
        """The `Kind` of rows that it trains on; None where it trains on its own completions."""
        return opened(self.rows) if self.rows else None

    @property
    def train(self) -> Callable[[S, commands.RunRequest], int]:
        """Runs or resumes a training; returns the exit code."""
        if self.loop is not None:
            return self.loop
        return partial(opened("train.training:run"), assemble=self.assemble, learn=self.learn)

    @property
    def assemble(self) -> Callable[..., Any]:
        """Makes the parts of one of rlpost's own trainings."""
        return opened(f"train.{self.name}:assemble")

    @property
    def learn(self) -> Callable[..., None]:
        """The loop of one of rlpost's own trainings."""
        return opened(f"train.{self.name}:learn")


USUAL = {"model": "smollm2", "env": "arithmetic", "policy": "auto", "optim": "adamw", "tracking": "none"}
TRAINED = {**USUAL, "cluster": "none"}
SAMPLED = {**TRAINED, "collector": "sync", "loss": "grpo"}
BY_PASS_RATE = ("env.pass_rates", "env.min_pass_rate", "env.max_pass_rate")  # which choose prompts to sample from
TRAIN_GRPO: Command[commands.GRPOSettings] = Command(
    "train grpo",
    "grpo",
    "GRPOSettings",
    SAMPLED,
    without=("env.completion_column",),
    short="Train with GRPO.",
    doc="Train with GRPO: sample groups of completions, reward them, learn from the differences.",
    examples=(
        "rlpost train grpo",
        "rlpost train grpo model=qwen env=gsm8k optim.lr=1e-6 --name first-try",
        "rlpost train grpo recipe=gsm8k-smollm2-cpu env.path=data/gsm8k --dry-run",
        "rlpost train grpo -m optim.lr=1e-5,3e-5 seed=0,1",
    ),
)
TRAIN_SFT: Command[commands.SFTSettings] = Command(
    "train sft",
    "sft",
    "SFTSettings",
    TRAINED | {"loss": "sft"},
    without=BY_PASS_RATE,
    optional=("env.reward",),
    short="Fine-tune on demonstrations.",
    doc="Fine-tune on demonstrated replies: an environment's own, or rows of yours (env=dataset env.path=FILE).",
    examples=(
        "rlpost train sft",
        "rlpost train sft model=qwen env=gsm8k epochs=2 --name first-try",
        "rlpost train sft env=dataset env.path=chats.jsonl steps=200",
        "rlpost train sft loss=minor_sft -m loss.beta=0.05,0.1",
    ),
    rows="train.sft:SAMPLES",
)
TRAIN_DPO: Command[commands.DPOSettings] = Command(
    "train dpo",
    "dpo",
    "DPOSettings",
    TRAINED | {"env": "dataset", "loss": "dpo"},
    without=("env.completion_column", "env.prompt_template", *BY_PASS_RATE),
    optional=("env.reward",),
    short="Learn from pairs of replies.",
    doc="Learn which of two replies is the better one, from rows with prompt, chosen and rejected (env.path=FILE).",
    examples=(
        "rlpost train dpo env.path=pairs.jsonl",
        "rlpost train dpo env.path=trl-lib/ultrafeedback_binarized lora.enabled=true",
        "rlpost train dpo model=runs/my-run env.path=pairs.jsonl --name preferred",
        "rlpost train dpo env.path=pairs.jsonl loss=ipo -m loss.beta=0.05,0.1",
    ),
    rows="train.dpo:PAIRS",
)
TRAIN_EXPERT_ITERATION: Command[commands.ExpertIterationSettings] = Command(
    "train expert-iteration",
    "expert_iteration",
    "ExpertIterationSettings",
    SAMPLED | {"loss": "sft"},
    without=("env.completion_column",),
    short="Fine-tune on the model's own best.",
    doc="Expert iteration: sample completions, keep the best of each prompt, fine-tune on them, and again.",
    examples=(
        "rlpost train expert-iteration",
        "rlpost train expert-iteration model=qwen env=gsm8k topk_size=2 --name first",
        "rlpost train expert-iteration loss=minor_sft passes=2 --dry-run",
        "rlpost train expert-iteration recipe=arithmetic-smollm2-expert-iteration-cpu",
    ),
)
TRAIN_DISTILL: Command[commands.DistillSettings] = Command(
    "train distill",
    "distill",
    "DistillSettings",
    SAMPLED | {"loss": "jsd"},
    without=("env.completion_column",),
    optional=("env.reward",),
    short="Learn from a teacher's probabilities.",
    doc="On-policy distillation: sample completions, and learn from a teacher's probabilities of their tokens.",
    examples=(
        "rlpost train distill teacher=runs/my-run",
        "rlpost train distill model=qwen env=gsm8k teacher=my-run loss=opd",
        'rlpost train distill hint="{question} equals {answer}."',
        "rlpost train distill teacher=my-run loss.beta=0.5 --dry-run",
    ),
)
EVAL: Command[commands.EvalSettings] = Command(  # its choices stand in conf/eval.yaml
    "eval",
    "eval",
    "EvalSettings",
    without=("env.eval_limit", "model.activation_checkpointing"),
    optional=("env.reward",),
)
COMMANDS: list[Command[Any]] = [  # and those of plugins
    TRAIN_GRPO,
    TRAIN_SFT,
    TRAIN_DPO,
    TRAIN_EXPERT_ITERATION,
    TRAIN_DISTILL,
    EVAL,
]


# group -> option -> its row; one that is called as its group is for files alone, and no option itself
CHOICES: dict[str, dict[str, Choice]] = {
    "model": {"model": Choice("model:ModelSettings")},
    "env": {
        "arithmetic": Choice("env:ArithmeticSettings", builds="envs.arithmetic:ArithmeticEnv.of"),
        "countdown": Choice("env:CountdownSettings", builds="envs.countdown:CountdownEnv.of"),
        "dataset": Choice("env:DatasetSettings", builds="envs.dataset:DatasetEnv.of"),
        "factory": Choice("foreign:FactorySettings", builds="envs.factory:FactoryEnv.of"),
        "gsm8k": Choice("env:GSM8KSettings", builds="envs.gsm8k:GSM8KEnv.of"),
        "math": Choice("env:MathSettings", builds="envs.math_problems:MathEnv.of"),
        "mix": Choice("env:MixSettings", builds="envs.mix:MixEnv.of"),
        "openenv": Choice("foreign:OpenEnvSettings", builds="envs.openenv:OpenEnv.of"),
        "reasoning_core": Choice("foreign:ReasoningCoreSettings", builds="envs.reasoning:ReasoningCoreEnv.of"),
        "reasoning_gym": Choice("env:ReasoningGymSettings", builds="envs.reasoning:ReasoningGymEnv.of"),
        "textarena": Choice("foreign:TextArenaSettings", builds="envs.textarena:TextArenaEnv.of"),
        "text_game": Choice("env:TextGameSettings", builds="envs.text_game:TextGameEnv.of"),
        "verifiers": Choice("foreign:VerifiersSettings", builds="envs.verifiers:VerifiersEnv.of"),
        "ifbench": Choice("env:IFBenchSettings", builds="envs.ifeval:IFBenchEnv.of"),
        "ifeval": Choice("env:IFEvalSettings", builds="envs.ifeval:IFEvalEnv.of"),
    },
    "policy": {
        "auto": Choice("policy:AutoPolicySettings"),
        "scripted": Choice("policy:ScriptedSettings", builds="policies.scripted:ScriptedPolicy.of"),
        "transformers": Choice("policy:TransformersSettings", builds="policies.transformers:TransformersWrapper.of"),
        "vllm": Choice("policy:VLLMSettings", builds="policies.vllm:vLLMWrapper.of"),
    },
    "collector": {
        "async": Choice("policy:AsyncCollectorSettings"),
        "sync": Choice("policy:SyncCollectorSettings"),
    },
    "cluster": {
        "none": Choice("policy:NoClusterSettings"),
        "ray": Choice("policy:RayClusterSettings"),
    },
    "loss": {
        "cispo": Choice("loss:CISPOLossSettings", builds="objectives.variants:cispo"),
        "dapo": Choice("loss:DAPOLossSettings", builds="objectives.variants:clipped"),
        "dpo": Choice("loss:DPOLossSettings", builds="objectives.preference:dpo"),
        "dpo_norm": Choice("loss:DPONormLossSettings", builds="objectives.preference:dpo"),
        "dppo_kl": Choice("loss:DPPOKLLossSettings", builds="objectives.variants:dppo_kl"),
        "dppo_tv": Choice("loss:DPPOTVLossSettings", builds="objectives.variants:dppo_tv"),
        "dr_grpo": Choice("loss:DrGRPOLossSettings", builds="objectives.variants:clipped"),
        "dual_clip": Choice("loss:DualClipLossSettings", builds="objectives.variants:clipped"),
        "gmpo": Choice("loss:GMPOLossSettings", builds="objectives.variants:gmpo"),
        "grpo": Choice("loss:GRPOLossSettings", builds="objectives.variants:clipped"),
        "gspo": Choice("loss:GSPOLossSettings", builds="objectives.variants:gspo"),
        "gspo_token": Choice("loss:GSPOTokenLossSettings", builds="objectives.variants:gspo_token"),
        "ipo": Choice("loss:IPOLossSettings", builds="objectives.preference:ipo"),
        "jsd": Choice("loss:JSDLossSettings", builds="model.divergence:chunked_divergence"),
        "minor_sft": Choice("loss:MinorSFTLossSettings", builds="objectives.supervised:minor_sft_loss"),
        "opd": Choice("loss:OPDLossSettings", builds="objectives.distillation:opd"),
        "reinforce": Choice("loss:ReinforceLossSettings", builds="objectives.variants:reinforce"),
        "sapo": Choice("loss:SAPOLossSettings", builds="objectives.variants:sapo"),
        "sft": Choice("loss:SFTLossSettings", builds="objectives.supervised:sft_loss"),
        "two_sided": Choice("loss:TwoSidedLossSettings", builds="objectives.variants:clipped"),
    },
    "optim": {
        "adamw": Choice("training:OptimSettings"),
        "adamw_8bit": Choice("training:AdamW8bitSettings"),
    },
    "tracking": {
        "mlflow": Choice("training:MLflowSettings", builds="tracking.trackers:MLflowTracker"),
        "none": Choice("training:NoTrackingSettings"),
        "tensorboard": Choice("training:TensorBoardSettings", builds="tracking.trackers:TensorBoardTracker"),
        "trackio": Choice("training:TrackioSettings", builds="tracking.trackers:TrackioTracker"),
        "wandb": Choice("training:WandbSettings", builds="tracking.trackers:WandbTracker"),
    },
}

BUILT_IN_TOOLS = {
    "browser": Choice(None, "A browser of the allowed domains", "tools.choice:browser"),
    "mcp": Choice(None, "The tools of MCP servers", "tools.choice:mcp"),
    "python": Choice(None, "Python programs in a sandbox", "tools.choice:python"),
}
OWN_TOOL = Choice(None, "A tool that a plugin has registered", "tools.choice:own")
CALL_READER = Choice(None, "Calls in the form of a chat template", "tools.parsers:call_reader")


def option_of(group: str, settings: type) -> str:
    """The option of a group that has this settings class. Raises ConfigError where none has it."""
    option = next((name for name, row in CHOICES[group].items() if row.cls is settings), None)
    if option is None:
        how = f"with rlpost.register_{group}" if group in ("env", "loss") else "in rlpost/catalog.py"
        raise ConfigError(f"no {group} belongs to {settings.__name__}: register it {how}")
    return option


def row_of(group: str, settings: type) -> Choice:
    """The row of a settings class. Raises as `option_of`."""
    return CHOICES[group][option_of(group, settings)]


WATCHERS: dict[str, tuple[Callable[[Any], Any], bool]] = {}  # name -> what makes it, and whether it is optional
