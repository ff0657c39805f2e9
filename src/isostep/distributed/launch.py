"""Local workers through torchrun's elastic agent, or joining the workers that a launcher has started."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..errors import InputError, IsostepError, PeerError, PeerLostError, of_system
from .comm import bound_store

Worker = Callable[..., Any]
INTERRUPTED = 130
PR_SET_PDEATHSIG = 1


def launched_rank() -> int | None:
    """This process's rank where a launcher (torchrun, a scheduler) has started it as one of several; else None.

    Raises InputError for a RANK or WORLD_SIZE that is none.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, world = _whole("RANK"), _whole("WORLD_SIZE")
    if rank >= world:
        raise InputError.of("RANK", rank, f"below WORLD_SIZE {world}", "let the launcher set both, or unset them")
    return rank


def _whole(name: str) -> int:
    """A variable of the environment that a launcher sets."""
    text = os.environ[name]
    if not (text.isdecimal() and len(text) < 10):
        raise InputError.of(name, text[:60], "a whole number", "let the launcher set it, or unset it")
    return int(text)


def check_world(replicas: int | None, stages: int = 1) -> None:
    """Raise InputError where a launcher has started another number of workers than `replicas` x `stages`."""
    if launched_rank() is None:
        return
    world = int(os.environ["WORLD_SIZE"])
    if world % stages:
        raise InputError.of(
            "layout.stages", stages, f"a divisor of {world}, the workers that the launcher has started",
            "start replicas x stages workers",
        )  # fmt: skip
    if replicas is not None and replicas * stages != world:
        started = f"{world}, the workers that the launcher has started"
        expected = started if stages == 1 else f"{world // stages}, for {started}, are of {stages} stages each"
        raise InputError.of("layout.replicas", replicas, expected, "leave it out, or start that many")


