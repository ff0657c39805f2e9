"""A number line: places of values on a drawing, and round ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` drawn from `left` to `right`, in units of the drawing."""

    low: float
    high: float
    left: float
    right: float

    @classmethod
    def over(cls, values: Iterable[float], left: float, right: float) -> Axis:
        """The axis that holds all of these finite values, one or more."""
        found = list(values)
        low, high = min(found), max(found)
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            room = max(1.0, abs(low)) / 2
            low, high = low - room, high + room
        return cls(low, high, left, right)

    def place(self, value: float) -> float:
        """Where a value is drawn, to a tenth of a unit."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.left + share * (self.right - self.left), 1)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values within the axis, about that many."""
        rough = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [tick * step for tick in range(first, last + 1)]
