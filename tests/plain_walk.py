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
    overlapped: Sequence[frozenset[int]] = (),
    blocking: bool = False,
) -> list[list[tuple[float, float]]]:
    """Start and end of every action, in the order of `orders`.

    durations: of ops F, B, I and W by stage index. transfer: of the link behind each stage index.
    overlapped: positions of forwards that run with the backward behind them: both wait for what either needs, and are
    sent on after both. blocking: a rank is held while it sends.
    first_of_round_only: where not 0, a chunk change between the last and the first rank is waited for by the first of
    that many microbatches alone. This is wrong; the script behind the published table of bubble rates does so.
    Raises ValueError on a deadlock.
    """
    last = len(rank_of) - 1
    ended: dict[tuple[str, int, int], float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in orders]
    free = [0.0] * len(orders)
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while len(spans[rank]) < len(order):
                at = len(spans[rank])
                together = order[at : at + (2 if overlapped and at in overlapped[rank] else 1)]
                needs = [_need(*action, last, rank_of, transfer) for action in together]
                if any(need is not None and need not in ended for need, _ in needs):
                    break
                start = free[rank]
                for need, delay in needs:
                    wraps = need is not None and abs(rank_of[need[1]] - rank) > 1
                    shortcut = wraps and first_of_round_only and together[0][2] % first_of_round_only
                    if need is not None and not shortcut:
                        start = max(start, ended[need] + delay)
                for stage, op, _ in together:
                    spans[rank].append((start, start + durations[op][stage]))
                    start += durations[op][stage]
                free[rank] = start
                for stage, op, microbatch in together:
                    ended["B" if op == "I" else op, stage, microbatch] = start
                    to = stage + (1 if op == "F" else -1)
                    if blocking and op != "W" and 0 <= to <= last and rank_of[to] != rank:
                        free[rank] += transfer[min(stage, to)]
                left -= len(together)
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
