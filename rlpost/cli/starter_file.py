"""Writing a starter: a copy of a file in rlpost/starters with names of the user's own."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import rlpost
from rlpost.cli.terminal import print_json
from rlpost.errors import ConfigError, DataError
from rlpost.home import expanded
from rlpost.text import printable


def write_starter(kind: str, name: str, out: Path | None) -> str:
    """Write the starter `kind` (env or reward) as `out`, else as NAME.py here; returns the path as a command says it.

    Raises ConfigError for a name that Python or rlpost cannot use and for a file that exists,
    DataError where the disk does not take it.
    """
    _check_name(kind, name)
    file = Path(f"{name}.py") if out is None else expanded(out)
    if file.suffix != ".py":
        raise ConfigError(f"--out {file} is no Python file: give it a name that ends in .py")
    if not file.parent.is_dir():
        raise ConfigError(f"--out {file}: there is no folder {file.parent}; make it first")
    template = (Path(rlpost.__file__).parent / "starters" / f"{kind}.py").read_text(encoding="utf-8")
    shown = str(file) if len(file.parts) > 1 else f"./{file}"
    camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    names = {
        f"./my_{kind}.py": shlex.quote(shown),
        f"python my_{kind}.py": f"python {shlex.quote(str(file))}",
        f"my_{kind}": name,
        f"My{kind.capitalize()}": camel,
    }
    text = re.sub("|".join(map(re.escape, names)), lambda found: names[found.group()], template)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} exists already: give another name, or --out FILE") from None
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error.strerror}; give --out FILE") from error
    return shlex.quote(shown)


def tell_starter(file: str, commands: Mapping[str, str], *, as_json: bool) -> None:
    """Say what was written (as `write_starter` returned it), and what can be done with it."""
    if as_json:
        named = {what.partition(" ")[0]: command for what, command in commands.items()}
        print_json({"file": shlex.split(file)[0], **named})
        return
    lines = [f"wrote {file}", *(f"{what}:  {command}" for what, command in commands.items())]
    print("\n".join(printable(line) for line in lines))


def _check_name(kind: str, name: str) -> None:
    """Raise ConfigError for a name that is no Python name, or that would hide something of that name."""
    if not re.fullmatch(r"[A-Za-z]\w*", name, flags=re.ASCII) or keyword.iskeyword(name):
        fitting = re.sub(r"\W+", "_", name.removesuffix(".py"), flags=re.ASCII).strip("_").lower() or kind
        fitting = fitting if fitting[0].isalpha() and not keyword.iskeyword(fitting) else f"my_{fitting}"
        raise ConfigError(f"{name!r} is no Python name, which the file and its code need; write {fitting}")
    installed = name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None
    if installed and not Path(f"{name}.py").exists():
        raise ConfigError(f"{name} is a Python module already, which {name}.py would hide; write my_{name}")
