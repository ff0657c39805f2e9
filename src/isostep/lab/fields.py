"""The controls of a page: what each accepts, and its text in a query turned into a value.

A parsed value is hashable. Every text that is refused raises InputError, whose line names the field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import InputError

MAX_TEXT = 1000
"""Characters of one value."""

WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
REAL = re.compile(r"[+-]?([0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18})([eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True)
class Slider:
    """The range that a slider covers; the field itself may accept more."""

    least: float
    most: float
    step: float = 1


@dataclass(frozen=True)
class Field:
    """One control. `name` is its key in a query; `default` is the text it has where a query does not name it."""

    name: str
    label: str
    default: str = ""
    hint: str = ""
    slider: Slider | None = None
    kind: ClassVar[str] = "text"

    def parse(self, text: str) -> Any:
        """The value of a text. Raises InputError where it is refused."""
        raise NotImplementedError

    def text(self, texts: Mapping[str, str]) -> str:
        """What the control shows: the text of a query, or the default; a number field cannot show what is no number."""
        text = texts.get(self.name, self.default)
        return text if self.kind != "number" or real(text) is not None else ""

    def refuse(self, text: object, expected: str, remedy: str = "change it") -> InputError:
        """The error for a text of this field."""
        return InputError.of(self.name, shortened(text) if isinstance(text, str) else text, expected, remedy)


@dataclass(frozen=True)
class Whole(Field):
    """A whole number from `least` to `most`; blank gives None where it is `optional`."""

    least: int = 0
    most: int = 10**12
    optional: bool = False
    kind: ClassVar[str] = "number"

    def parse(self, text: str) -> int | None:
        """A whole number in range, or None."""
        if self.optional and not text:
            return None
        if WHOLE.fullmatch(text) and self.least <= int(text) <= self.most:
            return int(text)
        blank = ", or nothing" if self.optional else ""
        raise self.refuse(text, f"a whole number from {self.least} to {self.most}{blank}")


@dataclass(frozen=True)
class Real(Field):
    """A finite number from `least` to `most`; blank gives None where it is `optional`."""

    least: float = -1e9
    most: float = 1e9
    optional: bool = False
    kind: ClassVar[str] = "number"

    def parse(self, text: str) -> float | None:
        """A number in range, or None."""
        if self.optional and not text:
            return None
        number = real(text)
        if number is not None and self.least <= number <= self.most:
            return number
        raise self.refuse(text, f"a number from {self.least:g} to {self.most:g}")


@dataclass(frozen=True)
class Reals(Field):
    """Numbers from `least` to `most`, separated by commas: 1 to `longest` of them, as a tuple."""

    least: float = -1e9
    most: float = 1e9
    longest: int = 64
    kind: ClassVar[str] = "list"

    def parse(self, text: str) -> tuple[float, ...]:
        """The numbers."""
        words = text.split(",")
        if len(words) > self.longest:
            raise self.refuse(f"{len(words)} numbers", f"1 to {self.longest} numbers", "give fewer")
        return tuple(self._number(word) for word in words)

    def _number(self, word: str) -> float:
        number = real(word.strip())
        if number is None or not self.least <= number <= self.most:
            raise self.refuse(word.strip(), f"numbers from {self.least:g} to {self.most:g}, separated by commas")
        return number


@dataclass(frozen=True)
class Grid(Field):
    """Numbers of [replica][microbatch]: replicas separated by spaces, microbatches by commas. Blank gives None.

    number: one word as a number, None where it is none.
    """

    number: Callable[[str], Any] = float
    expected: str = "numbers"
    most_rows: int = 8
    most_columns: int = 16
    kind: ClassVar[str] = "grid"

    def parse(self, text: str) -> tuple[tuple[Any, ...], ...] | None:
        """The rows, of any lengths up to `most_columns`."""
        rows = text.split()
        if not rows:
            return None
        if len(rows) > self.most_rows:
            raise self.refuse(f"{len(rows)} replicas", f"at most {self.most_rows} replicas", "give fewer")
        return tuple(self._row(row) for row in rows)

    def _row(self, row: str) -> tuple[Any, ...]:
        words = row.split(",")
        if len(words) > self.most_columns:
            raise self.refuse(f"{len(words)} on a replica", f"at most {self.most_columns}", "give fewer")
        numbers = tuple(self.number(word) for word in words)
        if None in numbers:
            remedy = "separate microbatches by commas and replicas by spaces"
            raise self.refuse(words[numbers.index(None)], self.expected, remedy)
        return numbers


@dataclass(frozen=True)
class Choice(Field):
    """One of `options`: pairs of value and what is shown."""

    options: tuple[tuple[str, str], ...] = ()
    kind: ClassVar[str] = "choice"

    def parse(self, text: str) -> str:
        """The option."""
        values = [value for value, _ in self.options]
        if text not in values:
            raise self.refuse(text, f"one of {', '.join(value or 'nothing' for value in values)}", "choose one")
        return text


@dataclass(frozen=True)
class Switch(Field):
    """On where the query says 1; a form leaves it out where it is off."""

    kind: ClassVar[str] = "switch"

    def parse(self, text: str) -> bool:
        """Whether it is on."""
        if text not in ("", "0", "1"):
            raise self.refuse(text, "1 for on, 0 for off", "choose one")
        return text == "1"


def real(text: str) -> float | None:
    """A finite number, or None where the text is none."""
    number = float(text) if REAL.fullmatch(text) else math.nan
    return number if math.isfinite(number) else None


def whole(text: str) -> int | None:
    """A whole number, or None where the text is none."""
    return int(text) if WHOLE.fullmatch(text) else None


def shortened(text: str, length: int = 40) -> str:
    """A value as an error can quote it."""
    return text if len(text) <= length else f"{text[:length]}..."
