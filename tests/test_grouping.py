"""Grouping: the order of an epoch, groups as pure functions, and who runs which microbatch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import factorial, isqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isostep import grouping
from isostep.errors import InputError
from isostep.grouping import (
    Cursor,
    EpochOrder,
    Group,
    GroupPlan,
    LastGroup,
    chunks,
    chunks_by_tokens,
    hosted,
)
from isostep.units import Coverage, derive_key, mix64

unhurried = settings(deadline=None)
"""No time limit for one try: other processes may run beside the tests."""

LARGEST = (1 << 62) - 1

Order = Callable[[int, int], Sequence[int]]
"""(size, epoch) -> ids in the order of the epoch."""


def whole(size: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return EpochOrder(size, seed, epoch).ids(0, size)


def plan(num_examples: int = 10, examples_per_update: int = 4, m: int = 1, **changes: Any) -> GroupPlan:
    sizes: dict[str, Any] = {"examples_per_update": examples_per_update, "examples_per_microbatch": m}
    return GroupPlan(num_examples=num_examples, **{**sizes, **changes})


def groups_of(a_plan: GroupPlan, start: Cursor | None = None, epochs: int = 1) -> list[Group]:
    return [group for group, drop in a_plan.walk(start or Cursor(), epochs) if not drop]


# ------------------------------------------------------------------------------------------- order of an epoch


def test_the_order_is_a_permutation_for_every_size_up_to_300() -> None:
    for size in range(1, 301):
        assert sorted(whole(size, seed=size, epoch=size % 7)) == list(range(size)), size


@unhurried
@given(st.integers(1, 20_000), st.integers(), st.integers(0, 1000))
def test_the_order_is_a_permutation_for_any_size_seed_and_epoch(size: int, seed: int, epoch: int) -> None:
    assert sorted(whole(size, seed, epoch)) == list(range(size))


def position_of(example_id: int, size: int, seed: int, epoch: int) -> int:
    """The inverse of the order, in exact integers: the same rounds backwards, walked back into range(size)."""
    a = isqrt(size - 1) + 1
    b = -(-size // a)
    right, left = divmod(example_id, a)
    while True:
        for i in reversed(range(grouping.ROUNDS)):
            key = derive_key(seed, epoch, i)
            if i % 2 == 0:
                left = (left - mix64(right ^ key)) % a
            else:
                right = (right - mix64(left ^ key)) % b
        if right * a + left < size:
            return right * a + left
        # a domain point beyond the data set: the order walked over it


@unhurried
@given(st.integers(1, LARGEST), st.integers(0, 5), st.data())
@example(2**27 * (2**27 - 1) + 1, 0, None)
@example(2**30 * (2**30 - 1) + 1, 0, None)
@example((2**31 - 1) * (2**31 - 2) + 1, 0, None)
@example(LARGEST, 1, None)
def test_every_position_of_a_huge_order_can_be_found_again(size: int, seed: int, data: st.DataObject | None) -> None:
    """Sizes just above a * (a - 1) are where a quotient rounded to a float leaves the last position without room."""
    positions = {0, size // 2, size - 1}
    if data is not None:
        positions.add(data.draw(st.integers(0, size - 1)))
    for position in positions:
        (example_id,) = EpochOrder(size, seed, 3).ids(position, position + 1)
        assert 0 <= example_id < size
        assert position_of(example_id, size, seed, 3) == position


@unhurried
@given(st.integers(1, 500), st.data())
def test_a_part_of_the_order_is_a_slice_of_the_whole(size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    assert EpochOrder(size, 5, 2).ids(start, stop) == whole(size, 5, 2)[start:stop]


@pytest.mark.parametrize(
    ("size", "seed", "epoch", "expected"),
    [
        (1, 0, 0, [0]),
        (2, 0, 0, [1, 0]),
        (5, 0, 0, [0, 4, 1, 2, 3]),
        (10, 0, 0, [7, 9, 0, 2, 6, 1, 3, 4, 5, 8]),
        (10, 0, 1, [5, 4, 3, 8, 0, 9, 6, 1, 7, 2]),
        (10, 1, 0, [6, 4, 9, 0, 7, 2, 3, 1, 5, 8]),
        (13, -1, 2, [11, 0, 1, 2, 7, 10, 8, 12, 9, 4, 3, 5, 6]),
        (16, 7, 3, [5, 0, 9, 15, 10, 11, 14, 12, 4, 7, 6, 13, 1, 2, 8, 3]),
    ],
)
def test_golden_orders(size: int, seed: int, epoch: int, expected: list[int]) -> None:
    """Pinned: another permutation would continue every checkpoint of an older version with the wrong examples."""
    assert whole(size, seed, epoch) == expected


@pytest.mark.parametrize(
    ("size", "seed", "epoch", "first", "last"),
    [
        (10**6, 0, 0, [236912, 543975, 585604], [150467, 26721]),
        (10**12, 0, 0, [778754109175, 709283734461, 99195628058], [348340435372, 826449988304]),
        (LARGEST, 3, 1, [3290374073710671556, 2606787085233565070, 4258157212391742938],
         [1619441109671089684, 145380390164730888]),
    ],
)  # fmt: skip
def test_golden_beginnings_and_ends_of_large_orders(
    size: int, seed: int, epoch: int, first: list[int], last: list[int]
) -> None:
    order = EpochOrder(size, seed, epoch)
    assert order.ids(0, 3) == first
    assert order.ids(size - 2, size) == last


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = {tuple(whole(50, seed, epoch)) for seed in range(-5, 15) for epoch in range(20)}
    assert len(orders) == 400


# ------------------------------------------------------------------------------------------- uniformity, in sigmas


def sigmas(found: np.ndarray, degrees: int) -> float:
    """How far a chi-square statistic of equally likely cells is above its mean, in standard deviations."""
    expected = found.mean()
    return float((((found - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


def order_unevenness(order: Order, size: int, orders: int) -> float:
    """Of all size! orders, each should come equally often."""
    found = Counter(tuple(order(size, epoch)) for epoch in range(orders))
    return sigmas(np.array([*found.values(), *[0] * (factorial(size) - len(found))]), factorial(size) - 1)


def place_unevenness(order: Order, size: int, orders: int) -> float:
    """Every id should come equally often at every position."""
    found = np.zeros((size, size))
    for epoch in range(orders):
        found[np.arange(size), order(size, epoch)] += 1
    return sigmas(found, (size - 1) ** 2)


def neighbour_unevenness(order: Order, size: int, orders: int) -> float:
    """The difference of neighbours, modulo size, should be each of 1 to size - 1 equally often."""
    found = np.zeros(size)
    for epoch in range(orders):
        ids = np.array(order(size, epoch))
        found += np.bincount(np.diff(ids) % size, minlength=size)
    return sigmas(found[1:], size - 2)


def keyed(size: int, epoch: int) -> Sequence[int]:
    return whole(size, 7, epoch)


def affine(size: int, epoch: int) -> Sequence[int]:
    """A bad shuffle that is a permutation for every epoch: a stride and an offset."""
    return [(3 * i + mix64(epoch)) % size for i in range(size)]


def unshuffled(size: int, epoch: int) -> Sequence[int]:
    return range(size)


TESTS_OF_UNIFORMITY = [
    pytest.param(order_unevenness, 3, 600, id="orders of 3"),
    pytest.param(order_unevenness, 4, 1200, id="orders of 4"),
    pytest.param(order_unevenness, 6, 10_800, id="orders of 6"),
    pytest.param(place_unevenness, 32, 1000, id="places of 32"),
    pytest.param(neighbour_unevenness, 12, 4000, id="neighbours of 12"),
    pytest.param(neighbour_unevenness, 101, 300, id="neighbours of 101"),
]

ALLOWED = 5.0


@pytest.mark.parametrize(("unevenness", "size", "orders"), TESTS_OF_UNIFORMITY)
def test_orders_are_uniform(unevenness: Callable[[Order, int, int], float], size: int, orders: int) -> None:
    assert unevenness(keyed, size, orders) < ALLOWED


def test_bad_shuffles_are_found() -> None:
    """The control: each of the three measures tells a bad permutation from a good one, by far."""
    assert order_unevenness(affine, 4, 1200) > 20 * ALLOWED
    assert place_unevenness(unshuffled, 32, 1000) > 20 * ALLOWED
    assert neighbour_unevenness(affine, 101, 300) > 20 * ALLOWED


@pytest.mark.parametrize(
    ("rounds", "unevenness", "size", "orders"),
    [
        (2, order_unevenness, 4, 1200),
        (10, order_unevenness, 6, 10_800),
        (8, neighbour_unevenness, 12, 4000),
        (4, neighbour_unevenness, 101, 300),
    ],
)
def test_too_few_rounds_are_found(
    rounds: int,
    unevenness: Callable[[Order, int, int], float],
    size: int,
    orders: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouping, "ROUNDS", rounds)
    assert unevenness(keyed, size, orders) > ALLOWED


# ------------------------------------------------------------------------------------------- size does not matter


@pytest.fixture
def permuted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with the number of positions of each evaluation of the permutation."""
    asked: list[int] = []
    permute = EpochOrder._permute

    def counted(self: EpochOrder, values: np.ndarray) -> np.ndarray:
        asked.append(len(values))
        return permute(self, values)

    monkeypatch.setattr(EpochOrder, "_permute", counted)
    return asked


