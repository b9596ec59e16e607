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

from rlpost.config.compose import Composed, compose, files_of_conf, model_path
from rlpost.config.overrides import Override, as_text, parse_words
from rlpost.config.recipes import read_recipe
from rlpost.config.registry import SCHEMAS, Command, S, search_folders
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

    composed: Composed[S]
    keys: dict[str, list[Layer]]
    groups: dict[str, list[Layer]]

    def winner(self, name: str) -> Layer:
        """The layer that sets a key or chooses a group's option."""
        layers = self.keys[name] if name in self.keys else self.groups[name]
        return [layer for layer in layers if layer.effective][-1]


def provenance(command: Command[S], words: Sequence[str] = ()) -> Provenance[S]:
    """The configuration that `words` come to and who says what about it.

    Raises what `compose` raises.
    """
    composed = compose(command, words)
    keys: dict[str, list[Layer]] = {key.name: [] for key in composed.keys}
    groups: dict[str, list[Layer]] = {group: [] for group in composed.choices}
    _class_defaults(composed, keys)
    for name, layer in _conf_layers(command, composed.choices):
        (groups if name in groups else keys).setdefault(name, []).append(layer)
    spoken_of = {override.key for override in composed.given}
    for override in _spoken(command, words, composed):
        layer = Layer(override.text, override.source or COMMAND_LINE, override.key in spoken_of)
        (groups if override.key in groups else keys).setdefault(override.key, []).append(layer)
    return Provenance(composed, {key.name: keys[key.name] for key in composed.keys}, groups)


def value_of(settings: object, name: str) -> Any:
    """The value of a dotted key."""
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


def home_of(settings: object, name: str) -> type:
    """The settings class whose field the dotted key is, the base that declares it where it is inherited unchanged."""
    owner = type(value_of(settings, name.rpartition(".")[0])) if "." in name else type(settings)
    field = name.rpartition(".")[2]
    return next(cls for cls in owner.__mro__ if field in inspect.get_annotations(cls))


def _class_defaults(composed: Composed[Any], keys: Mapping[str, list[Layer]]) -> None:
    """What the settings classes themselves say; a part that the command's class fills differently counts there."""
    for key in composed.keys:
        home = home_of(composed.settings, key.name)
        if key.default != MISSING:
            keys[key.name].append(Layer(as_text(key.default), _class_name(home)))
        for part, field in _parts(composed.command.settings):
            if key.name.startswith(f"{part}.") and (own := getattr(field, key.name.partition(".")[2])) != key.default:
                keys[key.name].append(Layer(as_text(own), _class_name(composed.command.settings)))


def _parts(settings: type) -> list[tuple[str, Any]]:
    """The parts of a command that are no groups, as the command's class fills them."""
    return [
        (f.name, value)
        for f in dataclasses.fields(settings)
        if f.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(value := f.default_factory())
    ]


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
        file = _file_of(part.config_path)
        if file is not None:
            layers += _said_by(file, part.package)
    primary = _file_of(command.name)
    assert primary is not None
    chosen = [(group, layer) for group, layer in _default_choices(primary) if group in choices]
    return [*chosen, *layers]


def _file_of(config_path: str) -> Path | None:
    """The file of conf/ that is read, the user's before rlpost's own; None for a schema, which is no file."""
    group, _, name = config_path.rpartition("/")
    if name in SCHEMAS.get(group, {}):
        return None
    return next((f for folder in search_folders("conf") if (f := folder / f"{config_path}.yaml").is_file()), None)


def _said_by(file: Path, package: str) -> list[tuple[str, Layer]]:
    content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    lines = _lines_of(file)
    assert isinstance(content, dict)
    body = {str(name): value for name, value in content.items() if name != "defaults"}
    return [
        (f"{package}.{name}" if package else name, Layer(as_text(value), f"{shown_path(file)}, line {lines[name]}"))
        for name, value in _flat(body).items()
    ]


def _default_choices(file: Path) -> list[tuple[str, Layer]]:
    """The options that a command's own file chooses in its defaults list."""
    root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    entries = next((node.value for key, node in root.value if key.value == "defaults"), [])
    return [
        (group.value, Layer(option.value, f"{shown_path(file)}, line {group.start_mark.line + 1}"))
        for entry in entries
        if isinstance(entry, yaml.MappingNode)
        for group, option in entry.value
    ]


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in content.items():
        dotted = f"{prefix}{name}"
        flat |= _flat(value, f"{dotted}.") if isinstance(value, dict) else {dotted: value}
    return flat


def _lines_of(file: Path) -> dict[str, int]:
    """Dotted key -> line, of a YAML file that has been read before."""
    found: dict[str, int] = {}

    def walk(node: yaml.Node, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                found[f"{prefix}{key.value}"] = key.start_mark.line + 1
                walk(value, f"{prefix}{key.value}.")

    walk(cast(yaml.Node, yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)), "")
    return found


def _spoken(command: Command[Any], words: Sequence[str], composed: Composed[Any]) -> list[Override]:
    """All of the recipe's settings, those without effect too, and then the command line's."""
    recipe = next((o.text for o in parse_words(words) if o.key == "recipe"), None)
    told = read_recipe(recipe, command) if recipe is not None else []
    return [*map(model_path, told), *(override for override in composed.given if not override.source)]


def shown_path(file: Path) -> str:
    """A file of conf/ or a recipe as a person finds it: from here, or as rlpost's own."""
    for folder in (Path.cwd(), *(folder.parent for folder in search_folders("conf"))):
        if file.is_relative_to(folder):
            return str(file.relative_to(folder))
    return str(file)
