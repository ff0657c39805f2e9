"""Curves in characters, without colour: one line of bars, a plot in braille dots, a bar of shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

Point = tuple[float, float]

BARS = "▁▂▃▄▅▆▇█"
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character: of its left and its right column, from the top."""

MARK = "o"

ASCII = str.maketrans(
    {"│": "|", "┤": "+", "└": "+", "─": "-", "▒": "%", "░": "-", "·": "."}
    | dict(zip(BARS, "_.-=+*%#", strict=True))
    | {chr(code): "*" for code in range(0x2801, 0x2900)}
    | {chr(0x2800): " "}
)
"""Every character that is drawn here, for terminals that cannot show it."""


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A curve in one line: means of consecutive finite values, the lowest bar for the lowest mean."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return "-"
    width = min(width, len(values))
    cuts = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    return "".join(BARS[round((mean - low) / (high - low or 1.0) * (len(BARS) - 1))] for mean in means)


def plot(curve: Sequence[Point], marks: Sequence[Point], width: int, height: int, x_label: str) -> list[str]:
    """Lines of a plot: `curve` as a connected line, `marks` as single points on it, axes from 0 and from the lowest.

    curve, marks: (x, y) in order of x, x from 0. width: of the whole. Points that are not finite are left out; an
    empty list where none is left.
    """
    curve, marks = ([p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])] for points in (curve, marks))
    heights = [y for _, y in (*curve, *marks)]
    if not heights:
        return []
    low, high = min(heights), max(heights)
    labels = [f"{value:.4g}" for value in (high, (high + low) / 2, low)]
    margin = max(map(len, labels))
    canvas = _Canvas(width - margin - 2, height, max(x for x, _ in (*curve, *marks)), low, high)
    canvas.line(curve)
    for x, y in marks:
        canvas.mark(x, y)
    ticks = {0: labels[0], height // 2: labels[1], height - 1: labels[2]}
    lines = [f"{ticks.get(i, ''):>{margin}} {'┤' if i in ticks else '│'}{row}" for i, row in enumerate(canvas.rows())]
    end = f"{canvas.right:,.0f} {x_label}"
    axis = f"0{end:>{canvas.width - 1}}"
    return [line.rstrip() for line in (*lines, f"{'':>{margin}} └{'─' * canvas.width}", f"{'':>{margin + 2}}{axis}")]


def shares(parts: Sequence[tuple[str, int]], width: int) -> str:
    """A bar of `width` characters: each part's own character in proportion, at least once where the part is not 0."""
    total = sum(size for _, size in parts)
    if total == 0:
        return ""
    cells = [max(1, round(size / total * width)) if size else 0 for _, size in parts]
    largest = max(range(len(parts)), key=lambda i: parts[i][1])
    cells[largest] += width - sum(cells)
    return "".join(character * n for (character, _), n in zip(parts, cells, strict=True))


class _Canvas:
    """Characters of 2 x 4 dots each."""

    def __init__(self, width: int, height: int, right: float, low: float, high: float) -> None:
        self.width, self.right = max(1, width), right
        self._low, self._span, self._rows = low, high - low, 4 * height
        self._dots = [[0] * self.width for _ in range(height)]
        self._marks: set[tuple[int, int]] = set()

    def line(self, points: Sequence[Point]) -> None:
        """Connect the points; those in the same column of dots as their mean."""
        columns: dict[int, list[float]] = {}
        for x, y in points:
            columns.setdefault(self._column(x), []).append(y)
        means = [(column, sum(ys) / len(ys)) for column, ys in columns.items()]
        for column, y in means[:1]:
            self._dot(column, self._row(y))
        for (c, y), (next_c, next_y) in pairwise(means):
            row = self._row(y)
            for column in range(c + 1, next_c + 1):
                here = self._row(y + (next_y - y) * (column - c) / (next_c - c))
                for r in range(min(row, here), max(row, here) + 1):
                    if r != row or here == row:
                        self._dot(column, r)
                row = here

    def mark(self, x: float, y: float) -> None:
        """One point as a character of its own."""
        self._marks.add((self._row(y) // 4, self._column(x) // 2))

    def rows(self) -> list[str]:
        return [
            "".join(
                MARK if (i, j) in self._marks else chr(0x2800 + bits) if bits else " " for j, bits in enumerate(row)
            )
            for i, row in enumerate(self._dots)
        ]

    def _column(self, x: float) -> int:
        return round(x / self.right * (2 * self.width - 1)) if self.right else 0

    def _row(self, y: float) -> int:
        share = (y - self._low) / self._span if self._span else 0.5
        return round((1 - share) * (self._rows - 1))

    def _dot(self, column: int, row: int) -> None:
        self._dots[row // 4][column // 2] |= DOTS[column % 2][row % 4]
