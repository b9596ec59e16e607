"""Words in, settings out: Hydra composes conf/ and the choices, and each value is checked against its key.

A mix of environments is composed source by source, each with the rules for `env=NAME`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, Generic, cast

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from rlpost.catalog import CHOICES, TRAIN_SFT, Command, S
from rlpost.config import schema
from rlpost.config.code import check_code
from rlpost.config.overrides import YAML_ERRORS, Override, as_model_path, error_at, merge, parse_value, parse_words
from rlpost.config.paths import (
    LATEST,
    check_class,
    check_data_path,
    check_model_folder,
    check_reward,
    is_adapter_folder,
    resolve_adapter_path,
    resolve_model_path,
)
from rlpost.errors import ConfigError, DataError
from rlpost.files import expanded, slug
from rlpost.settings import EnvSettings, MixSettings, OwnRowsSettings, ToolsSettings
from rlpost.settings.env import LIMITS, Source, SourceText, check_tools
from rlpost.settings.foreign import FactorySettings

_OF_ANY = replace(TRAIN_SFT, rows="")  # has every key of every environment


@dataclass(frozen=True)
class Merged(Generic[S]):
    """The values from conf/, the recipe and the words, each of its key's type, not yet checked by the settings classes.

    `config` is typed by the settings classes; a value that nobody gave is missing in it. `choices` maps each group to
    its option, `keys` can be set under these choices, `overrides` are the recipe's and the user's words: they compose
    to the same settings again, which the resolved YAML alone does not, since it does not say which classes were
    chosen. `given` are the same words with their sources.
    """

    command: Command[S]
    config: DictConfig
    choices: dict[str, str]
    keys: list[schema.Key]
    overrides: list[str]
    given: list[Override]

    def text_of(self, key: str) -> str:
        """The value of `key`, or the option where it is a group, as a word would give it."""
        return self.choices[key] if key in self.choices else schema.as_text(OmegaConf.select(self.config, key))


@dataclass(frozen=True)
class Composed(Merged[S]):
    """A checked configuration."""

    settings: S
    yaml: str
    kept: Mapping[str, Any] | None = None  # the settings of the run that is resumed or done again, by key
    not_used: list[str] = field(default_factory=list)  # what the rows say and nothing reads, in words
    rows: list[Any] = field(default_factory=list)  # `rlpost.envs.row_checks.Look` at those of each environment
    environment_note: str = ""  # whose environment it is, in words, where a run is named

    @property
    def model_name(self) -> str:
        """The chosen option of the model, or the end of a path that replaced it."""
        settings: Any = self.settings
        is_given = any(word.startswith("model.path=") for word in self.overrides)
        return slug(settings.model.path) if is_given else self.choices["model"]

    @property
    def stem(self) -> str:
        """The default name of a run, without its number."""
        return f"{self.command.name}-{self.choices['env']}-{self.model_name}"

    def as_dict(self) -> dict[str, Any]:
        """The whole configuration in plain values, nested as in `yaml`."""
        return yaml.safe_load(self.yaml)


def compose(command: Command[S], words: Sequence[str] = (), kept: Sequence[Override] = ()) -> Composed[S]:
    """The settings of `command` under the words `key=value` of a command line.

    `kept` are the settings of a run that is resumed: the words replace them as they do a recipe's
    lines. Imports neither torch nor transformers. Raises ConfigError for every word, recipe, file of
    conf/ and combination that cannot work, and DataError for a local `env.path` that is missing.
    """
    merged = merge_all(command, words, kept)
    settings = _to_object(command, merged.config)
    assert isinstance(settings, command.settings)
    own: Any = settings
    _check_model(own.model.path, "model.path")
    if getattr(own, "teacher", None) is not None:
        _check_model(own.teacher, "teacher")
    if hasattr(own, "lora") and own.lora.path is not None:
        resolve_adapter_path(own.lora.path)
    env, sources = own.env, sources_of(own.env) if isinstance(own.env, MixSettings) else []
    _check_environment(env, sources, getattr(own, "tools", ToolsSettings()))
    mixes = bool(sources) and not command.rows
    if "env.reward" not in command.optional or mixes or getattr(own.eval, "accuracy", False):
        check_scored(env)
    content = cast(dict[str, Any], OmegaConf.to_container(merged.config, enum_to_str=True))
    groups_first = sorted(content.items(), key=lambda item: not isinstance(item[1], dict))
    yaml_text = OmegaConf.to_yaml(OmegaConf.create(dict(groups_first)))
    return Composed(**vars(merged), settings=settings, yaml=yaml_text)


def merge_all(command: Command[S], words: Sequence[str] = (), kept: Sequence[Override] = ()) -> Merged[S]:
    """The values under `kept` and `words` before the settings classes check them.

    Raises ConfigError for every word, recipe and file of conf/ that cannot be read or does not fit.
    """
    overrides = expand(command, parse_words(words), kept)
    if plugins := [override for override in overrides if override.key == "plugin"]:
        from rlpost.config.plugins import load_plugins, plugin_paths

        load_plugins([path for override in plugins for path in plugin_paths(override)])
    groups = schema.groups_of(command.settings)
    chosen = [override for override in overrides if override.key in groups]
    wrong = [override for override in chosen if override.text not in schema.options(override.key, command)]
    config, choices = _compose_files(command, {o.key: o.text for o in chosen if o not in wrong})
    classes = {group: cast(type, OmegaConf.get_type(config, group)) for group in choices}
    keys = schema.keys_under(command, classes)
    unclear = tuple(f"{override.key}." for override in wrong)  # settings of options that cannot be chosen
    left_open = [key for key in schema.all_keys(command) if key.startswith(unclear)]
    if unknown := [o for o in overrides if o in wrong or o.key not in (*choices, *keys, *left_open)]:
        from rlpost.config.unknown import Vocabulary

        raise Vocabulary(command, choices).refusal(unknown)
    _leave_empty(config, command.optional)
    texts = [
        f"{o.key}={o.text if o.key in choices else schema.as_text(_set(config, keys[o.key], o))}" for o in overrides
    ]
    check_code(keys.values(), config, overrides)
    if OmegaConf.get_type(config, "env") is MixSettings and not OmegaConf.is_missing(config.env, "sources"):
        given = {override.key: override for override in overrides}
        origin = given["env.sources"].source if "env.sources" in given else "conf/"
        sources = _sources(command, list(config.env.sources), origin)
        config.env = OmegaConf.merge(config.env, _widened(sources, config.env, given))
    return Merged(command, config, choices, list(keys.values()), texts, overrides)


def expand(command: Command[Any], given: list[Override], kept: Sequence[Override] = ()) -> list[Override]:
    """The kept overrides, the recipe's and the user's, with `model=runs/x` written out as `model.path=runs/x`."""
    recipe = next((o.text for o in given if o.key == "recipe"), None)
    from_recipe: list[Override] = []
    if recipe is not None:
        from rlpost.config.recipes import read_recipe

        from_recipe = read_recipe(recipe, command)
    users = merge(from_recipe, [as_model_path(o) for o in given if o.key != "recipe"])
    if command.verb.startswith("train"):
        users = [_pinned(override) for override in users]
    return merge(kept, users)


# Sources of a mix of environments
_composed_sources: dict[tuple[str, ...], list[Source]] = {}  # by their texts, as composed last


def environments_of(env: EnvSettings) -> list[EnvSettings]:
    """The settings of each source of a mix; for any other environment `env` alone."""
    return [source.settings for source in sources_of(env)] if isinstance(env, MixSettings) else [env]


def check_scored(env: EnvSettings) -> None:
    """Raise ConfigError unless the environment, or each source of a mix, has a reward."""
    if not all(each.scores for each in environments_of(env)):
        raise ConfigError("env.reward is empty: give FILE.py:FUNCTION, or a name of rlpost config list reward")


def sources_of(settings: MixSettings) -> list[Source]:
    """The sources of a mix as environments of their own, with its split and within its limits."""
    return [source.within(settings) for source in sources_named(settings.sources)]


def sources_named(texts: Sequence[str]) -> list[Source]:
    """The sources that `texts`, a value of `env.sources`, name; not yet within the limits of a mix.

    Raises ConfigError for a source that does not compose, with the message for `env=NAME`.
    """
    return _composed_sources.get(tuple(texts)) or _sources(None, texts)


def _sources(command: Command[Any] | None, texts: Sequence[str], origin: str = "") -> list[Source]:
    """The sources that `texts` name for `command` (None: any), given at `origin` (empty: on the command line).

    The name of a source is the given one, else the environment's, numbered from the second on (dataset-2).
    """
    parsed = [SourceText.of(text) for text in texts]
    names = [each.name for each in parsed if each.name]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"env.sources has two sources named {twice}: give one of them another name=")
    found: list[Source] = []
    for text, each in zip(texts, parsed, strict=True):
        words = [Override("env", each.env, origin)]
        words += [Override(f"env.{key}", value, origin) for key, value in each.given.items()]
        try:
            merged = merge_all(command or _OF_ANY, kept=words)
            settings = _to_object(merged.command, OmegaConf.masked_copy(merged.config, "env"))["env"]
            _check_of_one(each, once_a_row=command is not None and bool(command.rows))
        except (ConfigError, DataError) as error:
            raise type(error)(f'env.sources "{text}": {error}') from None
        numbered = (f"{each.env}-{number}" if number > 1 else each.env for number in count(1))
        name = each.name or next(name for name in numbered if name not in names)
        names.append(name)
        found.append(Source(name, each.weight, text, settings))
    _composed_sources[tuple(texts)] = found
    return found


def _check_of_one(source: SourceText, *, once_a_row: bool) -> None:
    """Raise ConfigError if a source sets a value that only the whole mix has; weights mean nothing `once_a_row`."""
    if once_a_row and source.weight != 1:
        raise ConfigError(
            "rlpost train sft trains once on every row of every source, so a weight means nothing; leave it out"
        )
    if source.given.get("split") == "test":
        raise ConfigError(
            "the split test is what the mix is measured on: leave it out, or give env.split=test for all sources"
        )
    if "limit" in source.given:
        raise ConfigError("the whole mix has one limit on prompts: give env.limit")


def _widened(sources: Sequence[Source], mix: Any, given: Collection[str]) -> dict[str, int | None]:
    """The limits of a mix that are not `given`: the largest of any source, so that every source has room."""
    defaults = {field.name: field.default for field in fields(MixSettings)}
    unsaid = [key for key in LIMITS if f"env.{key}" not in given and getattr(mix, key) == defaults[key]]
    values = {key: [getattr(source.settings, key) for source in sources] for key in unsaid}
    return {key: None if None in each else max(each) for key, each in values.items()}


# From files and words to one configuration


def _compose_files(command: Command[Any], chosen: Mapping[str, str]) -> tuple[DictConfig, dict[str, str]]:
    """The files of conf/ under the chosen options, typed by their schemas, and every group's option."""
    offered = tuple((group, name, row.settings) for group, rows in CHOICES.items() for name, row in rows.items())
    found = [file for folder in schema.search_folders("conf") for file in folder.rglob("*.yaml") if file.is_file()]
    files = tuple((file, file.read_bytes()) for file in found)
    config, choices = _composed(command, tuple(chosen.items()), offered, files)
    return deepcopy(config), dict(choices)


