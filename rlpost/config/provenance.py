"""Who set a value: every place that says something about a key, in the order in which they count."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, cast

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from rlpost.catalog import Command, S
from rlpost.config.compose import Merged, files_of_conf, merge_all, model_path
from rlpost.config.keys import flat
from rlpost.config.overrides import Override, as_text, parse_words
from rlpost.config.recipes import read_recipe
from rlpost.config.registry import conf_file, default_choices, search_folders
from rlpost.settings.checks import MISSING

COMMAND_LINE = "the command line"


@dataclass(frozen=True)
class Layer:
    """What one place says about a key.

    `where` is a settings class, a file (with its line) or the command line. `effective` is False for
    what a recipe says about an option that the command line replaced with another.
    """

    text: str
    where: str
    effective: bool = True


@dataclass(frozen=True)
class Provenance(Generic[S]):
    """A configuration with, for every key and every group, the layers that speak of it, the last of which counts."""

    merged: Merged[S]
    keys: dict[str, list[Layer]]
    groups: dict[str, list[Layer]]

    def winner(self, name: str) -> Layer | None:
        """The layer that sets a key or chooses a group's option; None for a key that has no value yet."""
        layers = self.keys[name] if name in self.keys else self.groups[name]
        return next((layer for layer in reversed(layers) if layer.effective), None)


def provenance(command: Command[S], words: Sequence[str] = ()) -> Provenance[S]:
    """What `words` come to, and who says what about it; whether it can work is not asked.

    Raises what `merge_all` raises.
    """
    merged = merge_all(command, words)
    keys: dict[str, list[Layer]] = {key.name: [] for key in merged.keys}
    groups: dict[str, list[Layer]] = {group: [] for group in merged.choices}
    _class_defaults(merged, keys)
    for name, layer in _conf_layers(command, merged.choices):
        (groups if name in groups else keys).setdefault(name, []).append(layer)
    spoken_of = {override.key for override in merged.given}
    for override in _spoken(command, words, merged):
        layer = Layer(override.text, override.source or COMMAND_LINE, override.key in spoken_of)
        (groups if override.key in groups else keys).setdefault(override.key, []).append(layer)
    return Provenance(merged, {key.name: keys[key.name] for key in merged.keys}, groups)


def value_of(merged: Merged[Any], name: str) -> Any:
    """The value of a dotted key; `MISSING` where nobody gave one."""
    part, _, field = name.rpartition(".")
    if OmegaConf.is_missing(OmegaConf.select(merged.config, part) if part else merged.config, field):
        return MISSING
    value = OmegaConf.select(merged.config, name)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def owner_of(merged: Merged[Any], name: str) -> type:
    """The settings class that a dotted key is a field of, as it was chosen."""
    part = name.rpartition(".")[0]
    return cast(type, OmegaConf.get_type(merged.config, part)) if part else merged.command.settings


def home_of(merged: Merged[Any], name: str) -> type:
    """The class that declares the field: a base of its owner's where it is inherited unchanged."""
    field = name.rpartition(".")[2]
    return next(cls for cls in owner_of(merged, name).__mro__ if field in inspect.get_annotations(cls))


def _class_defaults(merged: Merged[Any], keys: Mapping[str, list[Layer]]) -> None:
    """What the settings classes themselves say; a part that the command's class fills differently counts there."""
    parts = _parts(merged.command.settings)
    for key in merged.keys:
        if key.default != MISSING:
            keys[key.name].append(Layer(as_text(key.default), _class_name(home_of(merged, key.name))))
        part, _, field = key.name.partition(".")
        if part in parts and (own := getattr(parts[part], field)) != key.default:
            keys[key.name].append(Layer(as_text(own), _class_name(merged.command.settings)))


def _parts(settings: type) -> dict[str, Any]:
    """The parts of a command that are no groups, as the command's class fills them."""
    made = {f.name: f.default_factory() for f in dataclasses.fields(settings) if callable(f.default_factory)}
    return {name: value for name, value in made.items() if dataclasses.is_dataclass(value)}


def _class_name(cls: type) -> str:
    """`OptimSettings in rlpost/settings/learning.py`, as an editor or grep finds it."""
    module = cls.__module__
    own = module.partition(".")[0] == "rlpost"
    return f"{cls.__name__} in {module.replace('.', '/') + '.py' if own else inspect.getsourcefile(cls)}"


def _conf_layers(command: Command[Any], choices: Mapping[str, str]) -> list[tuple[str, Layer]]:
    """What the files of conf/ say, in the order in which Hydra merges them under these choices."""
    layers: list[tuple[str, Layer]] = []
    with files_of_conf(command, choices) as (root, words):
        loader = GlobalHydra.instance().config_loader()
        merged = loader.compute_defaults_list(root, words, RunMode.RUN).defaults
    for part in merged:
        if part.config_path is None or part.package is None or part.package.startswith("hydra"):
            continue
        file = conf_file(part.config_path)
        if file is not None:
            layers += _said_by(file, part.package)
    return [*_default_choices(command), *layers]


def _said_by(file: Path, package: str) -> list[tuple[str, Layer]]:
    content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    lines = _lines_of(file)
    assert isinstance(content, dict)
    body = {str(name): value for name, value in content.items() if name != "defaults"}
    return [
        (f"{package}.{name}" if package else name, Layer(as_text(value), f"{shown_path(file)}, line {lines[name]}"))
        for name, value in flat(body).items()
    ]


def _default_choices(command: Command[Any]) -> list[tuple[str, Layer]]:
    """The options that hold where none is chosen."""
    file = conf_file(command.name)
    lines = {} if file is None else _lines_of(file)
    own = f"{command.verb} in rlpost/catalog.py"
    return [
        (group, Layer(option, own if file is None else f"{shown_path(file)}, line {lines[f'defaults.{group}']}"))
        for group, option in default_choices(command).items()
    ]


def _lines_of(file: Path) -> dict[str, int]:
    """Dotted key -> line, of a YAML file that has been read before."""
    found: dict[str, int] = {}

    def walk(node: yaml.Node, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                found[f"{prefix}{key.value}"] = key.start_mark.line + 1
                walk(value, f"{prefix}{key.value}.")
        elif isinstance(node, yaml.SequenceNode):
            for element in node.value:
                walk(element, prefix)

    walk(cast(yaml.Node, yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)), "")
    return found


def _spoken(command: Command[Any], words: Sequence[str], merged: Merged[Any]) -> list[Override]:
    """All of the recipe's settings, those without effect too, and then the command line's."""
    recipe = next((o.text for o in parse_words(words) if o.key == "recipe"), None)
    told = read_recipe(recipe, command) if recipe is not None else []
    return [*map(model_path, told), *(override for override in merged.given if not override.source)]


def shown_path(file: Path) -> str:
    """A file of conf/ or a recipe as a person finds it: from here, or as rlpost's own."""
    for folder in (Path.cwd(), *(folder.parent for folder in search_folders("conf"))):
        if file.is_relative_to(folder):
            return str(file.relative_to(folder))
    return str(file)
