"""What can be said: one row for each command and each option of a group; what it names is imported when asked for.

A file `conf/GROUP/NAME.yaml` adds an option that holds values. It names the row whose settings they are for,
`defaults: [ROW_schema, _self_]`, so a YAML file never names code to run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from operator import attrgetter
from typing import Any, Generic, TypeVar

from rlpost.errors import ConfigError
from rlpost.settings.base import check_name, shown
from rlpost.settings.commands import EvalSettings, ExpertIterationSettings, GRPOSettings, SFTSettings
from rlpost.settings.env import EnvSettings

S = TypeVar("S")


@dataclass(frozen=True, eq=False)
class Command(Generic[S]):
    """A verb that is configured, and its settings class. `name` is that of its loop, rlpost/train/NAME.py, if any.

    `choices` say which option a group has where none is chosen; a file conf/NAME.yaml says it in their place.
    `without` are keys of shared settings classes that mean nothing to this verb, so nobody can set them;
    `optional` are lists that other verbs need, and this one can leave empty. `plan` makes the lines of `--dry-run`;
    `short`, `doc` and `examples` are the words of its help.
    """

    verb: str
    name: str
    settings: type[S]
    choices: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    plan: str = "cli.plan:sampling_lines"
    short: str = ""
    doc: str = ""
    examples: tuple[str, ...] = ()


USUAL = {"model": "smollm2", "env": "arithmetic", "policy": "auto", "optim": "adamw", "tracking": "none"}
TRAINED = {**USUAL, "cluster": "none"}
SAMPLED = {**TRAINED, "collector": "sync"}
TRAIN_GRPO = Command(
    "train grpo",
    "grpo",
    GRPOSettings,
    {**SAMPLED, "loss": "grpo"},
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
TRAIN_SFT = Command(
    "train sft",
    "sft",
    SFTSettings,
    {**TRAINED, "loss": "sft"},
    optional=("env.reward",),
    plan="cli.plan:sft_lines",
    short="Fine-tune on demonstrations.",
    doc="Fine-tune on demonstrated replies: an environment's own, or rows of yours (env=dataset env.path=FILE).",
    examples=(
        "rlpost train sft",
        "rlpost train sft model=qwen env=gsm8k epochs=2 --name first-try",
        "rlpost train sft env=dataset env.path=chats.jsonl steps=200",
        "rlpost train sft loss=minor_sft -m loss.beta=0.05,0.1",
    ),
)
TRAIN_EXPERT_ITERATION = Command(
    "train expert-iteration",
    "expert_iteration",
    ExpertIterationSettings,
    {**SAMPLED, "loss": "sft"},
    without=("env.completion_column",),
    plan="cli.plan:expert_iteration_lines",
    short="Fine-tune on the model's own best.",
    doc="Expert iteration: sample completions, keep the best of each prompt, fine-tune on them, and again.",
    examples=(
        "rlpost train expert-iteration",
        "rlpost train expert-iteration model=qwen env=gsm8k topk_size=2 --name first",
        "rlpost train expert-iteration loss=minor_sft passes=2 --dry-run",
        "rlpost train expert-iteration recipe=arithmetic-smollm2-expert-iteration-cpu",
    ),
)
EVAL = Command(  # its choices stand in conf/eval.yaml
    "eval",
    "eval",
    EvalSettings,
    without=("env.eval_limit", "env.completion_column", "model.activation_checkpointing"),
)
COMMANDS: tuple[Command[Any], ...] = (TRAIN_GRPO, TRAIN_SFT, TRAIN_EXPERT_ITERATION, EVAL)


@dataclass(frozen=True)
class Choice:
    """An option of a group: its settings class, a line of words, and what makes the component of the settings.

    `settings` is `module:Class` under rlpost.settings and `builds` `module:name` under rlpost; those that a plugin
    registers are the class and the callable themselves.
    """

    settings: str | type
    words: str = ""
    builds: str | Callable[..., Any] = ""

    @cached_property
    def cls(self) -> type:
        """The settings class."""
        return opened(f"settings.{self.settings}") if isinstance(self.settings, str) else self.settings

    @property
    def build(self) -> Callable[..., Any]:
        """What makes the component of the settings; the room's own code says what else it is called with."""
        return opened(self.builds) if isinstance(self.builds, str) else self.builds


