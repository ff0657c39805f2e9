"""The arithmetic of an audit without a training loop: sketches, factors read from them, and the rules on weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from isostep.audit import sketch as sketches
from isostep.audit.document import EXACT, EXACT_UP_TO_FACTOR, INEXACT, NOT_OBSERVED, Report
from isostep.audit.records import Backward, Call, Forward, Log, Step, ZeroGrad
from isostep.audit.sketch import PERIOD, SIZE, row_hashes, sketch
from isostep.audit.solve import factors
from isostep.audit.verdict import judge

# ------------------------------------------------------------------------------------------------ sketches

LENGTHS = (0, 1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE + 7, PERIOD - 1, PERIOD, PERIOD + 1, 2 * PERIOD + SIZE + 3)
PLACES = (0, 1, 132, 133)
"""Signs of place 132 begin some 3000 before their end."""


def whole_numbers(length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers whose sums are exact in every type: what is left over is no rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-64, 65, (length,), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
def test_sketch_of_a_sum_is_the_sum_of_sketches(length: int, dtype: torch.dtype) -> None:
    a, b = whole_numbers(length, dtype, 0), whole_numbers(length, dtype, 1)
    for place in PLACES if length < PERIOD - 1 else (0, 132):
        whole = sketch(a + b, place)
        assert (whole.dtype, whole.shape) == (torch.float64, (SIZE,))
        assert torch.equal(whole, sketch(a, place) + sketch(b, place))
        assert torch.equal(sketch(-2 * a, place), -2 * sketch(a, place))
    if length > SIZE:
        assert not torch.equal(sketch(a, 0), sketch(b, 0)), "the control"


def test_every_element_is_in_one_bucket_with_its_sign() -> None:
    """At the ends of buckets and of the signs, and in the part after it."""
    length = 2 * PERIOD + 5
    signs = sketches._signs_on(torch.device("cpu"))
    for place, i in itertools.product((0, 132), (0, 1, SIZE - 1, SIZE, PERIOD - 1, PERIOD, 2 * PERIOD, length - 1)):
        one = torch.zeros(length)
        one[i] = 3
        values = sketch(one, place)
        assert int((values != 0).sum()) == 1
        assert values.sum() == 3 * signs[(place * 7919 + i) % PERIOD]


@pytest.mark.parametrize("length", [5000, PERIOD + 4321])
def test_sketch_keeps_lengths_and_angles(length: int) -> None:
    """Within what 1024 buckets can: a standard deviation of 4 %."""
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(length, generator=generator, dtype=torch.float64) for _ in range(2))
    for place in PLACES:
        ours, theirs = sketch(a, place), sketch(b, place)
        assert float(ours.norm() / a.norm()) == pytest.approx(1, abs=0.12)
        assert abs(float(ours @ theirs / ours.norm() / theirs.norm())) < 0.2
    angle = sketch(a, 0) @ sketch(a, 1) / sketch(a, 0).norm() / sketch(a, 1).norm()
    assert abs(float(angle)) < 0.2, "the same numbers in another parameter are another direction"


def test_matrix_of_equal_rows_is_not_lost() -> None:
    """Gradients of one row each, of a matrix whose width is a multiple of the buckets."""
    rows = torch.zeros(6, 4 * SIZE, dtype=torch.float64)
    found = []
    for i in range(6):
        one = rows.clone()
        one[i] = 1
        found.append(sketch(one, 3))
    table = torch.stack(found)
    assert torch.linalg.matrix_rank(table) == 6
    assert float(table.norm(dim=1).min()) > 0.5 * (4 * SIZE) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_gradient_has_the_sketch_of_the_dense_one(dtype: torch.dtype) -> None:
    dense = torch.zeros(300, 40, dtype=dtype)
    dense[[3, 99, 250]] = whole_numbers(120, dtype, 4).view(3, 40)
    rows = torch.tensor([[3, 99, 3, 250]])
    values = torch.stack([dense[3] - 1, dense[99], torch.ones(40, dtype=dtype), dense[250]])
    sparse = torch.sparse_coo_tensor(rows, values, (300, 40), check_invariants=True)
    assert not sparse.is_coalesced()
    assert torch.equal(sketch(sparse, 5), sketch(dense, 5))


def test_shape_and_memory_order_do_not_matter() -> None:
    values = whole_numbers(6000, torch.float32, 5)
    expected = sketch(values, 1)
    assert torch.equal(sketch(values.view(60, 100), 1), expected)
    assert torch.equal(sketch(values.view(60, 100).t().contiguous().t(), 1), expected)
    assert torch.equal(sketch(values.view(60, 100).requires_grad_(), 1), expected)


def test_values_that_are_not_finite_show() -> None:
    for bad in (float("nan"), float("inf")):
        values = torch.ones(5000)
        values[4321] = bad
        assert not sketch(values, 0).isfinite().all()


def test_float16_sums_do_not_overflow() -> None:
    assert sketch(torch.full((8 * SIZE,), 60000.0, dtype=torch.float16), 0).isfinite().all()


def test_sketch_draws_no_random_numbers() -> None:
    sketches._signs.clear()
    state = torch.get_rng_state()
    sketch(torch.ones(10), 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_hashes_of_rows() -> None:
    """The same content has the same hash, in any order of rows; what says nothing has none."""
    tokens = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1], [1, 2, 3, 4], [5, 5, 5, 5], [0, 9, 7, 1]])
    hashes = row_hashes([tokens], 5).tolist()
    assert hashes[0] == hashes[2] != 0
    assert hashes[3] == 0, "one number only"
    assert len({*hashes}) == 4
    assert row_hashes([tokens.flip(0)], 5).tolist() == hashes[::-1]
    assert row_hashes([tokens[:, :3]], 5).tolist() == [0] * 5, "three numbers say too little"
    images = torch.randn(3, 2, 70, 70)
    first = row_hashes([images], 3)
    assert len({*first.tolist()}) == 3
    assert torch.equal(row_hashes([images.transpose(2, 3).contiguous().transpose(2, 3)], 3), first)
    assert not torch.equal(row_hashes([images, tokens[:3]], 3), first), "all tensors count"
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int32):
        assert row_hashes([(images.relu() * 9).to(dtype)], 3).all(), dtype


# ------------------------------------------------------------------------------------------------ factors


def gradients(count: int, size: int = SIZE, seed: int = 0) -> list[np.ndarray]:
    """Sketches of gradients of unequal norms."""
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(size) * 10.0 ** generator.uniform(-1, 1) for _ in range(count)]


def combined(values: Sequence[float], local: Sequence[np.ndarray]) -> np.ndarray:
    return np.sum([value * gradient for value, gradient in zip(values, local, strict=True)], axis=0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 2, 3, 8, 40])
def test_any_combination_is_recovered(count: int, seed: int) -> None:
    local = gradients(count, seed=seed)
    values = np.random.default_rng(seed + 100).uniform(0.2, 3, count) * (-1) ** (seed % 2)
    found = factors(combined(values, local), local, [0] * count, 0, None)
    assert found.values == pytest.approx(values, rel=1e-6)
    assert (found.residual < 1e-6, found.stale) == (True, 0)


@pytest.mark.parametrize("lost", range(4))
def test_lost_microbatch_has_factor_0(lost: int) -> None:
    local = gradients(4)
    values = np.where(np.arange(4) == lost, 0, 0.25)
    found = factors(combined(values, local), local, [0] * 4, 0, None)
    assert found.values == pytest.approx(values, abs=1e-6)
    control = factors(combined([0.25] * 4, local), local, [0] * 4, 0, None)
    assert control.values == pytest.approx([0.25] * 4, rel=1e-12)


@pytest.mark.parametrize("own", [0, 1, 2])
def test_averages_of_replicas(own: int) -> None:
    """Averaged; summed; not reduced at all; one rank left out; each rank with its own factor."""
    local = gradients(6)
    ranks = [0, 0, 1, 1, 2, 2]
    for of_rank in ([1 / 3] * 3, [1] * 3, [float(r == own) for r in range(3)], [0.5, 0, 0.5], [0.2, 0.3, 0.5]):
        values = [of_rank[rank] for rank in ranks]
        found = factors(combined(values, local), local, ranks, own, None)
        assert found.values == pytest.approx(values, abs=1e-7), of_rank
        assert found.residual < 1e-6


def test_what_is_stale() -> None:
    *local, before = gradients(5)
    ranks = [0, 0, 1, 1]
    for values, stale in (([0.5] * 4, 1.0), ([0.5] * 4, 0.0), ([0.1, 0.2, 0.3, 0.4], 0.7), ([1, 1, 0, 0], 2.0)):
        applied = combined(values, local) + stale * before
        found = factors(applied, local, ranks, 0, before)
        assert found.values == pytest.approx(values, abs=1e-6)
        assert found.stale == pytest.approx(stale, abs=1e-6)
        assert found.residual < 1e-6
    unknown = factors(combined([0.5] * 4, local) + before, local, ranks, 0, None)
    assert unknown.residual > 0.1, "the control: nobody said that something may be stale"


def test_foreign_part_is_the_residual() -> None:
    *local, foreign = gradients(4)
    applied = combined([1, 1, 1], local)
    share = 0.3 * np.linalg.norm(applied) / np.linalg.norm(foreign)
    found = factors(applied + share * foreign, local, [0] * 3, 0, None)
    assert found.residual == pytest.approx(0.3, abs=0.03)
    assert factors(foreign, [], [], 0, None).residual == 1, "nothing is known of it"


@pytest.mark.parametrize(
    ("values", "told"),
    [((1, 3, 0.5), [False, False, True]), ((2, 2, 0.5), [False, False, True]), ((0, 3, 0.5), [False, False, True])],
)
def test_microbatches_with_the_same_gradient_are_not_told_apart(values: Sequence[float], told: list[bool]) -> None:
    """Two columns of one direction: whatever their factors are, only their sum shows. The third one is told."""
    first, _, third = gradients(3)
    local = [first, 2 * first, third]
    found = factors(combined(values, local), local, [0] * 3, 0, None)
    assert found.residual < 1e-6
    assert found.values[2] == pytest.approx(0.5)
    assert np.isfinite(found.values).tolist() == told
    apart = [first, 2 * gradients(1, seed=9)[0], third]
    assert factors(combined(values, apart), apart, [0] * 3, 0, None).values == pytest.approx(values, abs=1e-6)


def test_nearly_the_same_gradient_under_rounding_is_not_told_apart() -> None:
    first, other, third, noise = gradients(4)
    local = [first, first + 1e-6 * other, third]
    applied = combined([1, 3, 0.5], local)
    applied = applied + 1e-7 * np.linalg.norm(applied) / np.linalg.norm(noise) * noise
    found = factors(applied, local, [0] * 3, 0, None)
    assert np.isfinite(found.values).tolist() == [False, False, True]
    assert found.values[2] == pytest.approx(0.5, rel=1e-3)


def test_more_microbatches_than_buckets_are_not_told_apart() -> None:
    local = gradients(12, size=8)
    found = factors(combined(range(1, 13), local), local, [0] * 12, 0, None)
    assert np.isnan(found.values).all()
    even = factors(combined([0.5] * 12, local), local, [0] * 12, 0, None)
    assert even.values == pytest.approx([0.5] * 12), "the control: one factor for all is told"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_tells_nothing(bad: float) -> None:
    local = gradients(3)
    applied = combined([1, 1, 1], local)
    for where in range(4):
        arrays = [array.copy() for array in (*local, applied)]
        arrays[where][17] = bad
        found = factors(arrays[3], arrays[:3], [0] * 3, 0, None)
        assert np.isnan(found.values).all()
        assert np.isnan(found.residual)


def test_no_gradient() -> None:
    """Nothing applied: every factor is 0. A microbatch without a gradient: any factor would do."""
    local = gradients(3)
    nothing = factors(np.zeros(SIZE), local, [0] * 3, 0, None)
    assert nothing.values.tolist() == [0, 0, 0]
    assert np.isnan(factors(np.zeros(SIZE), [], [], 0, None).residual)
    empty = [local[0], np.zeros(SIZE), local[2]]
    same = factors(combined([0.5] * 3, empty), empty, [0] * 3, 0, None)
    assert same.values[[0, 2]] == pytest.approx([0.5, 0.5])
    uneven = factors(combined([0.5, 1, 0.2], empty), empty, [0] * 3, 0, None)
    assert uneven.values[[0, 2]] == pytest.approx([0.5, 0.2])
    assert np.isnan(uneven.values[1])


def test_sums_that_cancel_leave_rounding_only() -> None:
    """Two gradients that nearly cancel: rounding is large beside what is applied, and small beside what was summed."""
    first, other, noise = gradients(3)
    local = [first, -first + 1e-3 * other]
    applied = combined([0.5, 0.5], local) + 1e-7 * np.linalg.norm(first) / np.linalg.norm(noise) * noise
    assert factors(applied, local, [0, 0], 0, None).values == pytest.approx([0.5, 0.5], rel=1e-3)


@pytest.mark.parametrize("count", [2, 8])
def test_low_precision(count: int) -> None:
    """Rounded sums are explained by one factor, where they are said to be rounded; a lost microbatch still shows."""
    local = gradients(count + 1, seed=3)
    noise = local.pop()

    def rounded(values: Sequence[float]) -> np.ndarray:
        applied = combined(values, local)
        return applied + 5e-3 * np.linalg.norm(applied) / np.linalg.norm(noise) * noise

    even = factors(rounded([0.5] * count), local, [0] * count, 0, None, low=True)
    assert np.ptp(even.values) == 0
    assert even.values == pytest.approx([0.5] * count, rel=1e-2)
    assert even.residual == pytest.approx(5e-3, rel=0.1)
    lost = factors(rounded([0.0] + [0.5] * (count - 1)), local, [0] * count, 0, None, low=True)
    largest = max(range(count), key=lambda j: np.linalg.norm(local[j]))
    assert lost.values[largest] == pytest.approx(0.5 if largest else 0, abs=0.1)
    strict = factors(rounded([0.5] * count), local, [0] * count, 0, None)
    assert strict.residual > 1e-3, "the control: in float32 that is no rounding"


# ------------------------------------------------------------------------------------------------ rules


@dataclass
class Micro:
    """A microbatch: its supervised tokens, what one of them weighs in its own backward pass, its factor."""

    tokens: int
    weight: float
    factor: float = 1.0
    rank: int = 0
    reduction: str = "mean"
    examples: int = 2
    elements: int | None = None
    scalars: tuple[float, ...] = ()
    key: int = 1
    same_pass: bool = False
    """In the backward pass of the one before: another term."""


Updates = Sequence[Sequence[Micro]]


def logs_of(updates: Updates, world: int = 1, clear: bool = True) -> list[Log]:
    """What every rank would have written down. Gradients are random; one that is applied is the same on all ranks."""
    generator = np.random.default_rng(7)
    logs = [Log(rank, world) for rank in range(world)]
    passes = [0] * world
    for number, update in enumerate(updates):
        applied = np.zeros(SIZE)
        order = 0
        for micro in update:
            order += 1
            log = logs[micro.rank]
            call = Call(
                site=f"train.py:{40 + micro.key}", key=micro.key, order=order, forward=passes[micro.rank],
                function="cross_entropy", reduction=micro.reduction, denominator=float(micro.tokens),
                tokens=micro.tokens, elements=micro.elements or micro.tokens, total=2.0 * micro.tokens,
                weight=micro.weight, min=micro.weight, max=micro.weight, examples=per_example(micro),
                scalars=micro.scalars, targets=order + 100 * number,
            )  # fmt: skip
            if micro.same_pass:
                last = log.events[-1]
                call = replace(call, forward=last.calls[0].forward)
                last.calls.append(call)
                continue
            passes[micro.rank] += 1
            call = replace(call, forward=passes[micro.rank])
            gradient = generator.standard_normal(SIZE) * (micro.tokens > 0)
            applied = applied + micro.factor * gradient
            log.events.append(Forward(passes[micro.rank], micro.examples, None, False))
            log.events.append(Backward(passes[micro.rank], "train.py:50", "pytorch", 1.0, [call], {0: gradient}))
        for log in logs:
            log.events.append(
                Step(
                    optimizer=0, name="SGD", where="train.py:51", applied=True, first_backward=0, sketch=applied,
                    final=applied, loss_scale=None, moved=True, learning_rate=0.1, gradients=2, low_precision=False,
                    in_parts=False, checksum=None, old_graphs=0, broken=False,
                )
            )  # fmt: skip
            if clear:
                log.events.append(ZeroGrad((0,), "train.py:52"))
    return logs


def per_example(micro: Micro) -> tuple[np.ndarray, np.ndarray]:
    """Tokens are dealt to the examples in turn."""
    tokens = np.array([len(range(i, micro.tokens, micro.examples)) for i in range(micro.examples)])
    return tokens, tokens * micro.weight


def judged(updates: Updates, world: int = 1, weighting: str = "declared") -> Report:
    return judge(logs_of(updates, world), weighting)


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}


COUNTS = ((10, 100, 30, 20), (5, 60, 7, 9), (11, 12, 80, 3))
"""Tokens of 4 microbatches in 3 updates."""


def each(weight_of: object, counts: Sequence[Sequence[int]] = COUNTS, ranks: int = 1, **others: object) -> Updates:
    """Microbatches dealt to ranks in halves; weight_of(tokens, tokens of the rank, tokens of all, microbatches)."""
    result = []
    for of_update in counts:
        half = len(of_update) // ranks
        rank_of = [j // half for j in range(len(of_update))]
        own = [sum(n for n, r in zip(of_update, rank_of, strict=True) if r == rank) for rank in range(ranks)]
        result.append(
            [
                Micro(n, weight_of(n, own[r], sum(of_update), half), 1 / ranks, r, **others)  # type: ignore[operator, arg-type]
                for n, r in zip(of_update, rank_of, strict=True)
            ]
        )
    return result


def test_exact() -> None:
    for ranks in (1, 2, 4):
        for reduction in ("mean", "sum"):
            right = each(lambda n, own, total, a, ranks=ranks: ranks / total, ranks=ranks, reduction=reduction)
            report = judged(right, ranks)
            assert (report.verdict, report.findings, report.world) == (EXACT, [], ranks)
            assert [w.ratio for u in report.updates for w in u.weights] == pytest.approx([1] * 12)


def test_mean_of_means() -> None:
    wrong = each(lambda n, own, total, a: 1 / n / a)
    report = judged(wrong)
    assert (report.verdict, kinds(report)) == (INEXACT, {"mean-of-means"})
    assert [finding.update for finding in report.findings] == [0, 1, 2]
    rows = report.updates[0].weights
    assert [row.ratio for row in rows] == pytest.approx([160 / 40, 160 / 400, 160 / 120, 160 / 80])
    equal = judged(each(lambda n, own, total, a: 1 / n / a, [(10, 10), (7, 7)]))
    assert (equal.verdict, equal.findings) == (EXACT, []), "the control: equal counts"
    asked = judged(wrong, weighting="microbatch")
    assert (asked.verdict, asked.findings) == (EXACT, [])


def test_mean_of_replicas() -> None:
    """Each rank divides by its own tokens; in one microbatch each, or in two."""
    for counts, ranks in ([(1, 7), (3, 2)], 2), (COUNTS, 2), (COUNTS, 4):
        report = judged(each(lambda n, own, total, a: 1 / own, counts, ranks), ranks)
        assert (report.verdict, kinds(report)) == (INEXACT, {"mean-of-replicas"}), (counts, ranks)
    control = judged(each(lambda n, own, total, a: 1 / own, [(5, 3, 2, 6), (1, 1, 1, 1)], 2), 2)
    assert (control.verdict, control.findings) == (EXACT, []), "as many tokens on each"


def test_mean_of_means_and_of_replicas() -> None:
    report = judged(each(lambda n, own, total, a: 1 / n / a, ranks=2), 2)
    assert (report.verdict, kinds(report)) == (INEXACT, {"mean-of-means", "mean-of-replicas"})
    half = judged(each(lambda n, own, total, a: own / total * 2 / n / a, ranks=2), 2)
    assert kinds(half) == {"mean-of-means"}, "replicas by their tokens, microbatches alike"


def test_uneven_weights() -> None:
    report = judged(each(lambda n, own, total, a: (1 + n % 7) / total))
    assert (report.verdict, kinds(report)) == (INEXACT, {"uneven-weights"})


def test_lost_microbatch() -> None:
    updates = each(lambda n, own, total, a: 1 / total)
    lost = [[replace(m, factor=0.0) if j == 1 else m for j, m in enumerate(update)] for update in updates]
    report = judged(lost)
    assert (report.verdict, kinds(report)) == (INEXACT, {"lost-microbatch"})
    assert {finding.factor for finding in report.findings} == {0.0}
    assert "1 of 4 microbatches, 100 tokens" in report.findings[0].evidence


@pytest.mark.parametrize("position", [0, -1])
def test_partial_group(position: int) -> None:
    """4 microbatches are divided by 4, and 3 too."""
    counts = [[6] * 4, [6] * 4, [6] * 4]
    counts[position] = [6] * 3
    report = judged(each(lambda n, own, total, a: 1 / n / 4, counts))
    assert (report.verdict, kinds(report)) == (INEXACT, {"partial-group"})
    (finding,) = report.findings
    assert (finding.update, finding.factor) == (position % 3, 0.75)
    control = judged(each(lambda n, own, total, a: 1 / n / a, counts))
    assert (control.verdict, control.findings) == (EXACT, [])


def test_group_that_took_up_what_was_left_over() -> None:
    counts = [[6] * 4, [6] * 7, [6] * 4]
    report = judged(each(lambda n, own, total, a: 1 / n / 4, counts))
    assert kinds(report) == {"stale-gradient"}
    assert report.findings[0].factor == pytest.approx(7 / 4)


def test_gradient_that_was_not_cleared() -> None:
    updates = each(lambda n, own, total, a: 1 / total, [(4, 5), (6, 7), (2, 9)])
    logs = logs_of(updates, clear=False)
    steps = [event for event in logs[0].events if isinstance(event, Step)]
    total = np.zeros(SIZE)
    for step in steps:
        total = total + step.sketch
        step.sketch = step.final = total
    report = judge(logs)
    assert (report.verdict, kinds(report)) == (INEXACT, {"stale-gradient"})
    assert [finding.update for finding in report.findings] == [1, 2]
    control = judge(logs_of(updates, clear=False))
    assert (control.verdict, control.findings) == (EXACT, []), "not cleared, and not there"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_count_mismatch(reduction: str) -> None:
    """Divided by one target more or less per example, or by all positions."""
    for words, count_of in {
        "one target more per example": lambda total, microbatches: total + 2 * microbatches,
        "one target less per example": lambda total, microbatches: total - 2 * microbatches,
        "all positions, the masked ones included": lambda total, microbatches: 128 * microbatches,
    }.items():
        wrong = each(
            lambda n, own, total, a, count_of=count_of: 1 / count_of(total, a), reduction=reduction, elements=128
        )
        report = judged(wrong)
        assert kinds(report) == {"count-mismatch"}, words
        assert all(words in finding.evidence for finding in report.findings)
        assert report.verdict == INEXACT
    control = judged(each(lambda n, own, total, a: 1 / total, reduction=reduction, elements=128))
    assert (control.verdict, control.findings) == (EXACT, [])


def test_microbatch_without_a_target_is_counted() -> None:
    counts = [(6, 0, 6, 6), (6, 6, 6, 0)]
    report = judged(each(lambda n, own, total, a: 1 / 6 / a if n else 0.0, counts))
    assert kinds(report) == {"count-mismatch"}
    assert "4 microbatches, 1 without a target" in report.findings[0].evidence
    control = judged(each(lambda n, own, total, a: 1 / 18 if n else 0.0, counts))
    assert (control.verdict, control.findings) == (EXACT, [])


CAUSES = {
    "divided by A = 3 once more than it should": 1 / 3,
    "not divided by A = 3": 3,
    "averaged over D = 2 replicas once more than it should": 1 / 2,
    "summed over D = 2 replicas where an average was assumed": 2,
    "divided by A x D = 6 once more than it should": 1 / 6,
    "not divided by A x D = 6": 6,
    "not divided by the 59 supervised tokens": 59,
    "not divided by the 59 supervised tokens, and averaged over D = 2 replicas": 59 / 2,
    "the script multiplies by a number of its own": 0.77,
}
SAME_TOTAL = ((3, 8, 20, 9, 12, 7), (10, 9, 8, 11, 2, 19))


@pytest.mark.parametrize("words", CAUSES)
def test_scale_and_its_cause(words: str) -> None:
    """Of a mean, 3 microbatches on each of 2 ranks: every weight is off by one factor."""
    report = judged(each(lambda n, own, total, a: CAUSES[words] * 2 / total, SAME_TOTAL, 2), 2)
    assert (report.verdict, kinds(report)) == (EXACT_UP_TO_FACTOR, {"scale"})
    (finding,) = report.findings
    assert finding.factor == pytest.approx(CAUSES[words])
    assert finding.evidence.endswith(words)


def test_scale_that_changes_between_updates() -> None:
    """Weights of one update are right among each other, and the update is off by another number each time."""
    updates = [
        [Micro(n, scale / sum(counts)) for n in counts] for counts, scale in zip(COUNTS, (0.3, 1.1, 2.7), strict=True)
    ]
    report = judged(updates)
    assert kinds(report) == {"scale"}
    assert report.verdict == INEXACT
    assert report.findings[0].factor is None


def test_sum_that_is_divided_by_nothing_is_as_declared() -> None:
    report = judged(each(lambda n, own, total, a: 1.0, reduction="sum"))
    assert (report.verdict, report.findings) == (EXACT_UP_TO_FACTOR, [])
    asked = judged(each(lambda n, own, total, a: 1.0, reduction="sum"), weighting="token")
    assert kinds(asked) == {"scale"}, "the control: who asks for tokens is told"
    fixed = judged(each(lambda n, own, total, a: 1 / 512, reduction="sum"))
    assert (fixed.verdict, fixed.findings) == (EXACT_UP_TO_FACTOR, []), "or by a number that stays"


def test_numbers_of_the_script_are_allowed() -> None:
    """A coefficient that the script multiplies its loss by is its own affair; a number of the layout is not."""
    allowed = judged(each(lambda n, own, total, a: 0.7 / total, scalars=(0.7,)))
    assert (allowed.verdict, allowed.findings) == (EXACT_UP_TO_FACTOR, [])
    product = judged(each(lambda n, own, total, a: 0.7 * 3 / total, scalars=(0.7, 3.0)))
    assert (product.verdict, product.findings) == (EXACT_UP_TO_FACTOR, [])
    control = judged(each(lambda n, own, total, a: 0.7 / total))
    assert kinds(control) == {"scale"}
    other = judged(each(lambda n, own, total, a: 0.7 / total, scalars=(0.6,)))
    assert kinds(other) == {"scale"}
    layout = judged(each(lambda n, own, total, a: 0.25 / total, scalars=(0.25,)))
    assert kinds(layout) == {"scale"}, "1 / A, with A = 4"


def two_terms(first: float, second: float) -> Updates:
    """Two loss calls in each backward pass, each scaled as given."""
    return [
        [
            micro
            for n in counts
            for micro in (
                Micro(n, first / sum(counts), key=1),
                Micro(n + 2, second / (sum(counts) + 2 * len(counts)), key=2, same_pass=True),
            )
        ]
        for counts in COUNTS
    ]


def test_term_scale() -> None:
    """One term is right, the other counts 4 times; both right; both off alike; both off differently."""
    report = judged(two_terms(1, 4))
    assert (report.verdict, kinds(report)) == (INEXACT, {"term-scale"})
    assert [finding.factor for finding in report.findings] == pytest.approx([4])
    assert report.findings[0].where == "train.py:42"
    right = judged(two_terms(1, 1))
    assert (right.verdict, right.findings) == (EXACT, [])
    alike = judged(two_terms(4, 4))
    assert (alike.verdict, kinds(alike)) == (EXACT_UP_TO_FACTOR, {"scale"})
    differing = judged(two_terms(4, 0.3))
    assert (differing.verdict, kinds(differing)) == (INEXACT, {"term-scale"})


# ------------------------------------------------------------------------------------------------ what is missing


def broken_logs() -> Iterator[tuple[str, list[Log], str]]:
    right = each(lambda n, own, total, a: 2 / total, ranks=2)
    yield "a rank is missing", logs_of(right, 2)[:1], "rank 1 of 2 did not report"
    failed = logs_of(right, 2)
    failed[1].ended = False
    failed[1].notes.append("the script failed: OSError")
    yield "a rank failed", failed, "the script failed: OSError"
    yield "nothing ran", [Log(0, 1)], "no optimizer of torch.optim ran"


@pytest.mark.parametrize(("logs", "reason"), [pytest.param(*rest, id=name) for name, *rest in broken_logs()])
def test_what_is_missing_is_not_called_exact(logs: list[Log], reason: str) -> None:
    report = judge(logs)
    assert report.verdict == NOT_OBSERVED
    assert report.findings == []
    assert any(reason in said for said in report.not_observed)
    assert report.exit_code == 3


def test_residual_is_not_trusted() -> None:
    """A part of the gradient that comes from nothing that was seen."""
    logs = logs_of(each(lambda n, own, total, a: 1 / total))
    foreign = np.random.default_rng(1).standard_normal(SIZE)
    for event in logs[0].events:
        if isinstance(event, Step):
            event.sketch = event.final = event.sketch + foreign
    report = judge(logs)
    assert (report.verdict, report.updates) == (NOT_OBSERVED, [])
    assert any("of the applied gradient comes from nothing that was seen" in said for said in report.not_observed)


def test_updates_that_only_one_rank_made_are_named() -> None:
    logs = logs_of(each(lambda n, own, total, a: 2 / total, ranks=2), 2)
    events = logs[1].events
    logs[1].events = events[: 1 + next(i for i, event in enumerate(events) if isinstance(event, ZeroGrad))]
    report = judge(logs)
    assert len(report.updates) == 1
    assert any("update" in said for said in report.not_observed), "2 of 3 are judged by nobody"
    assert judge(logs_of(each(lambda n, own, total, a: 2 / total, ranks=2), 2)).not_observed == []
