"""Smaller worlds, one after the other, in the place of the default process group: for what takes all of a world."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import PeerLostError

T = TypeVar("T")


def in_worlds(sizes: Sequence[int], run: Callable[[int, dist.ProcessGroup], T]) -> list[T]:
    """run(i, world) in a world of the first sizes[i] ranks, for each i; returns the results of those with this rank.

    Every rank of the world calls this. Each world is let go before the next one begins, with all process groups that
    were made in it; the last one is of all ranks again. Groups that the caller held before have ended.
    Raises PeerLostError where a rank is lost or late.
    """
    rank, size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend_config()
    store: Any = dist.distributed_c10d._get_default_store()
    call = store.add(f"isostep/worlds/{rank}", 1)
    results = []
    for index, members in enumerate([*sizes, size]):
        here = dist.distributed_c10d.PrefixStore(f"isostep/worlds/{call}.{index}", store)
        with _all_come(size):
            if here.add("come", 1) == size:  # nobody waits for anybody in the world before
                here.set("all", "")
            here.wait(["all"])
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # a group that somebody holds keeps its threads
        if rank < members:
            with _all_come(members):
                dist.init_process_group(backend, store=here, rank=rank, world_size=members, timeout=store.timeout)
            if index < len(sizes):
                results.append(run(index, dist.distributed_c10d._get_default_group()))
    return results


@contextmanager
def _all_come(ranks: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"workers: lost one, expected all {ranks} to answer; see why it ended") from error