def opened(place: str) -> Any:
    """What `module:name` under rlpost is."""
    module, _, name = place.partition(":")
    return attrgetter(name)(import_module(f"rlpost.{module}"))


# group -> option -> its row; one that is called as its group is for files alone, and no option itself
CHOICES: dict[str, dict[str, Choice]] = {
    "model": {"model": Choice("model:ModelSettings")},
    "env": {
        "arithmetic": Choice("env:ArithmeticSettings", builds="envs.arithmetic:ArithmeticEnv.of"),
        "countdown": Choice(
            "env:CountdownSettings",
            "Countdown: make a target out of a few numbers, each used once; made on the spot",
            "envs.countdown:CountdownEnv.of",
        ),
        "dataset": Choice(
            "env:DatasetSettings",
            "Rows and rewards of your own: env.path=FILE env.reward=FILE.py:FUNCTION",
            "envs.dataset:DatasetEnv.of",
        ),
        "gsm8k": Choice(
            "env:GSM8KSettings",
            "Grade-school word problems, from the hub or from a folder or file (env.path)",
            "envs.gsm8k:GSM8KEnv.of",
        ),
        "math": Choice(
            "env:MathSettings",
            "MATH and its like, answered in boxes and compared as expressions; rows of your own too (env.path)",
            "envs.math_problems:MathEnv.of",
        ),
        "mix": Choice(
            "env:MixSettings",
            "Several environments at once, in shares: 'env.sources=[arithmetic,gsm8k]'",
            "envs.mix:MixEnv.of",
        ),
        "reasoning_gym": Choice(
            "env:ReasoningGymSettings",
            "Puzzles of any of reasoning-gym's generators, made on the spot: env.task=leg_counting",
            "envs.reasoning:ReasoningGymEnv.of",
        ),
        "text_game": Choice(
            "env:TextGameSettings",
            "Games of gymnasium's registry, several turns of text each: env.id=FrozenLake-v1",
            "envs.text_game:TextGameEnv.of",
        ),
        "ifbench": Choice(
            "env:IFBenchSettings",
            "Prompts with instructions of 58 more kinds that a program checks (IFBench), from hub, folder or file",
            "envs.ifeval:IFBenchEnv.of",
        ),
        "ifeval": Choice(
            "env:IFEvalSettings",
            "Prompts with instructions that a program checks (IFEval), from the hub, a folder or a file (env.path)",
            "envs.ifeval:IFEvalEnv.of",
        ),
    },
    "policy": {
        "auto": Choice("policy:AutoPolicySettings", "vLLM where it is installed, else transformers"),
        "scripted": Choice(
            "policy:ScriptedSettings",
            "Canned replies, given in turn: no model samples",
            "policies.scripted:ScriptedPolicy.of",
        ),
        "transformers": Choice(
            "policy:TransformersSettings",
            "The trainer's own weights, sampled with transformers",
            "policies.transformers:TransformersWrapper.of",
        ),
        "vllm": Choice(
            "policy:VLLMSettings",
            "vLLM, on a CPU or a GPU",
            "policies.vllm:vLLMWrapper.of",
        ),
    },
    "collector": {
        "async": Choice("policy:AsyncCollectorSettings", "Beside training, in a process with an engine of its own"),
        "sync": Choice("policy:SyncCollectorSettings", "In turn with training: completions are never old"),
    },
    "cluster": {
        "none": Choice("policy:NoClusterSettings", "This machine alone"),
        "ray": Choice("policy:RayClusterSettings", "Workers of a Ray cluster sample, this machine trains"),
    },
    # the functions stand in rlpost/objectives/variants.py and supervised.py, by the same names
    "loss": {
        "cispo": Choice(
            "loss:CISPOLossSettings", "CISPO: every token keeps its gradient, weighted by a ratio that is bounded above"
        ),
        "dapo": Choice("loss:DAPOLossSettings", "DAPO: GRPO's loss with a higher upper clip, averaged over all tokens"),
        "dr_grpo": Choice(
            "loss:DrGRPOLossSettings",
            "Dr. GRPO: GRPO's loss over a constant length, so that long answers weigh no less a token",
        ),
        "dual_clip": Choice(
            "loss:DualClipLossSettings", "Dual-clip PPO: GRPO's loss, bounded where the advantage is negative"
        ),
        "grpo": Choice(
            "loss:GRPOLossSettings",
            "GRPO: a clipped ratio a token and an optional KL penalty, averaged over all tokens",
        ),
        "gspo": Choice("loss:GSPOLossSettings", "GSPO: one clipped ratio a completion instead of one a token"),
        "gspo_token": Choice(
            "loss:GSPOTokenLossSettings", "GSPO-token: GSPO's ratio with advantages that may differ from token to token"
        ),
        "minor_sft": Choice(
            "commands:MinorSFTLossSettings",
            "Demonstrated replies, weighing less the further the model has left its reference (arXiv:2408.10642)",
        ),
        "reinforce": Choice(
            "loss:ReinforceLossSettings", "REINFORCE: the plain policy gradient, without a ratio or a clip"
        ),
        "sft": Choice("commands:SFTLossSettings", "Cross entropy of demonstrated replies, with an optional KL penalty"),
        "two_sided": Choice(
            "loss:TwoSidedLossSettings", "INTELLECT-2: GRPO's loss with the ratio bounded for negative advantages too"
        ),
    },
    "optim": {
        "adamw": Choice("training:OptimSettings", "AdamW with warm-up, schedule and gradient clipping"),
        "adamw_8bit": Choice(
            "training:AdamW8bitSettings",
            "AdamW with its running means in 8 bits (bitsandbytes): a quarter of the optimizer's memory",
        ),
    },
    "tracking": {
        "mlflow": Choice(
            "training:MLflowSettings", "MLflow, in the run's folder or on a server", "tracking.trackers:mlflow"
        ),
        "none": Choice("training:NoTrackingSettings", "No tracker: the run folder alone"),
        "tensorboard": Choice(
            "training:TensorBoardSettings",
            "TensorBoard event files in the run's folder",
            "tracking.trackers:tensorboard",
        ),
        "trackio": Choice("training:TrackioSettings", "trackio, local: trackio show", "tracking.trackers:trackio"),
        "wandb": Choice(
            "training:WandbSettings", "Weights & Biases, offline unless tracking.mode=online", "tracking.trackers:wandb"
        ),
    },
}


