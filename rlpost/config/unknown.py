"""Why a key or an option is unknown, and which one was probably meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpost.catalog import COMMANDS, Command
from rlpost.config.keys import groups_of
from rlpost.config.overrides import Override, shown
from rlpost.config.paths import DATA_FILES
from rlpost.config.registry import all_keys, commands_of
from rlpost.nearest import did_you_mean, nearest, nearest_key, one_typo_away

# what other toolkits call it -> what it is called here
OTHER_NAMES = {
    "learning_rate": "optim.lr",
    "max_steps": "steps",
    "num_generations": "group_size",
    "n": "group_size",
    "batch_size": "prompts_per_step",
    "beta": "loss.kl_coef",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "delta": "loss.max_ratio",
    "loss_type": "loss",
    "loss_agg_mode": "loss.aggregation",
    "max_tokens": "env.max_completion_tokens",
    "max_new_tokens": "env.max_completion_tokens",
    "max_completion_length": "env.max_completion_tokens",
    "max_seq_length": "max_tokens",
    "max_length": "max_tokens",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "max_prompt_length": "env.max_prompt_tokens",
    "dataset": "env",
    "task": "env",
    "data": "env.path",
    "data_path": "env.path",
    "dataset_name": "env.path",
    "train_file": "env.path",
    "reward_fn": "env.reward",
    "reward_funcs": "env.reward",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "num_iterations": "passes",
    "engine": "policy",
}


def unknown_key(override: Override, command: Command[Any], keys: Sequence[str], choices: Mapping[str, str]) -> str:
    """The message for a key that is none of `keys` under the present choices."""
    name = shown(override.key)
    verb = f"rlpost {command.verb}"
    inside = [key for key in keys if key.startswith(f"{override.key}.")]
    if inside:
        return f"{name} is a group of settings: set {', '.join(inside)}"
    if override.key == "recipe":
        return "recipe is no setting but a file of them: rlpost config list prints those there are"
    everywhere = all_keys(command)
    if owners := everywhere.get(override.key):
        group = override.key.partition(".")[0]
        return f"{name} is no setting of {group}={choices[group]}: it belongs to {' and '.join(owners)}"
    for other in COMMANDS:
        if override.key in all_keys(other) or override.key in groups_of(other.settings):
            return f"{name} is no setting of {verb}: it belongs to rlpost {other.verb}"
    candidates = [*keys, *groups_of(command.settings), "recipe", *everywhere]
    near = _of_that_name(override.key, candidates) or one_typo_away(override.key, candidates)
    known = OTHER_NAMES.get(override.key.rpartition(".")[2].lower())
    near = near or (known if known in candidates else nearest_key(override.key, candidates))
    return f"{name} is no setting of {verb}{did_you_mean(near, f'see rlpost config show {command.verb}')}"


def _of_that_name(word: str, keys: Sequence[str]) -> str | None:
    """The keys that end in `word`, where there are several: `model.path or env.path` for `path`."""
    named = list(dict.fromkeys(key for key in keys if key.endswith(f".{word}")))
    return " or ".join(named) if len(named) > 1 else None


def unknown_option(override: Override, known: Sequence[str]) -> str:
    """The message for a group option without a file in conf/."""
    hint = did_you_mean(nearest(override.text, known), f"it is one of {', '.join(known)}")
    if override.key == "model" and (Path("runs") / override.text).is_dir() and override.text:
        hint = f"; did you mean model=runs/{override.text}?"
    if override.key == "env" and override.text.endswith((".py", *DATA_FILES)):
        own = f"plugin={shown(override.text)} env=NAME" if override.text.endswith(".py") else ""
        hint = f"; write {own or f'env=dataset env.path={shown(override.text)}'}"
    if override.text.startswith("["):
        hint = "; it takes one option, not a list"
    elif "," in override.text:
        hint = "; it takes one option: add -m to run the command once for each of several"
    return f"{override.key}={shown(override.text)} is unknown{hint}"


def option_of_others(override: Override, command: Command[Any], known: Sequence[str]) -> str:
    """The message for a group option that other commands have."""
    others = " and ".join(f"rlpost {other.verb}" for other in commands_of(override.key, override.text))
    return f"{override} is for {others}; rlpost {command.verb} takes one of {', '.join(known)}"
