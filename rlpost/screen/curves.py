"""Small curves: a figure over all steps in bounded memory, and its drawing in block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

EIGHTHS = " ▁▂▃▄▅▆▇█"
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille cell, 4 rows of 2
NICE = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


class Series:
    """One figure over all steps: a mean a bin, of one step at first, of twice as many whenever the bins run out."""

    def __init__(self, most: int = 2048) -> None:
        self._most = most  # an even number of bins
        self._steps_per_bin = 1
        self._steps = 0  # in the last bin
        self._sums: list[float] = []
        self._counts: list[int] = []  # values that are numbers in each bin

    def add(self, value: float) -> None:
        """The next step's value; what is no finite number takes its place and leaves it empty."""
        if not self._sums or self._steps == self._steps_per_bin:
            if len(self._sums) == self._most:
                self._halve()
            self._sums.append(0.0)
            self._counts.append(0)
            self._steps = 0
        self._steps += 1
        if math.isfinite(value):
            self._sums[-1] += value
            self._counts[-1] += 1

    def _halve(self) -> None:
        self._sums = [a + b for a, b in zip(self._sums[::2], self._sums[1::2], strict=True)]
        self._counts = [a + b for a, b in zip(self._counts[::2], self._counts[1::2], strict=True)]
        self._steps_per_bin *= 2

    def __len__(self) -> int:
        """How many means there are at most."""
        return len(self._sums)

    @property
    def has_numbers(self) -> bool:
        """Whether there was any number at all."""
        return any(self._counts)

    def means(self, num: int) -> list[float]:
        """`num` means over neighbouring steps, repeated where there are fewer; NaN where there is no number."""
        bins = len(self._sums)
        means = []
        for i in range(num):
            start = i * bins // num
            part = slice(start, max(start + 1, (i + 1) * bins // num))
            count = sum(self._counts[part])
            means.append(sum(self._sums[part]) / count if count else math.nan)
        return means


def range_from_zero(values: Sequence[float]) -> tuple[float, float]:
    """Round numbers around 0 and all values."""
    finite = [value for value in values if math.isfinite(value)]
    low = 0.0 - round_up(-min(finite, default=0.0))
    high = round_up(max(finite, default=0.0))
    return low, high if high > low else low + 1.0


def range_around(values: Sequence[float]) -> tuple[float, float]:
    """Round numbers around all values, as close as they are; never below 0 where no value is."""
    finite = [value for value in values if math.isfinite(value)]
    least, most = min(finite, default=0.0), max(finite, default=1.0)
    unit = round_up((most - least) / 4) or round_up(abs(most) / 4) or 1.0
    low, high = math.floor(least / unit) * unit, math.ceil(most / unit) * unit
    return (low, high) if high > low else (max(low - unit, min(low, 0.0)), high + unit)


def round_up(value: float) -> float:
    """The nearest round number that is not below `value`; 0 for what is not above 0."""
    if value <= 0:
        return 0.0
    scale = 10.0 ** math.floor(math.log10(value))
    return next(nice * scale for nice in NICE if nice * scale >= value * (1 - 1e-9))


def area(values: Sequence[float], rows: int, low: float, high: float) -> list[str]:
    """The area under a curve, one column a value, `rows` lines from top to bottom; NaN is an empty column."""
    full = rows * 8
    levels = [
        0 if math.isnan(value) else min(full, max(1, round((value - low) / (high - low) * full))) for value in values
    ]
    return ["".join(EIGHTHS[min(8, max(0, level - 8 * row))] for level in levels) for row in reversed(range(rows))]


def line(values: Sequence[float], rows: int, low: float, high: float) -> list[str]:
    """A line through all values, two of them a column, `rows` lines of braille from top to bottom."""
    bits = [[0] * ((len(values) + 1) // 2) for _ in range(rows)]
    bottom = rows * 4 - 1
    before: int | None = None
    for x, value in enumerate(values):
        if math.isnan(value):
            before = None
            continue
        y = bottom - round((value - low) / (high - low) * bottom)
        start = y if before is None else before + (y > before) - (y < before)  # the dot next to the last one
        for each in range(min(start, y), max(start, y) + 1):
            bits[each // 4][x // 2] |= DOTS[each % 4][x % 2]
        before = y
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in bits]