@lru_cache(maxsize=64)  # Hydra takes 0.1 s, and sweeps, mixes and explanations ask for the same again and again
def _composed(command: Command[Any], chosen: tuple[tuple[str, str], ...], *_: Any) -> tuple[DictConfig, dict[str, str]]:
    """See `_compose_files`. The last two arguments are part of the cache's key alone: Hydra reads them itself."""
    groups = schema.groups_of(command.settings)
    _store_schemas(command, schema.default_choices(command) | dict(chosen))
    first, *others = (str(folder) for folder in schema.search_folders("conf"))
    quoted = [folder.replace("\\", "\\\\").replace('"', '\\"') for folder in others]
    searched = ",".join(f'"file://{folder}"' for folder in quoted)
    words = [f"hydra.searchpath=[{searched}]", *(f"{group}={option}" for group, option in chosen)]
    try:
        with initialize_config_dir(config_dir=first, version_base="1.3"):
            config = hydra_compose(f"{command.name}_root", words, return_hydra_config=True)
        choices = {group: str(config.hydra.runtime.choices[group]) for group in groups}
    except (HydraException, *YAML_ERRORS, RecursionError) as error:  # RecursionError: a file that includes itself
        raise ConfigError(f"conf/ does not compose: {_first_cause(error)}") from error
    if config.hydra.callbacks:
        raise ConfigError("hydra.callbacks stands in conf/, and a file cannot name code to run: remove it")
    with flag_override(config, ["struct", "readonly"], False):
        del config["hydra"]
    for group in groups:
        known = schema.classes_of(command, group)
        if OmegaConf.get_type(config, group) not in known.values():
            schemas = " or ".join(map(schema.schema_name, known))
            raise ConfigError(
                f"conf/{group}/{choices[group]}.yaml names no schema: begin it with defaults: [{schemas}, _self_]"
            )
    return config, choices


