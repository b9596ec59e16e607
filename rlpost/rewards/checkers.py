"""The door to the libraries that check instructions: `if_verifiable`, and nltk and langdetect, which its classes use.

Nothing here downloads, and nothing depends on chance: the language of a text is the same in every process.
"""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from rlpost.errors import DataError
from rlpost.extras import require

LANGUAGE_SEED = 0  # of langdetect's sampling, which would otherwise differ from call to call

# what nltk.data.find is given for each of NLTK's packages; a folder inside a zip, as the downloader leaves it, is
# found by its / alone
_NLTK_PLACES = {
    "punkt_tab": "tokenizers/punkt_tab/english/",
    "stopwords": "corpora/stopwords/english",
    "averaged_perceptron_tagger_eng": "taggers/averaged_perceptron_tagger_eng/",
}
NLTK_DATA_PACKAGE = "llama-index-core"  # carries the first two; installed without its own dependencies
INSTALL_NLTK_DATA = f"pip install --no-deps {NLTK_DATA_PACKAGE}==0.14.25"
_OPENING = threading.RLock()  # the libraries fill their tables when first used, which two threads must not do at once


@cache
def ifeval_checkers() -> Mapping[str, Any]:
    """IFEval's kinds of instructions and the class that checks each. Raises MissingExtraError."""
    require_checkers("IFEval")
    with _OPENING, _no_downloads():
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
    return INSTRUCTION_DICT


@cache
def ifbench_checkers() -> Mapping[str, Any]:
    """IFBench's kinds of instructions and the class that checks each. Raises MissingExtraError."""
    require_checkers("IFBench")
    with _OPENING, _no_downloads():
        from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT
    return INSTRUCTION_DICT


def require_checkers(needed_for: str) -> None:
    """Raise MissingExtraError unless the checkers are installed; imports nothing."""
    require("if_verifiable", "ifeval", needed_for)


def language_of(text: str) -> str | None:
    """The ISO 639-1 code of the language `text` is in, or None where there is nothing to tell it by."""
    from langdetect import LangDetectException

    detector = _languages().create()
    detector.append(text)
    try:
        return detector.detect()
    except LangDetectException:  # raised for a text without letters
        return None


def known_languages() -> list[str]:
    """The codes `language_of` can give, in order."""
    return _languages().get_lang_list()


@cache
def require_nltk_data(package: str, needed_for: str) -> None:
    """Raise DataError, with the way to get it, unless NLTK finds `package` in its folders or the packaged one."""
    import nltk

    with _OPENING:
        packaged = packaged_nltk_data()
        if packaged is not None and str(packaged) not in nltk.data.path:
            nltk.data.path.append(str(packaged))  # the last, so that the user's NLTK_DATA goes before it
        try:
            nltk.data.find(_NLTK_PLACES[package])
            if package == "stopwords":
                nltk.corpus.stopwords.ensure_loaded()
        except LookupError as error:
            raise DataError(
                f"{needed_for} needs NLTK's {package}, which {_how_to_get(package, packaged)} "
                f"(env.leave_out={needed_for} does without)"
            ) from error


def packaged_nltk_data() -> Path | None:
    """The folder of NLTK's data inside the installed package, without importing the package."""
    try:
        package = importlib.metadata.distribution(NLTK_DATA_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    folder = Path(str(package.locate_file("llama_index/core/_static/nltk_cache")))
    return folder if folder.is_dir() else None


def _how_to_get(package: str, packaged: Path | None) -> str:
    if packaged is not None and (packaged / _NLTK_PLACES[package]).exists():
        return f"it does not read from a folder that others may write to: chmod -R go-w {packaged}"
    if package in ("punkt_tab", "stopwords"):
        return f"is in none of its folders: {INSTALL_NLTK_DATA}"
    return f"is in none of its folders: python -m nltk.downloader {package}"


@cache
def _languages() -> Any:
    """langdetect's profiles, in an object of our own: the seed of the library's is its other users' to choose."""
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    with _OPENING:
        factory = DetectorFactory()
        factory.set_seed(LANGUAGE_SEED)
        profiles = sorted(file for file in Path(PROFILES_DIRECTORY).iterdir() if not file.name.startswith("."))
        factory.load_json_profile([file.read_text(encoding="utf-8") for file in profiles])
    return factory


@contextmanager
def _no_downloads() -> Iterator[None]:
    """Keep modules from fetching NLTK's data as they are imported, as IFBench's do: that is the user's decision."""
    import nltk

    before = nltk.download
    nltk.download = lambda *_, **__: False
    try:
        yield
    finally:
        nltk.download = before
