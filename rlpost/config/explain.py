"""Explains a configuration: what a key means, who set it, what papers used.

Writes a recipe to begin with too: every setting with its value and meaning, rarely changed ones commented out.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Generic, cast

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from rlpost.catalog import COMMANDS, TRAIN_GRPO, Command, S
from rlpost.config import comments, schema
from rlpost.config.code import is_code, makes_run
from rlpost.config.compose import Merged, compose, files_of_conf, merge_all
from rlpost.config.overrides import Override, parse_words, shown
from rlpost.config.recipes import line_numbers, read_recipe
from rlpost.config.unknown import Vocabulary
from rlpost.errors import ConfigError
from rlpost.settings.base import MISSING

COMMAND_LINE = "the command line"


def explain(name: str, command: Command[Any] | None, words: Sequence[str]) -> dict[str, Any]:
    """The meaning of a key (`optim.lr`), a group (`env`) or a part (`sampling`), as JSON: only a key has a `type`.

    Without a `command` it is the first that has the name. A key of an option that is not chosen
    (`env.path`) is explained with that option chosen, unless `words` choose another. Raises
    ConfigError for an unknown name, with the nearest one, and what `merge_all` raises.
    """
    command = command or next((c for c in COMMANDS if _has(c, name)), TRAIN_GRPO)
    words = [*words, *_option_needed(name, command, words)]
    origins = provenance(command, words)
    typed = " ".join(["rlpost", command.verb, *words])
    by_name = {key.name: key for key in origins.merged.keys}
    if name in by_name:
        return _key_meaning(by_name[name], origins, typed)
    if any(key.startswith(f"{name}.") for key in by_name):
        return _group_meaning(name, origins, typed)
    raise Vocabulary(command, by_name, origins.merged.choices).refusal([Override(name, "")])


def search(word: str) -> list[dict[str, str]]:
    """The keys whose name or meaning has `word`, each with its meaning and the owners; empty if it is a name itself."""
    if any(_has(command, word) for command in COMMANDS):
        return []
    found: dict[str, dict[str, str]] = {}
    for command in COMMANDS:
        for name, (_, meaning) in comments.meanings(command).items():
            if word.lower() in f"{name} {meaning}".lower():
                found.setdefault(name, {"key": name, "meaning": meaning, "of": _owners_of(name)})
    return sorted(found.values(), key=lambda row: word.lower() not in row["key"])


def _owners_of(name: str) -> str:
    """The verbs that have a key, and the options that it belongs to unless every option of its group has it."""
    having = [command for command in COMMANDS if name in schema.all_keys(command)]
    group = name.partition(".")[0]
    options = list(dict.fromkeys(option for command in having for option in schema.all_keys(command)[name]))
    rows = {f"{group}={row}" for command in having for row in schema.classes_of(command, group)}
    verbs = "rlpost " + ", ".join(command.verb for command in having)
    return f"{verbs}; of {', '.join(options)}" if options and {*options} != rows else verbs


def every_key(command: Command[Any], words: Sequence[str]) -> list[dict[str, Any]]:
    """All keys under the choices in `words`, those of no group first. Raises what `merge_all` raises."""
    merged = merge_all(command, words)
    return [_row(key, merged) for key in sorted(merged.keys, key=lambda key: "." in key.name)]


def _has(command: Command[Any], name: str) -> bool:
    keys = schema.all_keys(command)
    return name in keys or any(key.startswith(f"{name}.") for key in keys)


def _option_needed(name: str, command: Command[Any], words: Sequence[str]) -> list[str]:
    """The word that chooses an option with the key `name`, if only some options have it and none is chosen."""
    given = {override.key for override in parse_words(words)}
    named = (owner.partition("=") for owner in schema.all_keys(command).get(name, []))
    owners = [f"{group}={option}" for group, _, option in named if option in schema.options(group)]
    group = name.partition(".")[0]
    if not owners or given & {group, "recipe"}:
        return []
    present = {key.name for key in merge_all(command, words).keys}
    return [] if name in present else owners[:1]


def _row(key: schema.Key, merged: Merged[Any]) -> dict[str, Any]:
    """A key in a list, as JSON: its present value (null where nobody gave one), that as a word, and its meaning."""
    value = value_of(merged, key.name)
    return {
        "key": key.name,
        "value": None if value == MISSING else _as_json(value),
        "text": schema.as_text(value),
        "meaning": _meaning_of(merged, key.name),
    }


def _key_meaning(key: schema.Key, origins: Provenance[Any], typed: str) -> dict[str, Any]:
    papers = schema.read_yaml(Path(__file__).parent / "papers.yaml").get(key.name, [])
    return {
        **_row(key, origins.merged),
        "command": typed,
        "of": _owners_of(key.name),
        "type": key.type_name,
        **origins.of(key.name),
        "papers": [dict(zip(("value", "paper", "where"), row, strict=True)) for row in papers],
    }


def _group_meaning(name: str, origins: Provenance[Any], typed: str) -> dict[str, Any]:
    """The lines of a group; a part without options (`sampling`) has nothing chosen."""
    merged = origins.merged
    doc = comments.docs_of(merged.command.settings).get(name) or inspect.getdoc(owner_of(merged, f"{name}.")) or ""
    options = schema.options(name, merged.command) if name in merged.choices else []
    return {
        "group": name,
        "command": typed,
        "meaning": doc.partition("\n")[0],
        "chosen": merged.choices.get(name),
        "options": {option: comments.describe(name, option) for option in options},
        **origins.of(name),
        "keys": [_row(key, merged) for key in merged.keys if key.name.startswith(f"{name}.")],
    }


def _meaning_of(merged: Merged[Any], name: str) -> str:
    """The comment beside the field of a dotted key; empty if there is none."""
    return comments.docs_of(owner_of(merged, name)).get(name.rpartition(".")[2], "")


def _as_json(value: Any) -> Any:
    """A setting's value as JSON: an Enum's member by its name."""
    if isinstance(value, Enum):
        return value.name
    return [_as_json(element) for element in value] if isinstance(value, list) else value


# Who set a value


@dataclass(frozen=True)
class Layer:
    """One place that sets a key.

    `where` is a settings class, a file (with its line) or the command line. `effective` is False for a
    recipe's setting of an option that the command line replaced with another.
    """

    text: str
    where: str
    effective: bool = True


@dataclass(frozen=True)
class Provenance(Generic[S]):
    """A configuration with the layers of every key and every group; the last layer counts."""

    merged: Merged[S]
    layers: dict[str, list[Layer]]

    def winner(self, name: str) -> Layer | None:
        """The layer that sets a key or chooses a group's option; None for a key that has no value yet."""
        return next((layer for layer in reversed(self.layers.get(name, [])) if layer.effective), None)

    def of(self, name: str) -> dict[str, Any]:
        """Who set a key or a group, as JSON: null for nobody yet."""
        winner = self.winner(name)
        layers = [dataclasses.asdict(layer) for layer in self.layers.get(name, [])]
        return {"set_by": winner.where if winner is not None else None, "layers": layers}