def _store_schemas(command: Command[Any], choices: Mapping[str, str]) -> None:
    """Store the settings classes that `command` under `choices` needs where YAML files can name them.

    An option that no file of conf/ describes is stored too. The root of the command is a node of its own: Hydra looks
    for the primary file in one folder only, and this node includes conf/COMMAND.yaml, the user's or the built-in, or
    holds the defaults itself.
    """
    store = ConfigStore.instance()
    # Hydra copies all of it in each call, for half of the time that it takes; it copies what it gives from it anyway
    vars(store)["__deepcopy__"] = lambda memo: store
    own = schema.schema_name(command.name)
    defaults = [own, *({group: option} for group, option in command.choices.items())]
    first = defaults if schema.conf_file(command.name) is None else [command.name]
    store.store(name=f"{command.name}_root", node={"defaults": [*first, "_self_"]})
    store.store(name=own, node=command.settings)
    for group in schema.groups_of(command.settings):
        store.repo.pop(group, None)  # Hydra would merge a new file with a stored option of the same name
        _, row = schema.made_of(group, choices.get(group, ""))
        for name in [row] if row else CHOICES[group]:  # a file that names no row may lead to any
            store.store(group=group, name=schema.schema_name(name), node=CHOICES[group][name].cls)
            if schema.conf_file(f"{group}/{name}") is None:
                store.store(group=group, name=name, node={"defaults": [schema.schema_name(name), "_self_"]})