@pytest.mark.parametrize("num_examples", [1000, 10**12, 2**61 + 12345, LARGEST])
def test_a_group_takes_work_for_its_own_examples_only(num_examples: int, permuted: list[int]) -> None:
    a_plan = plan(num_examples, 64, 8, seed=3)
    assert a_plan.updates_per_epoch is not None
    far = a_plan.updates_per_epoch - 2
    group = a_plan.group(5, far)
    assert len(set(group.ids)) == 64
    assert all(0 <= example_id < num_examples for example_id in group.ids)
    assert (group.start, group.stop) == (64 * far, 64 * far + 64)
    assert 64 <= sum(permuted) <= 2 * 64


def test_a_walk_from_a_far_cursor_starts_there(permuted: list[int]) -> None:
    a_plan = GroupPlan(
        num_examples=10**12, tokens_per_update=1000, tokens_per_microbatch=100, length_of=lambda i: 1 + i % 50
    )
    group, drop = next(a_plan.walk(Cursor(2, 10**11, 7), 3))
    assert (group.epoch, group.start, group.index, drop) == (2, 10**11, 7, False)
    assert sorted(group.ids) == sorted(a_plan.ids_of(2, group.start, group.stop))
    assert sum(permuted) <= 2 * (len(group.ids) + 64) + 2 * len(group.ids)


