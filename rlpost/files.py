"""Files: replaced as a whole, cached as JSON, locked, measured, and paths as people write them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from rlpost.errors import CheckpointError, DataError

T = TypeVar("T")

log = logging.getLogger("rlpost")
MANIFEST = (
    "manifest.json"  # of a checkpoint: size and SHA-256 of every file; written last, so one without it is not whole
)
MORE_SHARED = "give the container more shared memory (docker run --shm-size=8g)"

_ELEMENT = re.compile(r"""\s*("[^"]*"|'[^']*'|[^,]+)""")


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """A path beside `file` to write to, which replaces `file` when the block ends without an error.

    Processes may write the same file at once: the last one wins. `file` stays as it was if the block raises, or if
    the machine stops before its disk has the new content.
    """
    making = file.with_name(f".{file.name}.{os.urandom(4).hex()}.incomplete")  # a process id is not unique on two hosts
    try:
        yield making
        sync(making)
        os.replace(making, file)
        sync(file.parent)
    finally:
        making.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_tree(folder: Path) -> None:
    """`sync` a folder and everything below it."""
    for where, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(where) / name)
        sync(Path(where))


def give_mode_of(file: Path, folder: Path) -> None:
    """Give every file below `folder` the permissions of `file`: safetensors lets only the owner read what it writes."""
    mode = file.stat().st_mode
    for where, _, names in os.walk(folder):
        for name in names:
            os.chmod(os.path.join(where, name), mode)


def json_in(file: Path) -> Any:
    """The content of a JSON file. Raises OSError, and ValueError for invalid JSON or JSON nested too deep."""
    return json.loads(file.read_text(encoding="utf-8"))


def remembered(file: Path, make: Callable[[], dict[str, Any]], read: Callable[[Any], T], making: str) -> T:
    """`read(content)` of the JSON cached in `file`; if there is none, `make` makes it and it is cached there.

    If the file cannot be read or written, a warning is logged instead of an error; `making` says in it what is done
    again, such as "the speed of products is measured".
    """
    try:
        return read(json_in(file))
    except FileNotFoundError:
        pass  # not made yet
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read (%s): %s again", file, error, making)
    content = make()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replaced(file) as beside:
            beside.write_text(json.dumps(content, indent=1), encoding="utf-8")
    except OSError as error:
        log.warning("%s cannot be written (%s): %s each time", file, error, making)
    return read(content)


def made_once(final: Path, proof: str, make: Callable[[Path], None]) -> Path:
    """The folder `final` of the cache; without its file `proof`, `make` fills a folder that takes its place."""
    if (final / proof).is_file():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=final.parent) as scratch:
            making = Path(scratch) / final.name
            make(making)
            try:
                os.rename(making, final)
            except OSError:  # another process was first, or an incomplete folder lies there
                if not (final / proof).is_file():
                    shutil.rmtree(final)
                    os.rename(making, final)
    except OSError as error:
        raise DataError(f"cannot write the cache {final}: {error}; set XDG_CACHE_HOME to a writable folder") from error
    return final


def locked(file: IO[str], *, shared: bool = False) -> bool:
    """Lock an open file until it is closed; False if another process holds the lock."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def bytes_of(folder: Path) -> int:
    """Bytes of all files below `folder`; links count as links, files removed meanwhile not at all."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total


def sha256(file: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_manifest(checkpoint: Path, advice: str) -> dict[Path, tuple[int, str]]:
    """File -> size and SHA-256. Raises CheckpointError, ending in `advice`, if it cannot be read."""
    try:
        manifest = json_in(checkpoint / MANIFEST)
        return {checkpoint / name: (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
    except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint} is not a complete checkpoint: its {MANIFEST} cannot be read ({error}); {advice}"
        ) from error


def check_listed(file: Path, expected: tuple[int, str] | None, advice: str) -> None:
    """Raise CheckpointError, ending in `advice`, unless `file` has the `expected` size and SHA-256."""
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: the checkpoint is damaged, {advice}")
    if (file.stat().st_size, sha256(file)) != expected:
        raise CheckpointError(f"{file} has changed since it was written: the checkpoint is damaged, {advice}")


def digest_of(files: Iterable[Path]) -> str:
    """A short hash of the content of `files`, in their order."""
    content = hashlib.sha256()
    for file in files:
        content.update(file.read_bytes())
    return content.hexdigest()[:12]


def expanded(path: str | Path) -> Path:
    """`path` with a leading `~` expanded. Raises DataError if that home folder is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"{path} begins with a home folder that is not known here: set HOME (for the cache, XDG_CACHE_HOME will do)"
        ) from error


def paths_in(text: str) -> list[str]:
    """The paths in a list written as text, "[a.jsonl,b.jsonl]", or the text itself as the only path.

    A path with a comma must be quoted.
    """
    if not (text.startswith("[") and text.endswith("]")):
        return [text]
    return [path.strip().strip("\"'") for path in _ELEMENT.findall(text[1:-1]) if path.strip()]


_NAMELESS = re.compile(r"model|checkpoints|latest|best|step-\d+")  # folders inside a run that do not tell runs apart


def slug(path: str) -> str:
    """A short folder name for a model path: `Qwen/Qwen2.5-0.5B` -> `qwen2.5-0.5b`."""
    parts = [part for part in Path(path).parts if not _NAMELESS.fullmatch(part)]
    return re.sub(r"[^a-z0-9.]+", "-", parts[-1].lower()).strip("-.") if parts else "model"


def memory_folder() -> Path:
    """The folder whose files are in memory; without one, the folder of temporary files."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())
