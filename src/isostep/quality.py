"""Whether a run met the rule of quality that was fixed before it. Imports no torch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from . import config

_HOLDS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass(frozen=True)
class Verdict:
    """The judgement of a rule. `value` and `place`: the point that was judged, or would be if the run ended here."""

    verdict: Literal["accepted", "rejected", "not reached", "no rule"]
    rule: str | None = None
    value: float | None = None
    place: float | None = None

    def text(self) -> str:
        """One line, such as: accepted: 1.9 at 1,950,000 meets "< 2.0 at 2e6"."""
        if self.rule is None:
            return "no rule"
        if self.value is None or self.place is None:
            return f'{self.verdict}: nothing was measured in time for "{self.rule}"'
        link = {"accepted": "meets", "rejected": "does not meet"}.get(self.verdict, "so far, of")
        return f'{self.verdict}: {self.value:.6g} at {self.place:,.15g} {link} "{self.rule}"'


def judge(rule: str | None, points: Sequence[tuple[float, float]]) -> Verdict:
    """Judge a curve of (place on the axis, value), in order of place, by a rule such as "< 2.0 at 2e6".

    The last point at or before 2e6 is judged: what the run had achieved when the axis reached it. Points behind it
    neither help nor harm. "not reached" where no point lies at 2e6 or behind it, so that the run ended too early, or
    none at or before it, so that nothing had been measured by then. A value of NaN is rejected.
    Raises ValueError for a text that is no rule.
    """
    if rule is None:
        return Verdict("no rule")
    comparison, limit, end = config.parse_rule(rule)
    before = [point for point in points if point[0] <= end]
    if not before:
        return Verdict("not reached", rule)
    place, value = before[-1]
    if max(place for place, _ in points) < end:
        return Verdict("not reached", rule, value, place)
    return Verdict("accepted" if _HOLDS[comparison](value, limit) else "rejected", rule, value, place)
