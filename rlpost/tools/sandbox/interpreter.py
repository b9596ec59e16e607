"""Which Python runs in a sandbox, and what of the disk it has to see."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlpost.errors import SandboxError

_QUESTION = (
    "import site, sys, sysconfig; v = sys.version_info;"
    "print(f'{sys.base_prefix}/bin/python{v[0]}.{v[1]}', sys.base_prefix, sysconfig.get_path('stdlib'),"
    " *site.getsitepackages(), sep='\\n')"
)


@dataclass(frozen=True)
class Interpreter:
    """A Python whose files lie under one prefix, as system, pyenv, uv and conda Pythons do.

    A virtual environment's Python is that of its base; `packages` are the environment's own folders.
    """

    executable: Path
    prefix: Path
    stdlib: Path
    packages: tuple[Path, ...]

    @classmethod
    @cache
    def running(cls) -> Interpreter:
        """The Python that runs this program."""
        name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        prefix = Path(sys.base_prefix)
        return cls._of(prefix / "bin" / name, prefix, Path(sysconfig.get_paths()["stdlib"]), site.getsitepackages())

    @classmethod
    @cache
    def at(cls, path: str) -> Interpreter:
        """The Python at `path`, asked for its folders. Raises SandboxError where there is none."""
        try:
            asked = subprocess.run(
                [path, "-I", "-c", _QUESTION], capture_output=True, text=True, timeout=20, check=True
            )
            executable, prefix, stdlib, *packages = asked.stdout.splitlines()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise SandboxError(f"{path} cannot be asked for its folders ({error}): name a Python that runs") from None
        return cls._of(Path(executable), Path(prefix), Path(stdlib), packages)

    @classmethod
    def _of(cls, executable: Path, prefix: Path, stdlib: Path, packages: Sequence[str]) -> Interpreter:
        if not executable.is_file():
            raise SandboxError(f"this Python has no {executable}: name one with python=, for example /usr/bin/python3")
        installed = tuple(Path(folder) for folder in packages if os.path.isdir(folder))
        return cls(executable.resolve(), prefix.resolve(), stdlib.resolve(), installed)

    def readable(self) -> list[Path]:
        """Files and folders that it needs, and no more of the prefix: that may lie in somebody's home."""
        wanted = [self.executable, *(self.prefix / name for name in ("lib", "lib64"))]
        return [path for path in wanted if path.exists() and not path.is_symlink()]

    def hidden(self) -> list[Path]:
        """Folders of installed packages below those: they may hold the answers to the tasks."""
        beside = [self.stdlib / "site-packages", self.stdlib / "dist-packages", Path("/usr/lib/python3/dist-packages")]
        return [folder for folder in beside if folder.is_dir()]


def closed_to_others(paths: Sequence[Path]) -> bool:
    """Whether some of `paths`, or a folder above it, may not be entered by other users."""
    return any(not part.stat().st_mode & os.X_OK for path in paths for part in (path, *path.parents))
