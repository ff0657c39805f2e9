"""The quality rule: which point of a curve is judged, and how."""

from __future__ import annotations

import math

import pytest

from isostep.quality import Verdict, judge

CURVE = [(0, 5.0), (1e6, 2.5), (1.9e6, 1.9), (2.1e6, 2.2), (3e6, 1.0)]


@pytest.mark.parametrize(
    ("rule", "verdict", "value", "place"),
    [
        ("< 2.0 at 2e6", "accepted", 1.9, 1.9e6),
        ("< 1.9 at 2e6", "rejected", 1.9, 1.9e6),
        ("<= 1.9 at 2e6", "accepted", 1.9, 1.9e6),
        ("> 1.9 at 2e6", "rejected", 1.9, 1.9e6),
        (">= 1.9 at 2e6", "accepted", 1.9, 1.9e6),
        ("> 1.8 at 2e6", "accepted", 1.9, 1.9e6),
        ("< 2.0 at 2.5e6", "rejected", 2.2, 2.1e6),  # better points before and behind it do not help
        ("< 2.0 at 1.8e6", "rejected", 2.5, 1e6),
        ("< 2.0 at 3e6", "accepted", 1.0, 3e6),  # a point at the very place counts, and reaches it
        ("< 2.0 at 3000001", "not reached", 1.0, 3e6),
        ("< 9 at 0", "accepted", 5.0, 0),
    ],
)
def test_the_last_point_at_or_before_the_place_is_judged(rule: str, verdict: str, value: float, place: float) -> None:
    assert judge(rule, CURVE) == Verdict(verdict, rule, value, place)  # type: ignore[arg-type]


def test_two_points_at_the_same_place() -> None:
    assert judge("< 2 at 10", [(10, 3.0), (10, 1.0)]).verdict == "accepted"
    assert judge("< 2 at 10", [(10, 1.0), (10, 3.0)]).verdict == "rejected"


def test_nothing_measured_in_time_is_not_accepted() -> None:
    for points in ([], [(20, 0.0)]):
        assert judge("< 2 at 10", points) == Verdict("not reached", "< 2 at 10")


def test_no_number_is_rejected_whatever_the_comparison() -> None:
    for comparison in ("<", "<=", ">", ">="):
        assert judge(f"{comparison} 2 at 10", [(10, math.nan)]).verdict == "rejected"


def test_without_a_rule() -> None:
    assert judge(None, CURVE) == Verdict("no rule")


@pytest.mark.parametrize("rule", ["", "2.0 at 2e6", "< 2.0", "== 2.0 at 2e6"])
def test_a_text_that_is_no_rule(rule: str) -> None:
    with pytest.raises(ValueError, match="expected a rule such as"):
        judge(rule, CURVE)


def test_texts() -> None:
    assert judge(None, CURVE).text() == "no rule"
    assert judge("< 2.0 at 2e6", CURVE).text() == 'accepted: 1.9 at 1,900,000 meets "< 2.0 at 2e6"'
    assert judge("< 1.0 at 2e6", CURVE).text() == 'rejected: 1.9 at 1,900,000 does not meet "< 1.0 at 2e6"'
    assert judge("< 2.0 at 9e6", CURVE).text() == 'not reached: 1 at 3,000,000 so far, of "< 2.0 at 9e6"'
    assert judge("< 2.0 at 9e6", []).text() == 'not reached: nothing was measured in time for "< 2.0 at 9e6"'