def row_of(group: str, settings: type) -> Choice:
    """The row of a settings class. Raises ConfigError where none has it."""
    row = next((row for row in CHOICES[group].values() if row.cls is settings), None)
    if row is None:
        if group == "env":
            raise ConfigError(f"no environment belongs to {settings.__name__}: register it with rlpost.register_env")
        raise ConfigError(f"no {group} belongs to {settings.__name__}: give it a row in rlpost/catalog.py")
    return row


def register_env(name: str, settings: type[EnvSettings], build: Callable[..., Any]) -> None:
    """Make `env=NAME` choose an environment of your own, with the fields of `settings` as its keys.

    `settings` is a dataclass derived from `rlpost.settings.EnvSettings`. `build`, a class or a
    function, is called as `build(settings, **common)` and returns a `DatasetChatEnv`; `common` are
    that class's own arguments. Raises ConfigError for a name or class that is taken or cannot be one.
    """
    envs = CHOICES["env"]
    check_name("register_env", name, envs)
    if not (isinstance(settings, type) and issubclass(settings, EnvSettings)):
        raise ConfigError(
            f"register_env({name!r}): {shown(settings)} is not derived from rlpost.settings.EnvSettings: derive it"
        )
    if "__dataclass_fields__" not in vars(settings):
        raise ConfigError(f"register_env({name!r}): {settings.__name__} is no dataclass: put @dataclass above it")
    if not callable(build):
        raise ConfigError(f"register_env({name!r}): {shown(build)} builds nothing: give a class or a function")
    owner = next((other for other, row in envs.items() if row.cls is settings), None)
    if owner is not None:
        raise ConfigError(f"register_env({name!r}): {settings.__name__} belongs to env={owner}: derive another class")
    doc = inspect.getdoc(settings) or ""
    words = "" if doc.startswith(f"{settings.__name__}(") else doc.partition("\n")[0]  # a dataclass writes its own
    envs[name] = Choice(settings, words, build)
