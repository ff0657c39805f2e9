"""The named schedules, each as its paper draws it: warm-up, steady state, cool-down.

Sources: GPipe (Huang et al. 2019); 1F1B (Narayanan et al. 2019, PipeDream); interleaved 1F1B (Narayanan et al. 2021,
section 2.2.2); looped breadth first (Lamy-Poirier 2023); ZB-H1, ZB-H2 and ZB-V (Qi et al. 2024, sections 2 and 6);
DualPipeV (DeepSeek 2025; "Cut-in-half" of Qi et al.). Where torch.distributed.pipelining has the schedule, the order
is the one that it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..errors import InputError
from ..units import count
from . import generate_v
from .ir import B, F, I, Schedule, W, check_size, encode, joined, looped, v_shaped


@dataclass(frozen=True)
class Sizes:
    """P, v and M of a schedule to be built."""

    stages: int
    chunks: int
    num_microbatches: int

    def codes(self, op: int, stage: int) -> np.ndarray:
        """One op on one stage index for all microbatches in order; int32 (M,)."""
        microbatches = np.arange(self.num_microbatches)
        return encode(op, stage, microbatches, self.stages * self.chunks, self.num_microbatches)


@dataclass(frozen=True)
class Named:
    """A named schedule: what it is, how many chunks a rank has, and how one rank's order is built."""

    summary: str
    order: Callable[[Sizes, int], np.ndarray]
    """The order of one rank, given the sizes and the rank."""
    chunks: int = 1
    """v, where the caller does not say."""
    chunks_are_fixed: bool = True
    splits_backward: bool = False
    v_shaped: bool = False
    check: Callable[[str, Sizes], None] | None = None
    """Raises InputError where the schedule does not exist for these sizes."""


def generate(name: str, stages: int, num_microbatches: int, chunks: int | None = None) -> Schedule:
    """The named schedule over `stages` ranks (P), `chunks` a rank (v; None is its own default).

    Raises InputError for an unknown name, and where the schedule does not exist for these sizes.
    """
    if name not in SCHEDULES:
        raise InputError.of("schedule", name, f"one of {', '.join(NAMES)}", "choose one of these")
    named = SCHEDULES[name]
    sizes = Sizes(stages, named.chunks if chunks is None else chunks, num_microbatches)
    check_size(stages, sizes.chunks, num_microbatches)
    if named.chunks_are_fixed and sizes.chunks != named.chunks:
        raise InputError.of("chunks", sizes.chunks, f"{named.chunks} for {name}", f"leave out chunks for {name}")
    if named.check is not None:
        named.check(name, sizes)
    orders, overlapped = [], []
    for rank in range(stages):
        order = named.order(sizes, rank)
        overlapped.append(frozenset(np.flatnonzero(order < 0).tolist()))  # see generate_v: marked by their sign
        orders.append(np.where(order < 0, ~order, order) if overlapped[-1] else order)
    return Schedule(
        name=name,
        stages=stages,
        chunks=sizes.chunks,
        num_microbatches=num_microbatches,
        rank_of=v_shaped(stages) if named.v_shaped else looped(stages, sizes.chunks),
        orders=tuple(orders),
        overlapped=tuple(overlapped) if any(overlapped) else (),
    )


def order_with_warm_up(schedule: Schedule, forwards: tuple[int, ...]) -> Schedule:
    """A schedule of one chunk a rank with full backwards, and `forwards` of each rank before its first of them."""
    sizes = Sizes(schedule.stages, 1, schedule.num_microbatches)
    orders = (_alternate(sizes.codes(F, rank), sizes.codes(B, rank), count - 1) for rank, count in enumerate(forwards))
    return replace(schedule, orders=tuple(orders))


def _gpipe(sizes: Sizes, rank: int) -> np.ndarray:
    return joined([sizes.codes(F, rank), sizes.codes(B, rank)])


def _one_forward_one_backward(sizes: Sizes, rank: int) -> np.ndarray:
    warm_up = sizes.stages - 1 - rank
    return _alternate(sizes.codes(F, rank), sizes.codes(B, rank), warm_up)


def _interleaved(sizes: Sizes, rank: int) -> np.ndarray:
    warm_up = (sizes.chunks - 1) * _per_round(sizes) + 2 * (sizes.stages - 1 - rank)
    return _alternate(_in_rounds(sizes, rank, F), _in_rounds(sizes, rank, B), warm_up)


def _looped_bfs(sizes: Sizes, rank: int) -> np.ndarray:
    held = range(rank, sizes.stages * sizes.chunks, sizes.stages)
    return joined([sizes.codes(F, s) for s in held] + [sizes.codes(B, s)[::-1] for s in reversed(held)])


def _zb_h1(sizes: Sizes, rank: int) -> np.ndarray:
    warm_up, delayed = sizes.stages - 1 - rank, rank
    forwards, inputs, weights = (sizes.codes(op, rank) for op in (F, I, W))
    return _with_weights(_alternate(forwards, inputs, warm_up), inputs, weights, delayed)


