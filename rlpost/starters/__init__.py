"""Templates that `rlpost env new` and `rlpost reward new` copy, with the names in them replaced."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
import sys
from pathlib import Path

from rlpost.errors import ConfigError
from rlpost.files import expanded


def write_starter(kind: str, name: str, out: Path | None) -> str:
    """Write the starter `kind` (env or reward) to `out`, else to NAME.py here; returns the path quoted for a command.

    Raises ConfigError for a name that Python or rlpost cannot use, and for a file that exists or cannot be written.
    """
    _check_name(kind, name)
    file = Path(f"{name}.py") if out is None else expanded(out)
    template = Path(__file__).with_name(f"{kind}.py").read_text(encoding="utf-8")
    shown = str(file) if len(file.parts) > 1 else f"./{file}"
    names = {
        f"./my_{kind}.py": shlex.quote(shown),
        f"my_{kind}": name,
        f"My{kind.capitalize()}": name.title().replace("_", ""),
    }
    text = re.sub("|".join(map(re.escape, names)), lambda found: names[found.group()], template)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; give another name, or --out FILE") from error
    return shlex.quote(shown)


def _check_name(kind: str, name: str) -> None:
    """Raise ConfigError for a name that is not a Python name, or that would hide a module."""
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is not a Python name, which the file and its code need: use letters, digits and _")
    installed = name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None
    if installed and not Path(f"{name}.py").exists():
        raise ConfigError(f"{name} is a Python module already, which {name}.py would hide; write my_{name}")
