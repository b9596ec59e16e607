"""What can be chosen: the commands, the groups with their options, the recipes, and where they lie."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import rlpost
from rlpost.config.keys import Key, keys_of, types_of
from rlpost.errors import ConfigError
from rlpost.settings import (
    AdamW8bitSettings,
    ArithmeticSettings,
    AutoPolicySettings,
    CISPOLossSettings,
    CountdownSettings,
    DAPOLossSettings,
    DatasetSettings,
    DrGRPOLossSettings,
    DualClipLossSettings,
    EvalSettings,
    ExpertIterationSettings,
    GRPOLossSettings,
    GRPOSettings,
    GSM8KSettings,
    GSPOLossSettings,
    GSPOTokenLossSettings,
    IFBenchSettings,
    IFEvalSettings,
    MathSettings,
    MinorSFTLossSettings,
    MLflowSettings,
    ModelSettings,
    NoTrackingSettings,
    OptimSettings,
    ReasoningGymSettings,
    ReinforceLossSettings,
    ScriptedSettings,
    SFTLossSettings,
    SFTSettings,
    TensorBoardSettings,
    TextGameSettings,
    TrackioSettings,
    TransformersSettings,
    TwoSidedLossSettings,
    VLLMSettings,
    WandbSettings,
)
from rlpost.settings.registered import ENVS

S = TypeVar("S", GRPOSettings, SFTSettings, ExpertIterationSettings, EvalSettings)


@dataclass(frozen=True)
class Command(Generic[S]):
    """A verb that is configured: its words, its YAML file in conf/ and its settings class.

    `without` are keys of shared settings classes that mean nothing to this verb, so nobody can set them;
    `optional` are lists that other verbs need, and this one can leave empty.
    """

    verb: str
    name: str
    settings: type[S]
    without: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


TRAIN_GRPO = Command("train grpo", "grpo", GRPOSettings, without=("env.completion_column",))
TRAIN_SFT = Command("train sft", "sft", SFTSettings, optional=("env.reward",))
TRAIN_EXPERT_ITERATION = Command(
    "train expert-iteration", "expert_iteration", ExpertIterationSettings, without=("env.completion_column",)
)
EVAL = Command(
    "eval", "eval", EvalSettings, without=("env.eval_limit", "env.completion_column", "model.activation_checkpointing")
)
COMMANDS: tuple[Command[Any], ...] = (TRAIN_GRPO, TRAIN_SFT, TRAIN_EXPERT_ITERATION, EVAL)

# group -> the schemas its options can name. A file conf/GROUP/OPTION.yaml says which one is its own in
# its `defaults:` list and adds values only, so a YAML file never names code to run.
SCHEMAS: dict[str, dict[str, type]] = {
    "model": {"model_schema": ModelSettings},
    "env": {
        "arithmetic_schema": ArithmeticSettings,
        "countdown_schema": CountdownSettings,
        "dataset_schema": DatasetSettings,
        "gsm8k_schema": GSM8KSettings,
        "math_schema": MathSettings,
        "reasoning_gym_schema": ReasoningGymSettings,
        "text_game_schema": TextGameSettings,
        "ifbench_schema": IFBenchSettings,
        "ifeval_schema": IFEvalSettings,
    },
    "policy": {
        "auto_schema": AutoPolicySettings,
        "vllm_schema": VLLMSettings,
        "transformers_schema": TransformersSettings,
        "scripted_schema": ScriptedSettings,
    },
    "loss": {
        f"{settings.variant}_schema": settings
        for settings in (
            GRPOLossSettings,
            DrGRPOLossSettings,
            DAPOLossSettings,
            GSPOLossSettings,
            GSPOTokenLossSettings,
            CISPOLossSettings,
            TwoSidedLossSettings,
            DualClipLossSettings,
            ReinforceLossSettings,
            SFTLossSettings,
            MinorSFTLossSettings,
        )
    },
    "optim": {"adamw_schema": OptimSettings, "adamw_8bit_schema": AdamW8bitSettings},
    "tracking": {
        "none_schema": NoTrackingSettings,
        "tensorboard_schema": TensorBoardSettings,
        "wandb_schema": WandbSettings,
        "trackio_schema": TrackioSettings,
        "mlflow_schema": MLflowSettings,
    },
}


def built_in_folder(name: str) -> Path:
    """rlpost's own `conf` or `recipes`: inside the wheel, or at the root of an editable checkout."""
    package = Path(rlpost.__file__).parent
    for folder in (package / "_builtin" / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise ConfigError(f"rlpost's own {name}/ is not where it was installed ({package}): install rlpost again")


def search_folders(name: str) -> list[Path]:
    """The folders in which `conf` or `recipes` are looked for: the user's first."""
    users, own = Path(name).resolve(), built_in_folder(name).resolve()
    return [users, own] if users.is_dir() and users != own else [own]


def options(group: str, command: Command[Any] | None = None) -> dict[str, Path]:
    """Option -> file, for one group, the user's own and those of plugins included.

    With a `command` those only that it can choose (`loss=sft` is nothing to `train grpo`).
    """
    files = _yaml_files([folder / group for folder in search_folders("conf")])
    if group == "env":
        files = {name: _source(env.settings) for name, env in ENVS.items()} | files
    files = dict(sorted(files.items()))
    if command is None or len(schemas_of(command, group)) == len(SCHEMAS[group]):
        return files
    return {name: file for name, file in files.items() if command in commands_of(group, name)}


def schemas_of(command: Command[Any], group: str) -> dict[str, type]:
    """The schemas of a group that `command` can choose: those of the class that its settings declare."""
    declared = types_of(command.settings).get(group)
    return {} if declared is None else {n: cls for n, cls in SCHEMAS[group].items() if issubclass(cls, declared)}


def commands_of(group: str, option: str) -> list[Command[Any]]:
    """The commands that can choose an option; all that have the group where its file names no schema."""
    cls = class_of(group, option)
    having = [command for command in COMMANDS if group in types_of(command.settings)]
    return [c for c in having if cls is None or issubclass(cls, types_of(c.settings)[group])]


def class_of(group: str, option: str) -> type | None:
    """The settings class of an option, as its file names it; None where it names none."""
    file = next((f for folder in search_folders("conf") if (f := folder / group / f"{option}.yaml").is_file()), None)
    for entry in read_yaml(file).get("defaults", []) if file is not None else []:
        if entry in SCHEMAS[group]:
            return SCHEMAS[group][entry]
        if isinstance(entry, str) and entry not in ("_self_", option) and (cls := class_of(group, entry)) is not None:
            return cls
    return SCHEMAS[group].get(f"{option}_schema") if option in options(group) else None


def read_yaml(file: Path) -> dict[str, Any]:
    """The content of a YAML file; empty where it cannot be read, which composing it will say."""
    import yaml

    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def recipes() -> dict[str, Path]:
    """Recipe name -> file, the user's own included."""
    return _yaml_files(search_folders("recipes"))


def describe(group: str, option: str) -> str:
    """What an option is: the first line of its file, or of the docstring of a plugin's settings."""
    file = options(group)[option]
    if file.suffix == ".yaml":
        return description(file)
    settings = ENVS[option].settings
    doc = inspect.getdoc(settings) or ""
    return "" if doc.startswith(f"{settings.__name__}(") else doc.partition("\n")[0]  # a dataclass writes its own


def description(file: Path) -> str:
    """The comment on the first line of an option's or recipe's file; empty if it has none."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return lines[0].lstrip("# ") if lines and lines[0].startswith("#") else ""


def all_keys(command: Command[Any]) -> dict[str, list[str]]:
    """Dotted key -> the schemas (`env=gsm8k`) that have it, for every choice of a command's groups.

    A key that does not depend on a choice maps to an empty list.
    """
    owners: dict[str, list[str]] = {key.name: [] for key in keys_of(command.settings) if not _in_group(key)}
    for group in SCHEMAS:
        for schema, settings in schemas_of(command, group).items():
            for key in keys_of(settings, f"{group}."):
                owners.setdefault(key.name, []).append(f"{group}={schema.removesuffix('_schema')}")
    return {name: where for name, where in owners.items() if name not in command.without}


def _in_group(key: Key) -> bool:
    return key.name.partition(".")[0] in SCHEMAS


def _yaml_files(folders: list[Path]) -> dict[str, Path]:
    """Name -> file; a name in an earlier folder hides the same name in a later one."""
    found = {file.stem: file for folder in reversed(folders) for file in folder.glob("*.yaml")}
    return dict(sorted(found.items()))


def _source(settings: type) -> Path:
    """The file that a class stands in."""
    return Path(getattr(sys.modules[settings.__module__], "__file__", None) or settings.__module__)