def _zb_h2(sizes: Sizes, rank: int) -> np.ndarray:
    warm_up, delayed = 2 * (sizes.stages - 1 - rank), 2 * rank
    forwards, inputs, weights = (sizes.codes(op, rank) for op in (F, I, W))
    return _with_weights(_alternate(forwards, inputs, warm_up), inputs, weights, delayed)


def _interleaved_zb(sizes: Sizes, rank: int) -> np.ndarray:
    warm_up = (sizes.chunks - 1) * _per_round(sizes) + sizes.stages - 1 - rank
    forwards, inputs, weights = (_in_rounds(sizes, rank, op) for op in (F, I, W))
    return _with_weights(_alternate(forwards, inputs, warm_up), inputs, weights, delayed=rank)


def _alternate(forwards: np.ndarray, backwards: np.ndarray, warm_up: int) -> np.ndarray:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    steady = np.column_stack([forwards[warm_up:], backwards[: len(forwards) - warm_up]]).reshape(-1)
    return joined([forwards[:warm_up], steady, backwards[len(forwards) - warm_up :]])


def _with_weights(order: np.ndarray, inputs: np.ndarray, weights: np.ndarray, delayed: int) -> np.ndarray:
    """Puts the k-th weight backward behind the (k + delayed)-th input backward; the last ones at the end."""
    places = np.empty(int(order.max()) + 1, np.int32)
    places[order] = np.arange(len(order))
    behind = np.full(len(weights), len(order))
    if delayed < len(inputs):
        behind[: len(inputs) - delayed] = places[inputs[delayed:]]
    keys = np.concatenate([2 * np.arange(len(order)), 2 * behind + 1])
    return np.concatenate([order, weights])[np.argsort(keys, kind="stable")]


def _per_round(sizes: Sizes) -> int:
    """Microbatches that go through one chunk before the next chunk's turn, about P."""
    return sizes.num_microbatches // max(1, sizes.num_microbatches // sizes.stages)


def _in_rounds(sizes: Sizes, rank: int, op: int) -> np.ndarray:
    """One op of all chunks of a rank, round by round: a round's microbatches on one chunk, then on the next."""
    local = range(sizes.chunks) if op == F else reversed(range(sizes.chunks))
    rows = np.stack([sizes.codes(op, chunk * sizes.stages + rank) for chunk in local])
    rounds = rows.reshape(sizes.chunks, -1, _per_round(sizes))
    return np.ascontiguousarray(rounds.transpose(1, 0, 2)).reshape(-1)


def _check_rounds(name: str, sizes: Sizes) -> None:
    rounds = max(1, sizes.num_microbatches // sizes.stages)
    if sizes.num_microbatches % rounds:
        below, above = (n - n % sizes.stages for n in (sizes.num_microbatches, sizes.num_microbatches + sizes.stages))
        expected = f"a multiple of {rounds} for {name} on {count(sizes.stages, 'stage')}"
        raise InputError.of("microbatches", sizes.num_microbatches, expected, f"choose {below} or {above}")


def _check_dualpipe_v(name: str, sizes: Sizes) -> None:
    if sizes.num_microbatches < 2 * sizes.stages:
        expected = f"at least {2 * sizes.stages} for {name} on {count(sizes.stages, 'stage')}"
        raise InputError.of("microbatches", sizes.num_microbatches, expected, "choose more, or fewer stages")


SCHEDULES: dict[str, Named] = {
    "gpipe": Named("all forwards, then all backwards", _gpipe),
    "1f1b": Named("one forward, one backward: at most P activations held", _one_forward_one_backward),
    "interleaved-1f1b": Named(
        "1f1b over v chunks a rank: shorter fill and drain, more transfers",
        _interleaved,
        chunks=2,
        chunks_are_fixed=False,
        check=_check_rounds,
    ),
    "looped-bfs": Named(
        "all microbatches through one chunk, then the next", _looped_bfs, chunks=2, chunks_are_fixed=False
    ),
    "zb-h1": Named("weight backwards fill the drain, memory as 1f1b", _zb_h1, splits_backward=True),
    "zb-h2": Named("weight backwards fill it all, memory twice 1f1b", _zb_h2, splits_backward=True),
    "interleaved-zb": Named(
        "interleaved, with weight backwards in the drain",
        _interleaved_zb,
        chunks=2,
        chunks_are_fixed=False,
        splits_backward=True,
        check=_check_rounds,
    ),
    "zb-v": Named(
        "two chunks a rank, there and back: no idle time where f = b = w",
        generate_v.zb_v,
        chunks=2,
        splits_backward=True,
        v_shaped=True,
    ),
    "dualpipe-v": Named(
        "two chunks a rank, there and back, a forward overlapped with a backward",
        generate_v.dualpipe_v,
        chunks=2,
        splits_backward=True,
        v_shaped=True,
        check=_check_dualpipe_v,
    ),
}
NAMES = tuple(SCHEDULES)