# ------------------------------------------------------------------------------------------- groups are pure


@unhurried
@given(
    num_examples=st.integers(1, 60),
    examples_per_update=st.integers(1, 70),
    m=st.integers(1, 9),
    seed=st.integers(0, 3),
)
def test_the_kth_group_is_a_pure_function(num_examples: int, examples_per_update: int, m: int, seed: int) -> None:
    """Asked for alone, from another plan object, or met on the way: the same group, a piece of the order."""
    walked = groups_of(plan(num_examples, examples_per_update, m, seed=seed), epochs=2)
    fresh = plan(num_examples, examples_per_update, m, seed=seed)
    for group in reversed(walked):
        assert fresh.group(group.epoch, group.index) == group
        assert list(group.ids) == fresh.ids_of(group.epoch, group.start, group.stop)
        assert all(len(microbatch) == m for microbatch in group.microbatches[:-1])
        assert group.coverage == Coverage.of(group.ids)
    for epoch in range(2):
        ids = [example_id for group in walked if group.epoch == epoch for example_id in group.ids]
        assert ids == whole(num_examples, seed, epoch)


def test_a_group_as_literals() -> None:
    group = plan(10, 4, 3).group(0, 1)
    assert group == Group(epoch=0, index=1, start=4, stop=8, microbatches=((6, 1, 3), (4,)))
    assert group.largest_microbatch == 3
    assert plan(10, 4, 3).group(0, 2).microbatches == ((5, 8),)


