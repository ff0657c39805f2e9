"""A pipeline schedule as data: which rank runs which action on which model chunk, in which order. Compute only.

A rank holds one or more chunks of consecutive layers. A stage index counts the chunks in model order, as
torch.distributed.pipelining does, so there are P * v of them. Times and transfers are not part of a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..errors import InputError

OPS = "FBIW"
"""Forward; full backward; backward for the inputs; backward for the weights. An op is an index into this text."""
F, B, I, W = range(4)  # noqa: E741
MAX_ACTIONS = 50_000_000
MAX_CHUNKS = 8192
"""Stage indices, P * v."""
MAX_OF_RANK = 300_000
"""Actions of one rank; the simulator takes a few microseconds for each turn of all ranks."""


class Action(NamedTuple):
    """One piece of work: an op of one microbatch on one model chunk."""

    stage: int
    op: str
    microbatch_index: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch_index}"


@dataclass(frozen=True)
class Schedule:
    """The order of actions on every rank. Build one with `generate`, `search.auto` or `csv_file.read`."""

    name: str
    stages: int
    """P, ranks of the pipeline."""
    chunks: int
    """v, model chunks on a rank."""
    num_microbatches: int
    """M."""
    rank_of: tuple[int, ...]
    """The rank of each stage index, P * v of them."""
    orders: tuple[np.ndarray, ...]
    """One per rank: int32 codes of its actions, (op * P * v + stage) * M + microbatch."""
    overlapped: tuple[frozenset[int], ...] = ()
    """One per rank, or empty: positions of the forwards that run overlapped with the full backward behind them."""

    @property
    def num_chunks(self) -> int:
        """Stage indices, P * v."""
        return self.stages * self.chunks

    @property
    def size(self) -> int:
        """Actions of all ranks."""
        return sum(len(order) for order in self.orders)

    def actions(self, rank: int) -> list[Action]:
        """What one rank does, in order."""
        ops, stages, microbatches = self.split(self.orders[rank])
        return [
            Action(stage, OPS[op], microbatch)
            for op, stage, microbatch in zip(ops.tolist(), stages.tolist(), microbatches.tolist(), strict=True)
        ]

    def split(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ops, stage indices and microbatch indices of coded actions; each shaped as `codes`."""
        rest, microbatches = np.divmod(codes, self.num_microbatches)
        ops, stages = np.divmod(rest, self.num_chunks)
        return ops, stages, microbatches

    def forward_only(self) -> Schedule:
        """The forwards alone, in the same order: inference, or validation."""
        limit = self.num_chunks * self.num_microbatches
        return replace(self, orders=tuple(order[order < limit] for order in self.orders), overlapped=())


def encode(op: int, stage: int, microbatches: np.ndarray, num_chunks: int, num_microbatches: int) -> np.ndarray:
    """Codes of one op on one stage index for several microbatches; int32, shaped as `microbatches`."""
    return ((op * num_chunks + stage) * num_microbatches + microbatches).astype(np.int32)


def check_size(stages: int, chunks: int, num_microbatches: int) -> None:
    """Raises InputError where a count is not 1 or more, or the schedule would have too many actions."""
    given = {"stages": stages, "chunks": chunks, "microbatches": num_microbatches}
    for name, value in given.items():
        if not isinstance(value, int) or value < 1:
            raise InputError.of(name, value, "a whole number of 1 or more", f"choose another number of {name}")
    actions = 3 * stages * chunks * num_microbatches
    if actions > MAX_ACTIONS:
        got = f"{stages} stages x {chunks} chunks x {num_microbatches} microbatches"
        raise InputError.of("schedule", got, f"at most {MAX_ACTIONS // 3:,} in all", "choose fewer microbatches")
    if stages * chunks > MAX_CHUNKS:
        got = f"{stages} stages x {chunks} chunks"
        raise InputError.of("schedule", got, f"at most {MAX_CHUNKS:,} chunks in all", "choose fewer")
    if 3 * chunks * num_microbatches > MAX_OF_RANK:
        got = f"{chunks} chunks x {num_microbatches} microbatches"
        raise InputError.of("schedule", got, f"at most {MAX_OF_RANK // 3:,} a rank", "choose fewer microbatches")


def looped(stages: int, chunks: int) -> tuple[int, ...]:
    """The rank of each stage index where the model goes round the ranks `chunks` times: 0 1 2 0 1 2."""
    return tuple(index % stages for index in range(stages * chunks))


def v_shaped(stages: int) -> tuple[int, ...]:
    """The rank of each stage index where the model goes through the ranks and back: 0 1 2 2 1 0."""
    return (*range(stages), *reversed(range(stages)))


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Orders one after the other."""
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
