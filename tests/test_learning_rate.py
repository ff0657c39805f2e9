"""The learning rate: values by hand for each shape, end points, monotone parts, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isostep.config import Schedule
from isostep.errors import InputError
from isostep.learning_rate import LearningRate, learning_rate_of

SHAPES = ("constant", "linear", "cosine", "warmup-stable-decay")


def rate(shape: Any = "cosine", **values: Any) -> LearningRate:
    """Warm-up of 4 updates, end at 12, decay of the last 4."""
    decay = 4 if shape == "warmup-stable-decay" else None
    return LearningRate(**{"shape": shape, "unit": "updates", "warmup": 4, "decay": decay, "total": 12,
                           "final_factor": 0.0} | values)  # fmt: skip


def factors(of: LearningRate) -> list[float]:
    return [of.factor(progress) for progress in range(14)]


WARM_UP = [0.25, 0.5, 0.75, 1.0]
QUARTER_COSINE = (1 + math.sqrt(0.5)) / 2  # at a quarter of the way


@pytest.mark.parametrize(
    ("shape", "after_warm_up"),
    [
        ("constant", [1.0] * 10),
        ("linear", [1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0, 0.0]),
        ("cosine", [1.0, (1 + math.cos(math.pi / 8)) / 2, QUARTER_COSINE, (1 + math.cos(3 * math.pi / 8)) / 2, 0.5,
                    (1 - math.cos(3 * math.pi / 8)) / 2, 1 - QUARTER_COSINE, (1 - math.cos(math.pi / 8)) / 2, 0.0,
                    0.0]),
        ("warmup-stable-decay", [1.0] * 4 + [1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0, 0.0]),
    ],
)  # fmt: skip
def test_factors_by_hand(shape: str, after_warm_up: list[float]) -> None:
    assert factors(rate(shape)) == pytest.approx(WARM_UP + after_warm_up, rel=1e-15, abs=1e-15)


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ("constant", {7: 1.0, 12: 1.0}),
        ("linear", {8: 0.6, 12: 0.2}),
        ("cosine", {8: 0.6, 12: 0.2, 6: 0.2 + 0.8 * QUARTER_COSINE}),
        ("warmup-stable-decay", {8: 1.0, 9: 0.6, 12: 0.2}),
    ],
)
def test_a_final_factor_is_what_the_shape_ends_at(shape: str, values: dict[int, float]) -> None:
    scheduled = rate(shape, final_factor=0.2)
    assert {progress: scheduled.factor(progress) for progress in values} == pytest.approx(values, rel=1e-15)
    assert factors(scheduled)[:4] == WARM_UP


@pytest.mark.parametrize("shape", SHAPES)
def test_without_warm_up_the_first_update_has_the_peak(shape: str) -> None:
    assert rate(shape, warmup=0).factor(0) == 1.0


@pytest.mark.parametrize("unit", ["examples", "supervised_tokens"])
def test_in_other_units_the_first_unit_of_an_update_counts(unit: str) -> None:
    by_tokens = rate("linear", unit=unit, warmup=1000, total=3000)
    assert [by_tokens.factor(p) for p in (0, 99, 499, 999, 1000, 2000, 3000)] == [0.001, 0.1, 0.5, 1, 1, 0.5, 0]


shapes = st.sampled_from(SHAPES)


@st.composite
def learning_rates(draw: st.DrawFn) -> LearningRate:
    total = draw(st.integers(1, 10**12))
    warmup = draw(st.integers(0, total - 1))
    shape: Any = draw(shapes)
    decay = draw(st.integers(1, total - warmup)) if shape == "warmup-stable-decay" else None
    return LearningRate(shape, draw(st.sampled_from(["updates", "examples", "supervised_tokens"])), warmup, decay,
                        total, draw(st.floats(0, 1)))  # fmt: skip


@settings(deadline=None)
@given(learning_rates(), st.floats(0, 2), st.floats(0, 2))
def test_it_rises_in_the_warm_up_falls_after_it_and_stays_in_its_bounds(of: LearningRate, a: float, b: float) -> None:
    assert of.total is not None
    first, second = sorted((int(a * of.total), int(b * of.total)))
    before, after = of.factor(first), of.factor(second)
    for progress, factor in ((first, before), (second, after)):
        assert (0 if progress < of.warmup else of.final_factor) <= factor <= 1
    if second < of.warmup:
        assert before <= after
    elif first >= of.warmup:
        assert after <= before + 1e-12
    assert of.factor(0) > 0


@settings(deadline=None)
@given(learning_rates(), st.floats(0, 1e15))
def test_from_the_total_on_it_stays_at_the_final_factor(of: LearningRate, more: float) -> None:
    assert of.total is not None
    assert of.factor(of.total + more) == (1.0 if of.shape == "constant" else of.final_factor)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"shape": "constant"}, "constant, after 4 updates of warm-up"),
        ({"shape": "constant", "warmup": 0}, "constant"),
        ({"shape": "cosine"}, "cosine to 0 over 8 updates, after 4 of warm-up"),
        ({"shape": "linear", "final_factor": 0.1, "warmup": 0}, "linear to 0.1 over 12 updates, without warm-up"),
        ({"shape": "cosine", "unit": "supervised_tokens", "warmup": 2000, "total": 1_002_000},
         "cosine to 0 over 1,000,000 supervised tokens, after 2,000 of warm-up"),
        ({"shape": "warmup-stable-decay", "unit": "examples", "total": 22},
         "warmup-stable-decay: 14 examples at the peak, then 1 - sqrt to 0 over 4, after 4 of warm-up"),
    ],
)  # fmt: skip
def test_texts(values: dict[str, Any], text: str) -> None:
    assert rate(**values).text() == text


def scheduled(derived_total: int | None = None, **values: Any) -> LearningRate:
    return learning_rate_of(Schedule(**{"warmup": 10, **values}), derived_total)


def test_warm_up_is_a_tenth_unless_given() -> None:
    assert learning_rate_of(Schedule(), 102).warmup == 10
    assert learning_rate_of(Schedule(), 5).warmup == 0
    assert learning_rate_of(Schedule(shape="constant"), None).warmup == 0
    assert learning_rate_of(Schedule(total=50), 102).warmup == 5
    assert learning_rate_of(Schedule(warmup=7), 102).warmup == 7


def test_the_total_is_the_given_one_or_else_the_runs() -> None:
    assert scheduled(102) == LearningRate("cosine", "updates", 10, None, 102, 0.0)
    assert scheduled(102, total=50, final_factor=0.5) == LearningRate("cosine", "updates", 10, None, 50, 0.5)
    assert scheduled(None, total=50).total == 50
    assert scheduled(102, decay=7).decay is None
    for total in (None, 5):  # a constant shape needs none, and none is too short for it
        assert scheduled(total, shape="constant") == LearningRate("constant", "updates", 10, None, None, 0.0)


@pytest.mark.parametrize(("total", "given_decay", "decay"), [(102, None, 20), (3, None, 1), (102, 50, 50)])
def test_the_decay_of_warmup_stable_decay(total: int, given_decay: int | None, decay: int) -> None:
    of = scheduled(total, shape="warmup-stable-decay", warmup=2, decay=given_decay)
    assert (of.decay, of.total) == (decay, total)
    assert of.factor(total - decay) == 1.0
    assert of.factor(total - decay + 0.5) < 1.0


@pytest.mark.parametrize(
    ("derived_total", "values", "message"),
    [
        (None, {}, "schedule.total: got None, expected the number of updates at whose end cosine ends; give it"),
        (None, {"shape": "warmup-stable-decay", "unit": "supervised_tokens"},
         "schedule.total: got None, expected the number of supervised tokens"),
        (10, {}, "schedule.total: got 10, expected more than the 10 updates of schedule.warmup"),
        (99, {"shape": "linear", "total": 3}, "schedule.total: got 3, expected more than the 10 updates"),
        (29, {"shape": "warmup-stable-decay", "decay": 20},
         "schedule.total: got 29, expected at least schedule.warmup + schedule.decay = 10 + 20 updates"),
        (11, {"shape": "warmup-stable-decay"}, "schedule.total: got 11, expected at least"),
    ],
)  # fmt: skip
def test_a_total_that_is_missing_or_too_short(derived_total: int | None, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        scheduled(derived_total, **values)
    assert str(caught.value).startswith(message)


def test_the_last_update_still_moves() -> None:
    for shape in SHAPES[1:]:
        assert rate(shape).factor(11) > rate(shape).factor(12) == 0


def test_totals_that_just_suffice() -> None:
    assert scheduled(11).factor(10) == 1.0
    assert scheduled(30, shape="warmup-stable-decay", decay=20).factor(10) == 1.0


def test_starts_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import isostep.learning_rate, isostep.quality"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