@pytest.mark.parametrize("index", [-1, 3, 100])
def test_a_group_outside_of_the_epoch_is_refused(index: int) -> None:
    with pytest.raises(InputError, match=rf"group index: got {index}, expected 0 to 2"):
        plan(10, 4).group(0, index)


def test_the_kth_group_of_a_budget_of_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="walk"):
        token_plan([1, 2, 3], 4).group(0, 0)


# ------------------------------------------------------------------------------------------- lanes and replicas


@unhurried
@given(st.integers(0, 40), st.integers(1, 50))
def test_every_lane_has_one_host_and_loads_are_balanced(num_lanes: int, replicas: int) -> None:
    ranges = [hosted(num_lanes, replica, replicas) for replica in range(replicas)]
    assert [lane for lanes in ranges for lane in lanes] == list(range(num_lanes))
    sizes = [len(lanes) for lanes in ranges]
    assert max(sizes) - min(sizes) <= 1


@unhurried
@given(num_examples=st.integers(1, 60), m=st.integers(1, 7), replicas=st.integers(1, 70))
def test_the_composition_does_not_depend_on_the_replicas(num_examples: int, m: int, replicas: int) -> None:
    group = plan(60, num_examples, m).group(0, 0)
    parts = [group.microbatches_of(replica, replicas) for replica in range(replicas)]
    assert tuple(microbatch for part in parts for microbatch in part) == group.microbatches
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sum(map(Coverage.of, [sum(part, ()) for part in parts]), Coverage()) == group.coverage


def test_more_replicas_than_lanes_leave_some_without_work() -> None:
    group = plan(10, 4, 2).group(0, 0)
    assert [group.microbatches_of(replica, 3) for replica in range(3)] == [[(7, 9)], [(0, 2)], []]


@unhurried
@given(num_examples=st.integers(1, 60), m=st.integers(1, 20), fits=st.integers(1, 25))
def test_limited_keeps_the_ids_in_order(num_examples: int, m: int, fits: int) -> None:
    group = plan(60, num_examples, m).group(1, 0)
    small = group.limited(fits)
    assert small.ids == group.ids
    assert small.coverage == group.coverage
    assert small.largest_microbatch == min(fits, group.largest_microbatch)
    edges = {0, *np.cumsum([len(microbatch) for microbatch in small.microbatches]).tolist()}
    assert edges >= set(np.cumsum([len(microbatch) for microbatch in group.microbatches]).tolist())


def test_limited_as_literals() -> None:
    group = Group(0, 0, 0, 7, ((0, 1, 2, 3, 4), (5, 6)))
    assert group.limited(2).microbatches == ((0, 1), (2, 3), (4,), (5, 6))
    assert group.limited(5) == group


# ------------------------------------------------------------------------------------------- budgets of tokens


@unhurried
@given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 60))
def test_chunks_by_tokens_are_greedy_ordered_and_within_the_limit(lengths: list[int], limit: int) -> None:
    def padded(ids: Sequence[int]) -> int:
        return max(lengths[i] for i in ids) * len(ids)

    ids = range(len(lengths))
    pieces = chunks_by_tokens(ids, lengths, limit)
    assert [i for piece in pieces for i in piece] == list(ids)
    assert all(piece for piece in pieces)
    assert all(padded(piece) <= limit or len(piece) == 1 for piece in pieces)
    assert all(padded([*piece, following[0]]) > limit for piece, following in pairwise(pieces))


def test_chunks_by_tokens_as_literals() -> None:
    assert chunks_by_tokens([7, 8, 9, 5, 6], [2, 3, 9, 1, 1], 6) == [(7, 8), (9,), (5, 6)]
    assert chunks_by_tokens([1, 2, 3], [1, 1, 4], 4) == [(1, 2), (3,)]
    assert chunks_by_tokens([], [], 4) == []
    assert chunks((1, 2, 3, 4, 5), 2) == [(1, 2), (3, 4), (5,)]