def provenance(command: Command[S], words: Sequence[str] = ()) -> Provenance[S]:
    """The configuration of `words`, not yet checked by the settings classes, and who set each value.

    Raises what `merge_all` raises.
    """
    merged = merge_all(command, words)
    layers: dict[str, list[Layer]] = {name: [] for name in (*merged.choices, *(key.name for key in merged.keys))}
    for name, layer in (*_class_defaults(merged), *_conf_layers(command, merged.choices), *_spoken(words, merged)):
        if name in layers:
            layers[name].append(layer)
    return Provenance(merged, layers)


def value_of(merged: Merged[Any], name: str) -> Any:
    """The value of a dotted key; `MISSING` where nobody gave one."""
    part, _, field = name.rpartition(".")
    if OmegaConf.is_missing(OmegaConf.select(merged.config, part) if part else merged.config, field):
        return MISSING
    value = OmegaConf.select(merged.config, name)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def owner_of(merged: Merged[Any], name: str) -> type:
    """The chosen settings class that has the field of a dotted key."""
    part = name.rpartition(".")[0]
    return cast(type, OmegaConf.get_type(merged.config, part)) if part else merged.command.settings


def _home_of(merged: Merged[Any], name: str) -> type:
    """The class that declares the field: a base of its owner if the owner inherits it unchanged."""
    field = name.rpartition(".")[2]
    return next(cls for cls in owner_of(merged, name).__mro__ if field in inspect.get_annotations(cls))


