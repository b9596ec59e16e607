"""YAML of settings is small, shallow and says each thing where it stands; other YAML is refused before it is built."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import yaml

from rlpost.errors import ConfigError

LARGEST = 1_000_000  # characters
DEEPEST = 20  # lists and mappings in each other


def check_plain(file: Path) -> None:
    """Raise ConfigError for a file whose aliases or depth could fill the memory or never end when it is read.

    What is no YAML is left to what reads it. Raises OSError and UnicodeDecodeError for a file that cannot be read.
    """
    text = file.read_text(encoding="utf-8")
    if len(text) > LARGEST:
        raise ConfigError(f"{file} has {len(text):,} characters, more than settings take ({LARGEST:,}): shorten it")
    try:
        _check_events(file, text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:  # or libyaml's own limit of depth, which the loaders in Python do not have
        with suppress(yaml.YAMLError):
            _check_events(file, text, yaml.SafeLoader)


def _check_events(file: Path, text: str, loader: type) -> None:
    """Raise ConfigError at the first alias, and where it is too deep."""
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{file}, line {line}: *{event.anchor} stands for another place: write it out here")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ConfigError(f"{file}, line {line}: nested deeper than {DEEPEST}: settings are flat")