def token_plan(lengths: Sequence[int], tokens_per_update: int, **changes: Any) -> GroupPlan:
    budgets: dict[str, Any] = {"tokens_per_update": tokens_per_update, "tokens_per_microbatch": 16}
    return GroupPlan(num_examples=len(lengths), length_of=lengths.__getitem__, **{**budgets, **changes})


some_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=150)


@unhurried
@given(some_lengths, st.integers(1, 120), st.integers(0, 2))
def test_token_budgets_use_every_id_once_per_epoch(lengths: list[int], budget: int, seed: int) -> None:
    a_plan = token_plan(lengths, budget, seed=seed)
    walked = groups_of(a_plan, epochs=2)
    for epoch in range(2):
        mine = [group for group in walked if group.epoch == epoch]
        order = whole(len(lengths), seed, epoch)
        assert all(sorted(group.ids) == sorted(order[group.start : group.stop]) for group in mine)
        assert mine[-1].stop == len(lengths)
        assert [group.index for group in mine] == list(range(len(mine)))
        assert all(a.stop == b.start for a, b in pairwise(mine))
        for group, following in pairwise(mine):
            tokens = sum(lengths[i] for i in group.ids)
            assert tokens <= budget or len(group.ids) == 1
            assert tokens + lengths[order[following.start]] > budget
    assert a_plan.updates_per_epoch is None


@unhurried
@given(some_lengths, st.integers(1, 120), st.sampled_from(["keep", "drop"]))
def test_a_cursor_behind_any_group_continues_alike(lengths: list[int], budget: int, last_group: LastGroup) -> None:
    a_plan = token_plan(lengths, budget, last_group=last_group, examples_per_microbatch=3, tokens_per_microbatch=None)
    walked = list(a_plan.walk(Cursor(), 2))
    for done, (group, _) in enumerate(walked, start=1):
        cursor = Cursor(group.epoch, group.stop, group.index + 1)
        assert list(a_plan.walk(cursor, 2)) == walked[done:]


def test_token_budgets_as_literals() -> None:
    lengths = [4, 4, 9, 1, 5, 5, 2, 2]
    assert whole(8) == [2, 0, 7, 4, 3, 1, 6, 5]  # of lengths 9, 4, 2, 5, 1, 4, 2, 5
    groups = groups_of(token_plan(lengths, 10, tokens_per_microbatch=8))
    assert [group.microbatches for group in groups] == [((2,),), ((0, 7),), ((4,), (1, 3)), ((5,), (6,))]


def test_token_budgets_pack_examples_of_like_length() -> None:
    lengths = [1, 9, 1, 9, 1, 9, 1, 9]
    a_plan = token_plan(lengths, 100, tokens_per_microbatch=18)
    (group,) = groups_of(a_plan)
    assert [sorted(lengths[i] for i in ids) for ids in group.microbatches] == [[9, 9], [9, 9], [1, 1, 1, 1]]


def test_an_example_longer_than_the_budget_is_a_group_of_its_own() -> None:
    assert [group.ids for group in groups_of(token_plan([50, 60, 70], 10))] == [(i,) for i in whole(3)]


# ------------------------------------------------------------------------------------------- the last group


@pytest.mark.parametrize(
    ("num_examples", "examples_per_update", "keep", "drop"),
    [(10, 4, 3, 2), (8, 4, 2, 2), (9, 4, 3, 2), (4, 4, 1, 1), (5, 4, 2, 1), (7, 1, 7, 7), (3, 4, 1, None)],
)
def test_updates_per_epoch(num_examples: int, examples_per_update: int, keep: int, drop: int | None) -> None:
    kept = plan(num_examples, examples_per_update, last_group="keep")
    assert kept.updates_per_epoch == keep == len(groups_of(kept))
    if drop is None:
        with pytest.raises(InputError, match=f"examples_per_update: got {examples_per_update}, expected at most 3"):
            plan(num_examples, examples_per_update, last_group="drop")
        return
    dropping = plan(num_examples, examples_per_update, last_group="drop")
    assert dropping.updates_per_epoch == drop == len(groups_of(dropping))