def _class_defaults(merged: Merged[Any]) -> Iterator[tuple[str, Layer]]:
    """The defaults of the settings classes, and the values that the command's class gives its parts instead."""
    fields = dataclasses.fields(merged.command.settings)
    made = {field.name: field.default_factory() for field in fields if callable(field.default_factory)}
    parts = {name: value for name, value in made.items() if dataclasses.is_dataclass(value)}  # no groups among them
    for key in merged.keys:
        if key.default != MISSING:
            yield key.name, Layer(schema.as_text(key.default), _class_name(_home_of(merged, key.name)))
        part, _, field = key.name.partition(".")
        if part in parts and (own := getattr(parts[part], field)) != key.default:
            yield key.name, Layer(schema.as_text(own), _class_name(merged.command.settings))


def _class_name(cls: type) -> str:
    """`OptimSettings in rlpost/settings/training.py`, as an editor or grep finds it."""
    module = cls.__module__
    own = module.partition(".")[0] == "rlpost"
    return f"{cls.__name__} in {module.replace('.', '/') + '.py' if own else inspect.getsourcefile(cls)}"


def _conf_layers(command: Command[Any], choices: Mapping[str, str]) -> Iterator[tuple[str, Layer]]:
    """The default options, then the values from conf/ in the order in which Hydra merges its files."""
    file = schema.conf_file(command.name)
    lines = {} if file is None else line_numbers(file)
    for group, option in schema.default_choices(command).items():
        own = f"{command.verb} in rlpost/catalog.py"
        yield group, Layer(option, own if file is None else _place(file, lines[f"defaults.{group}"]))
    with files_of_conf(command, choices) as (root, words):
        loader = GlobalHydra.instance().config_loader()
        merged = loader.compute_defaults_list(root, words, RunMode.RUN).defaults
    for part in merged:
        if part.config_path is None or part.package is None or (file := schema.conf_file(part.config_path)) is None:
            continue
        lines = line_numbers(file)
        content = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(file), resolve=False))
        content.pop("defaults", None)
        for name, value in schema.flat(content).items():
            key = f"{part.package}.{name}" if part.package else name
            yield key, Layer(schema.as_text(value), _place(file, lines[name]))


def _spoken(words: Sequence[str], merged: Merged[Any]) -> Iterator[tuple[str, Layer]]:
    """All of the recipe's settings, also those without effect, and then the command line's."""
    recipe = next((o.text for o in parse_words(words) if o.key == "recipe"), None)
    from_recipe = read_recipe(recipe, merged.command) if recipe is not None else []
    given = {override.key for override in merged.given}
    for override in (*from_recipe, *(override for override in merged.given if not override.source)):
        yield override.key, Layer(override.text, override.source or COMMAND_LINE, override.key in given)


def _place(file: Path, line: int) -> str:
    return f"{_shown_path(file)}, line {line}"


def _shown_path(file: Path) -> str:
    """The path of a file of conf/ or a recipe, relative to the current folder or to rlpost's own."""
    for folder in (Path.cwd(), *(folder.parent for folder in schema.search_folders("conf"))):
        if file.is_relative_to(folder):
            return str(file.relative_to(folder))
    return str(file)


# A recipe to begin with
_LIKELY = (  # what people change first; every other setting is commented out
    "steps",
    "seed",
    "prompts_per_step",
    "group_size",
    "env.path",
    "env.limit",
    "env.max_completion_tokens",
    "sampling.temperature",
    "loss.kl_coef",
    "optim.lr",
)
_REWARD = "env.reward"  # mostly one of the user's own
_A_NAME = "name"  # a value that makes nothing run, unless every value of the key does
_PLAIN = re.compile(r"[A-Za-z][\w./:-]*\w")
_VALUE_COLUMN = 48  # column of the comments


