"""Runs scripts under an audit in worker processes that import torch once: two that can meet, one of them also alone."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

KEPT: list[Any] = []
SCRIPTS = Path(__file__).parent / "audit_scripts"


class Auditors:
    """Two workers. `audited` runs a script in one or both and returns the report's document."""

    def __init__(self) -> None:
        self._workers: list[Any] = []
        self._pipes: list[Any] = []

    def audited(
        self, script: str | Path, args: Sequence[str] = (), ranks: int = 1, updates: str = "4",
        weighting: str | None = None, timeout: float = 60,
    ) -> dict[str, Any]:  # fmt: skip
        """The document of the report on `script`, a file of audit_scripts or a path."""
        if not self._workers:
            self._start()
        path = SCRIPTS / script
        port = _free_port()
        for rank, pipe in enumerate(self._pipes[:ranks]):
            pipe.send((str(path), list(args), rank, ranks, port, updates, weighting or "declared"))
        answers = []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            if not pipe.poll(timeout):
                self.close()
                raise AssertionError(f"{script}: rank {rank} gave no answer in {timeout} s")
            fine, value = pipe.recv()
            if not fine:
                self.close()
                raise AssertionError(f"{script}: rank {rank}: {value}")
            answers.append(value)
        assert all(answer == answers[0] for answer in answers), "ranks report differently"
        return answers[0]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in range(2):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs,), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                document = _audit(*request)
            pipe.send((True, document))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _audit(
    path: str, args: list[str], rank: int, ranks: int, port: int, updates: str, weighting: str
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from isostep.audit.run import Options, Run

    names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    if ranks > 1:
        os.environ.update(names)
    try:
        options = Options(None if updates == "all" else int(updates), weighting, timeout=50)
        run = Run(options, lambda _: None)
        KEPT.append(run)  # and with it the process group, whose end can hang the next script
        return run.run(Path(path), args).document()
    finally:
        for name in names:
            os.environ.pop(name, None)
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def auditors() -> Iterator[Auditors]:
    workers = Auditors()
    yield workers
    workers.close()
