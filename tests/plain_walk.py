"""A plain walk over the actions of a schedule, one at a time: what `simulate` is compared with. No isostep in it."""

from __future__ import annotations

from collections.abc import Sequence

Action = tuple[int, str, int]
"""Stage index, op, microbatch index."""


def walk(
    orders: Sequence[Sequence[Action]],
    rank_of: Sequence[int],
    durations: dict[str, Sequence[float]],
    transfer: Sequence[float],
    first_of_round_only: int = 0,
) -> list[list[tuple[float, float]]]:
    """Start and end of every action, in the order of `orders`.

    durations: of ops F, B, I and W by stage index. transfer: of the link behind each stage index.
    first_of_round_only: where not 0, a chunk change between the last and the first rank is waited for by the first of
    that many microbatches alone. This is wrong; the script behind the published table of bubble rates does so.
    Raises ValueError on a deadlock.
    """
    last = len(rank_of) - 1
    ended: dict[tuple[str, int, int], float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in orders]
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while len(spans[rank]) < len(order):
                stage, op, microbatch = order[len(spans[rank])]
                need, delay = _need(stage, op, microbatch, last, rank_of, transfer)
                if need is not None and need not in ended:
                    break
                wraps = op != "W" and need is not None and abs(rank_of[need[1]] - rank) > 1
                if wraps and first_of_round_only and microbatch % first_of_round_only:
                    need = None
                free = spans[rank][-1][1] if spans[rank] else 0.0
                start = max(free, ended[need] + delay if need is not None else 0.0)
                end = start + durations[op][stage]
                ended["B" if op == "I" else op, stage, microbatch] = end
                spans[rank].append((start, end))
                left -= 1
        if left == before:
            raise ValueError("deadlock")
    return spans


def _need(
    stage: int, op: str, microbatch: int, last: int, rank_of: Sequence[int], transfer: Sequence[float]
) -> tuple[tuple[str, int, int] | None, float]:
    """What an action waits for, and how long that travels."""
    if op == "W":
        return ("B", stage, microbatch), 0.0
    if op == "F":
        if stage == 0:
            return None, 0.0
        before, link = stage - 1, stage - 1
    elif stage == last:
        return ("F", stage, microbatch), 0.0
    else:
        before, link = stage + 1, stage
    delay = transfer[link] if rank_of[before] != rank_of[stage] else 0.0
    return ("F" if op == "F" else "B", before, microbatch), delay