def write_starter(file: Path, command: Command[Any], words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Write the recipe of `command` under `words` to a new file.

    Returns the keys that still need a value in the recipe, and the words that the command line must give because
    they name code: the given ones, and an example for env.reward if it has no value.

    Raises ConfigError if the file exists, and what `compose` raises for words that cannot work.
    """
    if file.exists():
        raise ConfigError(f"{shown(str(file))} exists already: give another name, or remove it first")
    merged = merge_all(command, words)
    needed = [key for key in merged.keys if value_of(merged, key.name) == MISSING]
    beside = [key for key in needed if key.name == _REWARD]
    if not needed:
        compose(command, words)  # find an impossible combination here rather than in every later use
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("x", encoding="utf-8") as stream:
        stream.write(_starter(merged))
    code = [f"{override.key}={override.text}" for override in merged.given if is_code(override, merged.choices)]
    examples = [f"{key.name}={key.runs.example}" for key in beside if key.runs is not None]
    return [key.name for key in needed if key not in beside], [*code, *examples]


def _starter(merged: Merged[Any]) -> str:
    """The text of the recipe; it composes to the same settings, with or without its commented lines.

    Code is the exception: a recipe cannot name it, so those words stay on the command line.
    """
    given = {override.key for override in merged.given}
    code = {override.key for override in merged.given if is_code(override, merged.choices)}
    lines = [
        f"# {merged.choices['model']} on {merged.choices['env']}",  # the description in rlpost config list
        f"command: {merged.command.verb}",
        "",
        "# A line with a # before its key says what holds anyway: take the # away to change it.",
    ]
    part = ""
    for key in sorted(merged.keys, key=lambda key: "." in key.name):  # keys of no group first
        if (now := key.name.rpartition(".")[0]) != part:
            part = now
            lines += ["", *_heading(part, merged)]
        lines.append(_starter_line(key, merged, key.name in given or key.name in _LIKELY, key.name in code))
    return "\n".join(lines) + "\n"


def _heading(part: str, merged: Merged[Any]) -> list[str]:
    """The comment over a part of the configuration, and for a group its option."""
    meaning = comments.docs_of(merged.command.settings).get(part) or part
    if part not in merged.choices:
        return [f"# {meaning}"]
    return [f"# {meaning}: {' | '.join(schema.options(part, merged.command))}", f"{part}: {merged.choices[part]}"]


def _starter_line(key: schema.Key, merged: Merged[Any], active: bool, code: bool) -> str:
    value = value_of(merged, key.name)
    missing = value == MISSING
    text = f"{key.name}: {MISSING if missing else _yaml_text(_as_json(value))}"
    text = text if active and not missing and not code else f"# {text}"
    first = "on the command line only, since it names code" if code else _where(key)
    remarks = ["needs a value" * missing, first, " | ".join(key.choices), _meaning_of(merged, key.name)]
    remark = "; ".join(filter(None, remarks))
    return f"{text.ljust(_VALUE_COLUMN)}  # {remark}" if remark else text


def _where(key: schema.Key) -> str:
    """The places where a key may be set, if some of its values run code."""
    if key.runs is None:
        return ""
    if key.runs.beside:
        return f"in a file {key.runs.beside} alone"
    return "on the command line only" if makes_run(key, [_A_NAME]) else f"a file cannot {key.runs.no_file}"


def _yaml_text(value: Any) -> str:
    """A value on one line of YAML that OmegaConf's loader reads as the same value."""
    if isinstance(value, list):
        return "[" + ", ".join(_yaml_text(element) for element in value) + "]"
    if not isinstance(value, str):
        return schema.as_text(value)
    if _PLAIN.fullmatch(value) and OmegaConf.create(f"a: {value}").a == value:
        return value
    return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=10**9).rstrip("\n")