def run_workers(procs: int, worker: Worker, *args: Any, timeout: float, patience: float = 30) -> Any:
    """Run `worker(*args)` in `procs` local processes that share a process group; returns rank 0's result.

    Under a launcher this process joins that launcher's world instead and returns its own worker's result. `timeout`,
    in seconds, bounds every collective; `patience`, in seconds, the time that workers have to end after a signal.
    worker and args must be picklable, and so must the result. Each worker has OMP_NUM_THREADS threads, or, where that
    is not set, its share of the processors.
    An error of a worker is raised here, in one line, after all workers have ended.
    """
    if launched_rank() is not None:
        return _in_process_group(worker, args, timeout, threads=None)
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(wanted) if wanted.isdecimal() and int(wanted) else max(1, (os.cpu_count() or 1) // procs)
    with tempfile.TemporaryDirectory(prefix="isostep-") as folder:
        return _launch(procs, _guarded, (worker, args, timeout, threads, folder), Path(folder), patience)[0]


def run_processes(procs: int, arguments: Sequence[str], folder: Path) -> None:
    """Run this Python with `arguments` in `procs` local processes, with the environment that torchrun gives.

    Each calls `say_started(folder)` first. Raises PeerLostError where one ends with another exit code than 0.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // procs)))
    _launch(procs, sys.executable, tuple(arguments), folder, patience=10)


def _launch(procs: int, entrypoint: Any, args: tuple[Any, ...], folder: Path, patience: float) -> Any:
    """Have torchrun's agent run `entrypoint` in local processes. SIGINT and SIGTERM end all of them.

    The error of a worker is raised as one of ours, KeyboardInterrupt where it was interrupted.
    """
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(int(patience)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=procs,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.05,
        signals_to_handle="SIGHUP,SIGQUIT",  # SIGINT and SIGTERM are ours: they wait until the workers have started
    )
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # the agent logs several lines where one error says it all
    try:
        with _interrupts_held_for_workers(), _stops_held_until(lambda: len(list(folder.glob("*.started"))) == procs):
            return elastic_launch(config, entrypoint)(*args)
    except ChildFailedError as failure:
        if failure.get_first_failure()[1].exitcode == INTERRUPTED:
            raise KeyboardInterrupt from None
        raise _first_error(folder, failure) from None
    except SignalException as stop:
        raise KeyboardInterrupt from stop
    finally:
        logging.disable(disabled)


@contextmanager
def _interrupts_held_for_workers() -> Iterator[None]:
    """Let workers start with SIGINT blocked, so that one that is still importing does not end in a traceback.

    They inherit the mask of this thread, and `_guarded` opens it. This process is interrupted as ever: the kernel gives
    the signal to another thread, and Python runs its handler in this one.
    """
    resource_tracker.ensure_running()  # which unblocks SIGINT when it starts
    done = threading.Event()
    receiver = threading.Thread(target=done.wait, daemon=True)
    receiver.start()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        done.set()
        receiver.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextmanager
def _stops_held_until(started: Callable[[], bool]) -> Iterator[None]:
    """Raise SignalException for the first SIGINT or SIGTERM once `started()`, or for a second one at once.

    A launcher that is stopped while it starts its workers leaves some without the rest of what they read from it:
    they would end in tracebacks, or not at all, since torch forgets workers whose start it did not see the end of.
    """
    held: list[int] = []

    def hear(number: int, _frame: object) -> None:
        if held or started():
            raise SignalException(f"signal {number}", sigval=signal.Signals(number))
        held.append(number)

    def repeat() -> None:
        while not done.wait(0.05):
            if held and started():
                os.kill(os.getpid(), held[0])
                return

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    done = threading.Event()
    previous = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    repeater = threading.Thread(target=repeat, daemon=True)
    repeater.start()
    try:
        yield
    except ChildFailedError:
        if held:
            raise KeyboardInterrupt from None
        raise
    finally:
        done.set()
        repeater.join()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _guarded(worker: Worker, args: tuple[Any, ...], timeout: float, threads: int, folder: str) -> Any:
    """In a worker: an error becomes a file and an exit code, so that the launcher can show one line."""
    try:
        say_started(Path(folder))
        return _in_process_group(worker, args, timeout, threads)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        error = of_system(error) if isinstance(error, OSError) else error
        kind = "input" if isinstance(error, InputError) else "peer" if isinstance(error, PeerError) else "error"
        name = "" if isinstance(error, IsostepError) else f"{type(error).__name__}: "
        Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps([kind, f"{name}{error}"]))
        sys.exit(getattr(error, "exit_code", 1))
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher passes one on that this worker may have acted upon


def say_started(folder: Path) -> None:
    """In a worker, first: it can be interrupted from now on, and ends with its launcher."""
    _end_with_parent()
    (folder / f"{os.environ['RANK']}.started").touch()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM to this worker when the process that started it dies, however it dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() == 1:  # it died before
            sys.exit(1)


def _in_process_group(worker: Worker, args: tuple[Any, ...], timeout: float, threads: int | None) -> Any:
    if threads is not None:
        torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        with _answer_within(2 * timeout + 5, timeout):
            dist.init_process_group(backends, timeout=timedelta(seconds=timeout))
    except (ValueError, RuntimeError) as error:
        raise _nobody_met(str(error).strip().partition("\n")[0][:160], timeout) from error
    bound_store(dist.distributed_c10d._get_default_store())
    try:
        return worker(*args)
    finally:
        dist.destroy_process_group()


def _nobody_met(reason: str, timeout: float) -> InputError:
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return InputError.of(
        "process group", f"{reason} (rank {os.environ.get('RANK')} at {where})",
        f"all {os.environ.get('WORLD_SIZE')} workers to meet there in {timeout:g} s",
        "check that the others started, that the address can be reached and that its port is free; between hosts "
        "give each GLOO_SOCKET_IFNAME, the interface that the others reach it at",
    )  # fmt: skip


@contextmanager
def _answer_within(seconds: float, timeout: float) -> Iterator[None]:
    """End this process where torch waits for ever: for a program at the port that takes connections and is silent."""

    def give_up() -> None:
        error = _nobody_met("a connection and no answer", timeout)
        print(f"isostep: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _first_error(folder: Path, failure: ChildFailedError) -> IsostepError:
    """The error to show: one that is not merely the loss of a peer, if there is any."""
    errors = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    for kind, message in sorted(errors, key=lambda error: error[0] == "peer"):
        return {"input": InputError, "peer": PeerError}.get(kind, IsostepError)(message)
    rank, process = failure.get_first_failure()
    reason = f"signal {-process.exitcode}" if process.exitcode < 0 else f"exit code {process.exitcode}"
    return PeerLostError(f"worker {rank} ended with {reason}, expected it to finish; see what killed it (memory?)")
