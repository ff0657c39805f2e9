"""Bringing what every rank has written down to rank 0, through the store of the process group. No collective is used.

A watched script keeps its own process groups to itself: nothing is added to its collectives, and a rank that is gone
costs a timeout, not a hang.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

PART = 8 << 20
"""Bytes of one entry of a store."""


class Meeting:
    """Where ranks meet. Remembers the store of the first process group that the script starts."""

    def __init__(self) -> None:
        self.rank, self.world = 0, 1
        self._store: Any = None
        self._group: Any = None
        if dist.is_available() and dist.is_initialized():
            self.joined()
        elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def joined(self) -> None:
        """The default process group exists now."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # one that dies in destroy_process_group, while its thread drops the last work, can hang (torch 2.13)
        self._group = dist.group.WORLD
        self._store = PrefixStore("isostep/audit", dist.distributed_c10d._get_default_store())

    def gather(self, value: Any, seconds: float, fold: Callable[[list[Any]], Any]) -> Any:
        """Rank 0 folds the values of all ranks that come in time, by rank; every rank gets what it made of them.

        Raises TimeoutError on a rank that gets no answer.
        """
        if self.world == 1:
            return fold([value])
        store = self._store = self._store or self._of_launcher(seconds)
        if store is None:
            return fold([value])
        name = f"{store.add(f'meetings of {self.rank}', 1)}"  # ranks meet in one order, and may meet again
        if self.rank:
            _send(store, f"{name}/{self.rank}", value)
            answer = _receive(store, f"{name}/answer", 2 * seconds)
            store.set(f"{name}/read/{self.rank}", "1")
            return answer
        values = [value]
        for rank in range(1, self.world):
            try:
                values.append(_receive(store, f"{name}/{rank}", seconds))
            except TimeoutError:
                continue
        answer = fold(values)
        _send(store, f"{name}/answer", answer)
        for rank in range(1, len(values)):  # a store that lives in this process stays until all have read it
            try:
                store.wait([f"{name}/read/{rank}"], timedelta(seconds=min(seconds, 10)))
            except (RuntimeError, ValueError):
                break
        return answer

    def _of_launcher(self, seconds: float) -> Any:
        """The store of torchrun's agent, where the script has started no process group."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return None
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            store = TCPStore(address, port, self.world, False, timedelta(seconds=seconds))
        except (RuntimeError, ValueError):
            return None
        return PrefixStore("isostep/audit", store)


def _send(store: Any, key: str, value: Any) -> None:
    data = pickle.dumps(value)
    parts = [data[i : i + PART] for i in range(0, len(data), PART)]
    for number, part in enumerate(parts):
        store.set(f"{key}/{number}", part)
    store.set(key, str(len(parts)))


def _receive(store: Any, key: str, seconds: float) -> Any:
    try:
        store.wait([key], timedelta(seconds=seconds))
        parts = [store.get(f"{key}/{number}") for number in range(int(store.get(key)))]
    except (RuntimeError, ValueError) as error:
        raise TimeoutError(f"{key}: no answer in {seconds:g} s") from error
    return pickle.loads(b"".join(parts))


def process_group_starts() -> list[tuple[Any, str]]:
    """Owners and names of the function that starts the default process group."""
    return [(dist, "init_process_group"), (dist.distributed_c10d, "init_process_group")]
