"""What can be chosen: the commands, the groups with their options, the recipes, and where they lie."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import rlpost
from rlpost.config.keys import Key, keys_of
from rlpost.errors import ConfigError
from rlpost.settings import (
    ArithmeticSettings,
    AutoPolicySettings,
    CISPOLossSettings,
    DAPOLossSettings,
    DatasetSettings,
    DrGRPOLossSettings,
    DualClipLossSettings,
    EvalSettings,
    GRPOLossSettings,
    GRPOSettings,
    GSM8KSettings,
    GSPOLossSettings,
    GSPOTokenLossSettings,
    MLflowSettings,
    ModelSettings,
    NoTrackingSettings,
    OptimSettings,
    ReinforceLossSettings,
    ScriptedSettings,
    TensorBoardSettings,
    TrackioSettings,
    TransformersSettings,
    TwoSidedLossSettings,
    VLLMSettings,
    WandbSettings,
)
from rlpost.settings.registered import ENVS

S = TypeVar("S", GRPOSettings, EvalSettings)


@dataclass(frozen=True)
class Command(Generic[S]):
    """A verb that is configured: its words, its YAML file in conf/ and its settings class.

    `without` are keys of shared settings classes that mean nothing to this verb, so nobody can set them.
    """

    verb: str
    name: str
    settings: type[S]
    without: tuple[str, ...] = ()


TRAIN_GRPO = Command("train grpo", "grpo", GRPOSettings)
EVAL = Command("eval", "eval", EvalSettings, without=("env.eval_limit",))
COMMANDS: tuple[Command[Any], ...] = (TRAIN_GRPO, EVAL)

# group -> the schemas its options can name. A file conf/GROUP/OPTION.yaml says which one is its own in
# its `defaults:` list and adds values only, so a YAML file never names code to run.
SCHEMAS: dict[str, dict[str, type]] = {
    "model": {"model_schema": ModelSettings},
    "env": {
        "arithmetic_schema": ArithmeticSettings,
        "dataset_schema": DatasetSettings,
        "gsm8k_schema": GSM8KSettings,
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
        )
    },
    "optim": {"adamw_schema": OptimSettings},
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


def options(group: str) -> dict[str, Path]:
    """Option -> file, for one group, the user's own and those of plugins included."""
    files = _yaml_files([folder / group for folder in search_folders("conf")])
    if group == "env":
        files = {name: _source(env.settings) for name, env in ENVS.items()} | files
    return dict(sorted(files.items()))


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
    for group, schemas in SCHEMAS.items():
        if group not in command.settings.__dataclass_fields__:
            continue
        for schema, settings in schemas.items():
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