def test_a_dropped_group_is_named_with_its_ids() -> None:
    walked = list(plan(10, 4, 2, last_group="drop").walk(Cursor(), 2))
    assert [drop for _, drop in walked] == [False, False, True] * 2
    assert walked[2][0] == Group(epoch=0, index=2, start=8, stop=10, microbatches=((5, 8),))
    assert walked[5][0].ids == tuple(whole(10, epoch=1)[8:])


@pytest.mark.parametrize(("budget", "dropped"), [(10, [(5, 6)]), (11, [(5,)]), (5, [])])
def test_a_partial_last_group_of_a_budget_of_tokens_is_dropped(budget: int, dropped: list[tuple[int]]) -> None:
    """Only where the epoch ended it: the last group, of one example with 5 tokens, fills a budget of 5."""
    walked = token_plan([4, 4, 9, 1, 5, 5, 2, 2], budget, last_group="drop").walk(Cursor(), 1)
    assert [group.ids for group, drop in walked if drop] == dropped


# ------------------------------------------------------------------------------------------- bad values


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"num_examples": 0}, "data set", "0"),
        ({"num_examples": -3}, "data set", "-3"),
        ({"examples_per_update": 0}, "examples_per_update", "0"),
        ({"examples_per_update": -4}, "examples_per_update", "-4"),
        ({"examples_per_update": 2.5}, "examples_per_update", "2.5"),
        ({"examples_per_update": True}, "examples_per_update", "True"),
        ({"examples_per_update": "8"}, "examples_per_update", "'8'"),
        ({"examples_per_update": None}, "examples_per_update and tokens_per_update", "None"),
        ({"tokens_per_update": 64}, "examples_per_update and tokens_per_update", "64"),
        ({"examples_per_update": None, "tokens_per_update": 0}, "tokens_per_update", "0"),
        ({"m": 0}, "examples_per_microbatch", "0"),
        ({"m": 1.0}, "examples_per_microbatch", "1.0"),
        ({"m": None}, "examples_per_microbatch and tokens_per_microbatch", "None"),
        ({"tokens_per_microbatch": 7}, "examples_per_microbatch and tokens_per_microbatch", "7"),
        ({"m": None, "tokens_per_microbatch": -7}, "tokens_per_microbatch", "-7"),
        ({"m": None, "tokens_per_microbatch": 7}, "length_of", "None"),
        ({"examples_per_update": None, "tokens_per_update": 7}, "length_of", "None"),
        ({"last_group": "pad"}, "last_group", "'pad'"),
        ({"last_group": "drop", "examples_per_update": 11}, "examples_per_update", "11"),
        ({"seed": None}, "seed", "None"),
        ({"seed": 1.5}, "seed", "1.5"),
        ({"seed": "a"}, "seed", "'a'"),
    ],
)
def test_bad_values_are_refused_by_name(changes: dict[str, Any], name: str, value: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(**changes)
    message = str(caught.value)
    assert message.startswith(f"{name}: got ")
    assert value in message.split(", expected ")[0]


@pytest.mark.parametrize("size", [0, -1, 1 << 62])
def test_an_order_of_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(InputError, match=f"data set size: got {size}, expected 1 to"):
        EpochOrder(size, 0, 0)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 11), (11, 11)])
def test_positions_outside_of_the_epoch_are_refused(start: int, stop: int) -> None:
    with pytest.raises(InputError, match=rf"positions: got \({start}, {stop}\), expected 0 <= start <= stop <= 10"):
        EpochOrder(10, 0, 0).ids(start, stop)


def test_good_values_are_not_refused() -> None:
    """The control of the table: what it starts from makes groups."""
    assert plan().updates_per_epoch == 3
    assert EpochOrder(10, 0, 0).ids(10, 10) == []
