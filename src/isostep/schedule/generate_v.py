"""The two V-shaped schedules: chunk 0 goes down the ranks, chunk 1 comes back up, so that a rank holds the first
and the last layers it can. Each is written as its phases, in tokens such as "F0" (forward of chunk 0); microbatches
are counted afterwards. The order of both is the one that torch.distributed.pipelining runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from .ir import OPS, B, F, I, W

Tokens = list[str]
OVERLAP = "F+B"
"""A token "F+B 0 1": the forward of chunk 0 overlapped with the full backward of chunk 1."""


class Sizes(Protocol):
    """P and M of a schedule to be built."""

    @property
    def stages(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...


def zb_v(sizes: Sizes, rank: int) -> np.ndarray:
    """ZB-V (Qi et al. 2024, section 6) of one rank: no idle time where f = b = w, 2P chunk activations held.

    Returns int32 codes. With fewer than 2P - 1 microbatches, those beyond M are left out of the order for 2P - 1.
    """
    stages, after = sizes.stages, sizes.stages - rank
    microbatches = max(2 * stages - 1, sizes.num_microbatches)
    warm_up = ["F0"] * (2 * after - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * after
    forwards = 2 * after - 1 + rank
    steady = ["F0", "I0", "W0", "F1", "I1", "W1"] * (microbatches - forwards)
    drained = ["I0", "W0", "F1", "I1", "W1"] * (forwards - stages)
    cool_down = ["I0", "I1"] * rank + ["I0", "W0"] * after
    return _counted([*warm_up, *steady, *drained, *cool_down, *["W1"] * rank, *["W0"] * rank], sizes, rank)


def dualpipe_v(sizes: Sizes, rank: int) -> np.ndarray:
    """DualPipeV (deepseek-ai/DualPipe, its eight steps) of one rank; needs M >= 2P.

    Returns int32 codes; the forward of an overlapped pair is marked by its sign, as ~code.
    """
    after, held = sizes.stages - 1 - rank, rank + 1
    last = after == 0
    tokens = ["F0"] * (2 * after)
    tokens += ["F0", "F1"] * held
    tokens += ["I1", "W", "F1"] * after
    main = [f"{OVERLAP} 0 1", f"{OVERLAP} 1 0"] * (sizes.num_microbatches - 2 * sizes.stages + held)
    tokens += ["F0", "B1", *main[1:]] if last else main
    tokens += ["B1", f"{OVERLAP} 1 0"] * after
    drain = ["B1", "B0"] * held
    split = held // 2 * 2 + (rank + 1) % 2  # from here on the weights wait, and fill the steps below
    drain[split:] = [token.replace("B", "I") for token in drain[split:]]
    tokens += drain
    tokens += ["W", "I0"] * after + ["W"] * held
    return _counted(tokens, sizes, rank)


def _counted(tokens: Iterable[str], sizes: Sizes, rank: int) -> np.ndarray:
    """Codes of the tokens, each op of a chunk on the next microbatch; a "W" without a chunk takes the oldest due."""
    stage_of = (rank, 2 * sizes.stages - 1 - rank)
    counts = {(op, chunk): 0 for op in (F, I, W) for chunk in (0, 1)}
    due: deque[tuple[int, int]] = deque()
    codes: list[int] = []

    def add(op: int, chunk: int, mark: bool = False) -> None:
        key = (I if op == B else op, chunk)
        microbatch = counts[key]
        counts[key] += 1
        if op == I:
            due.append((chunk, microbatch))
        append(op, chunk, microbatch, mark)

    def append(op: int, chunk: int, microbatch: int, mark: bool = False) -> None:
        if microbatch < sizes.num_microbatches:
            code = (op * 2 * sizes.stages + stage_of[chunk]) * sizes.num_microbatches + microbatch
            codes.append(~code if mark else code)

    for token in tokens:
        if token.startswith(OVERLAP):
            _, forward, backward = token.split()
            add(F, int(forward), mark=True)
            add(B, int(backward))
        elif token == "W":
            if due:
                append(W, *due.popleft())
        else:
            add(OPS.index(token[0]), int(token[1]))
    return np.array(codes, np.int32)
