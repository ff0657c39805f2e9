"""A persistent pool of worker processes on gloo: torch is imported once per worker, not once per test."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

COLLECTIVE_SECONDS = 30


class WorkerError(AssertionError):
    """What failed in a worker, with its traceback."""


class Pool:
    """`size` workers in one world. `run` calls a function in the first `replicas` of them, with their own process
    group as its first argument, and returns their results by rank. A worker that dies or is late ends the pool;
    the next `run` starts a new one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[Any] = []
        self._pipes: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, replicas: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """function(process_group, *args) on `replicas` workers. Raises WorkerError if it fails or is late on any."""
        if not self._workers:
            self._start()
        for pipe in self._pipes[:replicas]:
            pipe.send((replicas, function, args))
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes[:replicas]):
            try:
                fine, value = pipe.recv() if pipe.poll(timeout) else (False, f"no answer in {timeout} s")
            except EOFError:
                fine, value = False, "worker died"
            (results if fine else errors).append(value if fine else f"rank {rank}: {value}")
        if errors:
            self.close()
            raise WorkerError("\n".join(errors))
        return results

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._workers, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="isostep-test-")
        store = f"{self._folder.name}/store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(rank, self.size, store, theirs), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    seconds = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=seconds)
    groups = {n: dist.new_group(list(range(n)), timeout=seconds) for n in range(1, size + 1)}
    while True:
        try:
            replicas, function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(groups[replicas], *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
