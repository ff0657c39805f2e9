"""Units: the 64-bit mix against its published outputs, derived keys, and what coverage must notice."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isostep.units import MASK64, Coverage, derive_key, mix64, mix64_array

unhurried = settings(deadline=None)
"""No time limit for one try: other processes may run beside the tests."""

GAMMA = 0x9E3779B97F4A7C15
SPLITMIX64_SEED_0 = [
    0xE220A8397B1DCDAF,
    0x6E789E6AA1B965F4,
    0x06C45D188009454F,
    0xF88BB8A8724C81EC,
    0x1B39896A51A8749B,
]
"""The first outputs of SplitMix64 from state 0, as in its reference implementation's test vectors."""

ids64 = st.integers(0, MASK64)
some_ids = st.lists(ids64, unique=True, min_size=2, max_size=20)


def test_mix64_gives_the_known_outputs_of_splitmix64() -> None:
    assert [mix64(k * GAMMA & MASK64) for k in range(5)] == SPLITMIX64_SEED_0


def test_mix64_takes_its_argument_modulo_2_to_the_64() -> None:
    assert mix64(5 * GAMMA) == mix64(5 * GAMMA & MASK64)
    assert mix64(0) != mix64(1) != mix64(MASK64)


@unhurried
@given(st.lists(ids64, min_size=1, max_size=50))
def test_mix64_array_equals_mix64(values: list[int]) -> None:
    mixed = mix64_array(np.array(values, dtype=np.uint64))
    assert mixed.dtype == np.uint64
    assert mixed.tolist() == [mix64(value) for value in values]


def test_mix64_array_keeps_the_shape_and_its_argument() -> None:
    values = np.arange(12, dtype=np.uint64).reshape(3, 4)
    mixed = mix64_array(values)
    assert mixed.shape == (3, 4)
    assert mixed[2, 3] == mix64(11)
    assert values.ravel().tolist() == list(range(12))


def test_mix64_has_no_collision_among_consecutive_ids() -> None:
    assert len(set(mix64_array(np.arange(100_000, dtype=np.uint64)).tolist())) == 100_000


def test_derive_key_is_pinned() -> None:
    """Orders and dropout draws of every checkpoint depend on it."""
    assert derive_key(0) == 0x08B4FDA8C892B50E
    assert derive_key(0, 0, 0) == 0x9E062E73903BAA4C
    assert derive_key(1, 2, 3) == 0xCFFBD637B0880F8B
    assert derive_key(-1) == derive_key(MASK64) == 0x68631D79EEAD940D


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), (2, 1)),
        ((1,), (1, 0)),
        ((0,), (0, 0)),
        ((), (0,)),
        ((1, 1), (2, 2)),
        ((0, 1, 2), (0, 2, 1)),
        ((1, 2, 3), (1, 2, 4)),
        ((1 << 63,), (0,)),
    ],
)
def test_derive_key_differs_by_order_length_and_value(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    assert derive_key(*one) != derive_key(*other)


def test_derive_key_of_a_grid_of_parts_has_no_collision() -> None:
    keys = {derive_key(seed, epoch, i) for seed in range(20) for epoch in range(20) for i in range(20)}
    assert len(keys) == 20**3
    assert all(0 <= key <= MASK64 for key in keys)


@unhurried
@given(st.lists(ids64, max_size=20), st.randoms(use_true_random=False))
def test_coverage_is_order_independent(ids: list[int], shuffler: random.Random) -> None:
    shuffled = list(ids)
    shuffler.shuffle(shuffled)
    assert Coverage.of(shuffled) == Coverage.of(ids)


@unhurried
@given(st.lists(ids64, max_size=20), st.integers(0, 20))
def test_coverage_is_additive(ids: list[int], cut: int) -> None:
    assert Coverage.of(ids[:cut]) + Coverage.of(ids[cut:]) == Coverage.of(ids)
    assert Coverage.of(ids) + Coverage() == Coverage.of(ids)


@unhurried
@given(some_ids, st.data())
def test_coverage_notices_a_lost_doubled_swapped_or_foreign_id(ids: list[int], data: st.DataObject) -> None:
    """A swap is one id in the place of another: the count is right, only the hash can tell."""
    whole = Coverage.of(ids)
    at = data.draw(st.integers(0, len(ids) - 1))
    other = data.draw(ids64.filter(lambda i: i != ids[at]))
    lost = Coverage.of(ids[:at] + ids[at + 1 :])
    doubled = Coverage.of([*ids, ids[at]])
    swapped = Coverage.of([*ids[:at], other, *ids[at + 1 :]])
    assert lost.count == whole.count - 1
    assert doubled.count == whole.count + 1
    assert swapped.count == whole.count
    assert len({whole.hash, lost.hash, doubled.hash, swapped.hash}) == 4


def test_a_plain_sum_of_ids_would_not_notice_what_coverage_does() -> None:
    """The control of the mix: 1 + 4 = 2 + 3."""
    assert sum([1, 4]) == sum([2, 3])
    assert Coverage.of([1, 4]) != Coverage.of([2, 3])
    assert Coverage.of([0, 0]) != Coverage.of([0])


@pytest.mark.parametrize("huge", [1 << 63, (1 << 63) + 5, MASK64])
def test_coverage_of_ids_above_2_to_the_63(huge: int) -> None:
    assert Coverage.of([huge]) == Coverage(mix64(huge), 1)
    assert Coverage.of([huge, huge]).hash == 2 * mix64(huge) & MASK64
    assert Coverage.of([huge]) != Coverage.of([huge - 1])


def test_coverage_of_numpy_ids_equals_that_of_ints() -> None:
    assert Coverage.of(np.array([3, 1, 2])) == Coverage.of([1, 2, 3])
    assert Coverage.of(np.array([MASK64], dtype=np.uint64)) == Coverage.of([MASK64])


def test_coverage_as_text() -> None:
    assert str(Coverage.of([0])) == "e220a8397b1dcdaf/1"
    assert str(Coverage()) == "0000000000000000/0"
