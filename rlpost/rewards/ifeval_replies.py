"""Replies made to follow or to break an IFEval instruction: what proves its checks, as no gold answers exist.

Each breaks it loosely too: on one line and without asterisks no looser reading is left, and where
more lines are needed none of them helps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

NEUTRAL = "0"  # says nothing: no word, no letter, no sentence mark
ENGLISH = "The river runs past the old mill and through the quiet village to the sea."

# the same sentence, long enough for its language to be told
SENTENCES = {
    "ar": "يجري النهر بجانب الطاحونة القديمة ويعبر القرية الهادئة إلى البحر.",
    "bg": "Реката тече покрай старата воденица и през тихото село към морето.",
    "bn": "নদীটি পুরনো কলের পাশ দিয়ে এবং শান্ত গ্রামের মধ্য দিয়ে সমুদ্রে যায়।",
    "de": "Der Fluss fließt an der alten Mühle vorbei und durch das stille Dorf zum Meer.",
    "en": ENGLISH,
    "es": "El río pasa junto al viejo molino y atraviesa el tranquilo pueblo hasta el mar.",
    "fa": "رودخانه از کنار آسیاب قدیمی و از میان روستای آرام به سوی دریا می‌رود.",
    "fi": "Joki virtaa vanhan myllyn ohi ja hiljaisen kylän läpi mereen.",
    "fr": "La rivière passe devant le vieux moulin et traverse le village tranquille jusqu'à la mer.",
    "gu": "નદી જૂની મિલની બાજુમાંથી અને શાંત ગામમાંથી સમુદ્ર તરફ વહે છે.",
    "he": "הנהר זורם ליד הטחנה הישנה ודרך הכפר השקט אל הים.",
    "hi": "नदी पुरानी चक्की के पास से और शांत गाँव से होकर समुद्र तक जाती है।",
    "it": "Il fiume scorre accanto al vecchio mulino e attraversa il villaggio tranquillo fino al mare.",
    "ja": "川は古い水車小屋のそばを流れ、静かな村を通って海へ向かいます。",
    "kn": "ನದಿಯು ಹಳೆಯ ಗಿರಣಿಯ ಪಕ್ಕದಲ್ಲಿ ಮತ್ತು ಶಾಂತ ಹಳ್ಳಿಯ ಮೂಲಕ ಸಮುದ್ರಕ್ಕೆ ಹರಿಯುತ್ತದೆ.",
    "ko": "강은 오래된 방앗간을 지나 조용한 마을을 거쳐 바다로 흐릅니다.",
    "ml": "നദി പഴയ മില്ലിനടുത്തുകൂടി ശാന്തമായ ഗ്രാമത്തിലൂടെ കടലിലേക്ക് ഒഴുകുന്നു.",
    "mr": "नदी जुन्या गिरणीजवळून आणि शांत गावातून समुद्राकडे वाहते आहे.",
    "ne": "नदी पुरानो घट्टको छेउबाट र शान्त गाउँ हुँदै समुद्रतिर बग्छ।",
    "pa": "ਨਦੀ ਪੁਰਾਣੀ ਚੱਕੀ ਦੇ ਕੋਲੋਂ ਅਤੇ ਸ਼ਾਂਤ ਪਿੰਡ ਵਿੱਚੋਂ ਸਮੁੰਦਰ ਵੱਲ ਵਗਦੀ ਹੈ।",
    "pl": "Rzeka płynie obok starego młyna i przez cichą wieś do morza.",
    "pt": "O rio passa pelo velho moinho e atravessa a aldeia tranquila até o mar.",
    "ru": "Река течёт мимо старой мельницы и через тихую деревню к морю.",
    "sw": "Mto unapita karibu na kinu cha zamani na kupitia kijiji kimya hadi baharini.",
    "ta": "நதி பழைய ஆலையைக் கடந்து அமைதியான கிராமத்தின் வழியாகக் கடலுக்குச் செல்கிறது.",
    "te": "నది పాత మిల్లు పక్కనుండి ప్రశాంతమైన గ్రామం గుండా సముద్రానికి ప్రవహిస్తుంది.",
    "th": "แม่น้ำไหลผ่านโรงสีเก่าและหมู่บ้านอันเงียบสงบไปสู่ทะเล",
    "uk": "Річка тече повз старий млин і через тихе село до моря.",
    "ur": "دریا پرانی چکی کے پاس سے اور خاموش گاؤں سے گزر کر سمندر تک جاتا ہے۔",
    "vi": "Dòng sông chảy qua cối xay cũ và ngôi làng yên tĩnh để ra biển.",
}


@dataclass(frozen=True, slots=True)
class Replies:
    """One reply that follows an instruction and one that does not (None: every reply follows it, blank ones aside)."""

    following: str
    breaking: str | None


def replies_to(kind: str, arguments: Mapping[str, Any]) -> Replies | None:
    """Replies to the instruction `kind` with `arguments`, or None where none are known that follow it."""
    write = _WRITERS.get(kind)
    return write(**arguments) if write else None


def _of_count(less: str, unit: str, count: int, relation: str) -> Replies | None:
    """`unit` as often as a relation wants, and the other side of the line; `less` where that is not at all."""
    enough, too_few = unit * count, unit * (count - 1)
    if relation == "at least":
        return Replies(enough.strip() or less, None if count < 1 else too_few.strip() or less)
    return None if count < 1 else Replies(too_few.strip() or less, enough.strip())


def _frequency(keyword: str, frequency: int, relation: str) -> Replies | None:
    return _of_count(NEUTRAL, f"{keyword.strip()} ", frequency, relation)


def _letter_frequency(letter: str, let_frequency: int, let_relation: str) -> Replies | None:
    return _of_count("-" if letter == NEUTRAL else NEUTRAL, letter, let_frequency, let_relation)


def _language(language: str) -> Replies | None:
    other = "de" if language == "en" else "en"
    return Replies(SENTENCES[language], SENTENCES[other]) if language in SENTENCES else None


def _sentences(num_sentences: int, relation: str) -> Replies | None:
    written = _of_count("", "It rained. ", num_sentences, relation)
    return written if written and written.following else None  # nothing has no sentences, and follows nothing


def _paragraphs(num_paragraphs: int) -> Replies:
    one = "A paragraph."
    return Replies("\n***\n".join([one] * num_paragraphs), None if num_paragraphs == 1 else one)


def _nth_paragraph(num_paragraphs: int, nth_paragraph: int, first_word: str) -> Replies:
    others = ["Otherwise this is a paragraph."] * num_paragraphs
    chosen = [*others[: nth_paragraph - 1], f"{first_word} begins it.", *others[nth_paragraph:]]
    return Replies("\n\n".join(chosen), "\n\n".join(f"Not{first_word} begins it." for _ in others))


def _placeholders(num_placeholders: int) -> Replies | None:
    return _of_count(NEUTRAL, "[place] ", num_placeholders, "at least")


def _postscript(postscript_marker: str) -> Replies:
    return Replies(f"{ENGLISH}\n\n{postscript_marker} It is cold.", NEUTRAL)


def _bullets(num_bullets: int) -> Replies:
    return Replies("\n".join(["* a point"] * num_bullets) or NEUTRAL, NEUTRAL if num_bullets else "- a\n- b\n- c")


def _highlights(num_highlights: int) -> Replies | None:
    return _of_count(NEUTRAL, "*part* ", num_highlights, "at least")


def _sections(section_spliter: str, num_sections: int) -> Replies:
    text = "\n".join(f"{section_spliter} {number}\n{ENGLISH}" for number in range(1, num_sections + 1))
    return Replies(text or NEUTRAL, NEUTRAL if num_sections else None)


def _capital_words(capital_frequency: int, capital_relation: str) -> Replies | None:
    return _of_count("word", "WORD ", capital_frequency, capital_relation)


_WRITERS: dict[str, Callable[..., Replies | None]] = {
    "keywords:existence": lambda keywords: Replies(" ".join(keywords), NEUTRAL),
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": lambda forbidden_words: Replies(NEUTRAL, " ".join(forbidden_words)),
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _language,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda num_words, relation: _of_count("-", "word ", num_words, relation),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda: Replies("My answer is maybe.", "My answer is late."),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": lambda: Replies('```json\n{"level": [1, 2]}\n```', "{level: [1, 2]}"),
    "detectable_format:title": lambda: Replies(f"<<The River>>\n{ENGLISH}", ENGLISH),
    "combination:two_responses": lambda: Replies(f"{ENGLISH}\n******\nIt rained.", ENGLISH),
    "combination:repeat_prompt": lambda prompt_to_repeat: Replies(f"{prompt_to_repeat}\n\n{ENGLISH}", NEUTRAL),
    "startend:end_checker": lambda end_phrase: Replies(f"{ENGLISH} {end_phrase}", NEUTRAL),
    "startend:quotation": lambda: Replies(f'"{ENGLISH}"', ENGLISH),
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda: Replies(ENGLISH.upper(), ENGLISH),
    "change_case:english_lowercase": lambda: Replies(ENGLISH.lower(), ENGLISH),
    "punctuation:no_comma": lambda: Replies(ENGLISH, f"First, {ENGLISH}"),
}