def _pinned(override: Override) -> Override:
    """Replace a run given as `teacher` or `model.path` by its latest checkpoint, which a resumed run then has too."""
    text = override.text
    latest = expanded(text) / "checkpoints" / LATEST
    if override.key not in ("teacher", "model.path") or not text or not latest.exists():
        return override
    return replace(override, text=str(Path(text) / "checkpoints" / latest.resolve().name))


def _leave_empty(config: DictConfig, keys: Sequence[str]) -> None:
    """Set the lists under `keys` that have no value to an empty list; an option may have no such key."""
    for key in keys:
        group, _, name = key.rpartition(".")
        if OmegaConf.is_missing(OmegaConf.select(config, group), name):
            OmegaConf.update(config, key, [])


def _set(config: DictConfig, key: schema.Key, override: Override) -> Any:
    """Write one override into `config`; returns its typed value."""
    try:
        value = parse_value(key, override.text)
    except ConfigError as error:
        raise error_at(override, str(error)) from None
    OmegaConf.update(config, key.name, value)
    return value


def _to_object(command: Command[Any], config: DictConfig) -> Any:
    try:
        return OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        group, _, field = key.rpartition(".")
        owner = OmegaConf.get_type(config, group) if group else command.settings
        meaning = schema.docs_of(cast(type, owner)).get(field)
        raise ConfigError(
            f"{key} has no value: give {key}=..." + (f"; it takes {meaning}" if meaning else "")
        ) from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"conf/ does not compose: {_first_cause(error)}") from error


def _first_cause(error: BaseException) -> str:
    """The innermost cause on one line: it names the key, Hydra's own message does not."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = " ".join(str(error).split())
    for noise in (" Config search path:", " reference_type="):
        message = message.partition(noise)[0]
    return message or type(error).__name__


# Checks of the settings


def _check_environment(env: EnvSettings, sources: Sequence[Source], tools: ToolsSettings) -> None:
    """Check the environment, or each of its `sources` if it is a mix, together with the `tools`.

    Raises ConfigError, and DataError for a local path that is missing.
    """
    if not sources:
        _check_rows(env)
    for source in sources:
        try:
            _check_rows(source.settings)
            check_tools(source.settings, tools)
        except (ConfigError, DataError) as error:
            raise type(error)(f'env.sources "{source.text}": {error}') from None


def _check_model(path: str, key: str) -> None:
    if path in schema.options("model") and not Path(path).is_dir():
        meant = schema.read_yaml(schema.conf_file(f"model/{path}")).get("path")
        raise ConfigError(f"{key}={path} is neither a folder nor a hub id; did you mean {key}={meant}?")
    folder = Path(resolve_model_path(path, key))
    if folder.is_dir() and not is_adapter_folder(folder):
        check_model_folder(folder)


def _check_rows(env: EnvSettings) -> None:
    for key in ("path", "test_path"):
        if isinstance(data := getattr(env, key, None), str):
            check_data_path(data, f"env.{key}")
    if isinstance(env, OwnRowsSettings):
        for reward in env.reward:
            check_reward(reward, "env.reward")
        if env.accuracy is not None:
            check_reward(env.accuracy, "env.accuracy")
    if isinstance(env, FactorySettings):
        check_class(env.factory, "env.factory")
