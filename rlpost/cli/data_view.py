"""What `rlpost data preview` prints: one demonstration with its mask, and a summary of many."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rlpost.cli.columns import output_width, paragraph
from rlpost.cli.terminal import BOLD, DIM, GREEN, RED, RESET, painted
from rlpost.text import counted, printable

if TYPE_CHECKING:
    from rlpost.data.demonstrations import BadRows, Demonstration, Sample
    from rlpost.data.encoding import Encoder

PIPED_WIDTH = 100
OPENING, CLOSING = "»", "«"  # around what is trained, where there are no colours
LINE_BREAK = "↵"  # before each line break that is trained, which could not be seen otherwise


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring tokens of one kind, as text."""

    text: str
    trained: bool
    special: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """What the samples of many rows come to."""

    rows: int
    tokens: int
    trained: int
    longest: int
    bad: BadRows

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Figures:
        """Summed up over samples, the bad ones among them."""
        from rlpost.data.demonstrations import BadRows

        bad = BadRows()
        for sample in samples:
            bad.add(sample)
        lengths = [len(sample.ids) for sample in samples]
        return cls(len(samples), sum(lengths), sum(s.num_trained for s in samples), max(lengths, default=0), bad)


def preview_lines(
    demonstrations: Sequence[Demonstration],
    shown: Demonstration,
    encoder: Encoder,
    max_bad_share: float,
    *,
    coloured: bool,
) -> list[str]:
    """The demonstration `shown`, then a summary of all; with colours, or marked with » and «."""
    sample = encoder.encode(shown)
    heading = f"{shown.where}: {len(sample.ids):,} tokens, {sample.num_trained:,} trained"
    lines = [_painted(printable(heading), BOLD, coloured)]
    if sample.fault is not None:
        lines += [_painted(line, RED, coloured) for line in _told(f"bad, {sample.fault.value}: {sample.reason}")]
    body = _marked(pieces_of(sample, encoder), coloured=coloured) if sample.ids else _as_given(shown)
    lines += ["", *body, ""]
    if sample.ids:
        lines += [_legend(coloured), ""]
    return lines + _summary(Figures.of([encoder.encode(each) for each in demonstrations]), max_bad_share, coloured)


def preview_as_dict(demonstrations: Sequence[Demonstration], shown: Demonstration, encoder: Encoder) -> dict[str, Any]:
    """The same for a program to read."""
    sample = encoder.encode(shown)
    figures = Figures.of([encoder.encode(each) for each in demonstrations])
    bad = {
        fault.name: {
            "rows": count,
            "first": [{"row": s.where, "reason": s.reason} for s in figures.bad.first if s.fault is fault],
        }
        for fault, count in figures.bad.counts.items()
    }
    return {
        "row": {
            "where": shown.where,
            "tokens": len(sample.ids),
            "trained": sample.num_trained,
            "fault": sample.fault.name if sample.fault else None,
            "reason": sample.reason or None,
            "ids": sample.ids,
            "mask": [int(trained) for trained in sample.mask],
            "pieces": [asdict(piece) for piece in pieces_of(sample, encoder)],
        },
        "rows": figures.rows,
        "tokens": figures.tokens,
        "trained": figures.trained,
        "longest": figures.longest,
        "bad": bad,
    }


def pieces_of(sample: Sample, encoder: Encoder) -> list[Piece]:
    """The sample as text, cut where training begins or ends and around special tokens."""
    pieces, begin, given = [], 0, 0
    kinds = zip(sample.mask, (token in encoder.chat.special for token in sample.ids), strict=True)
    for (trained, special), tokens in groupby(kinds):
        begin += len(list(tokens))
        # decoded from the beginning: a tokenizer may write the same token differently where a text begins
        text = encoder.tokenizer.decode(
            sample.ids[:begin], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        pieces.append(Piece(text[given:], trained, special))
        given = len(text)
    return pieces


def _marked(pieces: Sequence[Piece], *, coloured: bool) -> list[str]:
    """The pieces as lines, none of whose characters can do more than be seen."""
    written = ""
    for trained, group in groupby(pieces, key=lambda piece: piece.trained):
        run = "".join(_styled(piece, coloured) for piece in group)
        written += run if coloured or not trained else f"{OPENING}{run}{CLOSING}"
    return written.removesuffix("\n").split("\n")


def _styled(piece: Piece, coloured: bool) -> str:
    text = printable(piece.text)
    if piece.trained:
        text = text.replace("\n", f"{LINE_BREAK}\n")
    if not coloured:
        return text
    style = (GREEN if piece.trained else DIM) + (BOLD if piece.special and piece.trained else "")
    # each line on its own: a pager or a scrolled terminal forgets a style that began on another
    return "\n".join(f"{style}{line}{RESET}" if line else "" for line in text.split("\n"))


def _legend(coloured: bool) -> str:
    if coloured:
        return f"{GREEN}trained{RESET}  {BOLD}{GREEN}trained, a special token{RESET}  {DIM}not trained{RESET}"
    return f"{OPENING}trained{CLOSING}  {LINE_BREAK} a line break that is trained"


def _as_given(shown: Demonstration) -> list[str]:
    """A demonstration that no ids came of: its messages as the row has them."""
    if shown.messages is None:
        return _told(shown.text or "")
    return [line for message in shown.messages for line in _told(f"{message['role']}: {message['content']}")]


def _summary(figures: Figures, max_bad_share: float, coloured: bool) -> list[str]:
    share = figures.trained / figures.tokens if figures.tokens else 0.0
    lines = _told(
        f"first {counted(figures.rows, 'row')}: {share:.1%} of {figures.tokens:,} tokens trained, longest "
        f"{figures.longest:,}, {figures.bad.count or 'none'} bad"
    )
    for line in figures.bad.lines():
        lines += [_painted(part, RED, coloured) for part in _told(f"  {line}")]
    if figures.bad.count:
        lines += _told(f"--row {row_number(figures.bad.first[0].where)} shows the first of them")
    if figures.bad.count > max_bad_share * figures.rows:
        lines += _told(f"more than max_bad_share={max_bad_share:g} are bad: rlpost train sft would refuse them")
    return lines


def row_number(where: str) -> str:
    """The number in a row's place, as its file counts."""
    return where.rpartition(" ")[2]


def _told(text: str) -> list[str]:
    return paragraph(text, output_width(PIPED_WIDTH))


def _painted(text: str, style: str, coloured: bool) -> str:
    return painted(text, style, sys.stdout) if coloured else text
