"""IFEval's 25 kinds of verifiable instructions (Zhou et al. 2023, arXiv:2311.07911).

The classes of `if_verifiable` check 21 of them. Four are checked here, because the original draws
lots or answers differently from call to call: the language of a reply is langdetect's, seeded,
and a letter to count may be any sign, where the original counts a random letter in place of one
that is not a-z. A reply in which no language can be made out counts as following, as there. Nor is
a paragraph drawn in place of one beyond the last: such an instruction is refused.
"""

from __future__ import annotations

from rlpost.rewards.checkers import ifeval_checkers, known_languages, language_of
from rlpost.rewards.instructions import Check, InstructionError, InstructionSet


def _letter_frequency(letter: str, let_frequency: int, let_relation: str) -> Check:
    sign = str(letter).strip().lower()
    if not sign:
        raise InstructionError("kwargs", "keywords:letter_frequency needs a letter")
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


def _english_capital() -> Check:
    return lambda text: text.isupper() and language_of(text) in ("en", None)


def _english_lowercase() -> Check:
    return lambda text: text.islower() and language_of(text) in ("en", None)


def _nth_paragraph_first_word(num_paragraphs: int, nth_paragraph: int, first_word: str) -> Check:
    kind = "length_constraints:nth_paragraph_first_word"
    if not 1 <= nth_paragraph <= num_paragraphs:
        raise InstructionError(
            "kwargs", f"{kind} has nth_paragraph={nth_paragraph}: it must be from 1 to num_paragraphs={num_paragraphs}"
        )
    checker = ifeval_checkers()[kind](kind)
    checker.build_description(num_paragraphs=num_paragraphs, nth_paragraph=nth_paragraph, first_word=first_word)
    return checker.check_following


IFEVAL = InstructionSet(
    name="IFEval",
    checkers=ifeval_checkers,
    own={
        "keywords:letter_frequency": _letter_frequency,
        "language:response_language": _response_language,
        "change_case:english_capital": _english_capital,
        "change_case:english_lowercase": _english_lowercase,
        "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    },
    nltk_data={
        "length_constraints:number_sentences": ("punkt_tab",),
        "change_case:capital_word_frequency": ("punkt_tab",),
    },
)

verdicts = IFEVAL.verdicts
