"""YAML of settings is small, shallow and says each thing where it stands; other YAML is refused before it is built."""

from __future__ import annotations

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
    depth = 0
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            line = event.start_mark.line + 1
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(f"{file}, line {line}: *{event.anchor} stands for another place: write it out here")
            opens = isinstance(event, yaml.CollectionStartEvent)
            depth += opens - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ConfigError(f"{file}, line {line}: nested deeper than {DEEPEST}: settings are flat")
    except yaml.YAMLError:
        return
