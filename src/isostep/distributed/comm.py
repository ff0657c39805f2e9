"""Replicas that are processes: `comm.Comm` over a torch process group."""

from __future__ import annotations

import atexit
import os
import re
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before init_process_group: its default arguments keep the world they find
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ..comm import Comm, InOnePiece, Solo
from ..errors import InputError, PeerLostError, of_system
from ..gradients import GradientSums
from ..units import all_equal, marks
from .reduce import GradientReducer

SLICE = timedelta(seconds=1)
REPORT_SECONDS = 3.0
PHASES = ("count", "vote", "evaluate", "fit")


def connect(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> tuple[nn.Module, Comm]:
    """The plain module, and a Comm over its replicas.

    A DistributedDataParallel wrapper is taken off: its averaging and its scaling are not used, its process group is.
    Otherwise the replicas are the ranks of `process_group`, or of the default one if there is any. Parameters and
    buffers of replica 0 go to all others, as DistributedDataParallel does when it is built.
    Raises InputError for a registered communication hook, for what `check_plain` finds, and if replicas hold
    different parameters.
    """
    if isinstance(model, DistributedDataParallel):
        model, process_group = unwrap(model), process_group or model.process_group
    check_plain(model)
    if not dist.is_available() or not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError.of(
                "process group", f"none, in a world of {os.environ['WORLD_SIZE']} processes", "an initialised one",
                "call torch.distributed.init_process_group() first, or every process trains a model of its own",
            )  # fmt: skip
        return model, Solo()
    group = process_group or dist.group.WORLD
    assert group is not None
    if dist.get_rank(group) < 0:
        raise InputError.of("process_group", "a group without this rank", "one with it", "give this rank's group")
    if dist.get_world_size(group) == 1:
        return model, Solo()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    comm = ProcessGroupComm(group, device, sum(1 for _ in model.parameters()))
    comm.equalise(model)
    return model, comm


def check_plain(model: nn.Module) -> None:
    """Raise InputError where parts of a model reduce or shard gradients by themselves, or cannot be reduced."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel) or type(module).__name__ == "FullyShardedDataParallel":
            raise InputError.of(
                f"module {name or 'model'!r}", type(module).__name__, "a plain module inside",
                "it would reduce gradients by itself: leave it out, or wrap nothing but the whole model in "
                "DistributedDataParallel",
            )  # fmt: skip
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise InputError.of(f"module {name!r}", "sparse gradients", "dense ones", "build it with sparse=False")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise InputError.of(f"parameter {name!r}", "a shard", "a whole parameter", "give the model unsharded")
        if parameter.is_complex():
            raise InputError.of(f"parameter {name!r}", parameter.dtype, "real numbers", "hold real and imaginary part")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise InputError.of("model", sorted(devices), "one device", "keep a replica on one device")


def unwrap(model: DistributedDataParallel) -> nn.Module:
    """The module inside a DistributedDataParallel. Raises InputError where a communication hook is registered."""
    hook = model._get_ddp_logging_data().get("comm_hook")
    if hook:
        raise InputError.of(
            "DistributedDataParallel", f"communication hook {hook}", "none",
            "gradients are reduced by isostep, so the hook would not run: leave it out",
        )  # fmt: skip
    model.require_backward_grad_sync = False
    model.reducer._remove_autograd_hooks()  # a forward through the wrapper would arm them for our backward
    return model.module


class ProcessGroupComm(InOnePiece):
    """The replicas are the ranks of one process group.

    Small vectors travel on the CPU where the group has a backend for it, else on the model's device.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_parameters: int) -> None:
        _end_quietly()
        self.replica = self.rank = dist.get_rank(group)
        self.replicas = self.size = dist.get_world_size(group)
        self._group_if_alive = weakref.ref(group)
        backends = dist.get_backend_config(group)
        self._vector_device = torch.device("cpu") if "cpu:" in backends else device
        self._reducer = GradientReducer()
        self._device = device
        self._vector_length = num_parameters + 64
        self._store = dist.distributed_c10d._get_default_store()
        bound_store(self._store)
        self._lost = f"isostep/lost/{group.group_name}"  # until replicas agree on a key of this life
        self._ended = False

    @property
    def _group(self) -> dist.ProcessGroup:
        """The process group, to which no reference is kept: one that outlives `destroy_process_group` is torn down
        with the interpreter, where gloo aborts now and then (seen in torch 2.13).
        """
        group = self._group_if_alive()
        if group is None:
            raise PeerLostError("process group: got a destroyed one, expected a living one; build a new Updater")
        if self._ended:  # gloo would go on, with replicas that may hold different weights
            raise PeerLostError(
                "process group: got one that has ended with an earlier error, expected a living one; "
                "start again from what you saved last"
            )
        return group

    def sum(self, phase: str, host: Sequence[float], device: Tensor | None = None) -> _PendingSum:
        """See `comm.Comm.sum`. All vectors have one length and say their phase, so that replicas that are in
        different calls find out instead of adding up what does not belong together.
        """
        marked = torch.tensor([*marks(PHASES.index(phase)), *host], dtype=torch.float64)
        vector = marked.to(self._vector_device, non_blocking=True)
        if device is not None:
            vector = torch.cat([vector, device.to(self._vector_device)])
        num_values = len(vector)
        vector = functional.pad(vector, (0, -num_values % self._vector_length))
        with self._peers(phase):
            work = dist.all_reduce(vector, group=self._group, async_op=True)
        assert work is not None
        return _PendingSum(vector, len(host), num_values, work, self._wait_for(phase, self._vector_device), self)

    def reduce(self, gradients: GradientSums, backward: Callable[[], None] | None, present: Sequence[bool]) -> None:
        self._reducer.reduce(self._group, gradients, backward, present, self._wait_for("reduce", self._device))

    def gather(self, value: Any) -> list[Any]:
        with self._peers("report"):
            return gathered(value, self._group)

    def end(self, reason: str = "") -> None:
        """Abort the process group, and tell whoever waits for this replica that it will not answer, and why.

        The first reason stands: what follows from it is none.
        """
        with suppress(RuntimeError, PeerLostError):
            group, self._ended = self._group, True
            group.abort()
            self._store.set(f"{self._lost}/{self.rank}", reason)
            self._store.set(self._lost, "")

    def equalise(self, model: nn.Module) -> None:
        """Check that all replicas hold the same kind of model, then copy replica 0's tensors to all.

        Raises InputError on every replica if names, shapes or dtypes differ.
        """
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        described = [(name, tuple(t.shape), t.stride(), str(t.dtype)) for name, t in tensors.items()]
        reports = self.gather((described, uuid4().hex))
        self._lost = f"isostep/lost/{reports[0][1]}"
        for replica, (other, _) in enumerate(reports):
            if other != described:
                odd = next((pair for pair in zip(described, other, strict=False) if pair[0] != pair[1]), None)
                raise InputError.of(
                    f"model of replica {self.replica} against replica {replica}", odd or len(other),
                    "the same tensors on every replica", "build the same model everywhere",
                )  # fmt: skip
        source = dist.get_global_rank(self._group, 0)
        with self._peers("start"), torch.no_grad():
            for tensor in tensors.values():
                if tensor.numel() and 0 not in tensor.stride():  # an expanded tensor is a constant
                    raw = tensor.contiguous().reshape(-1).view(torch.uint8)  # any dtype, any backend
                    dist.broadcast(raw, source, group=self._group)
                    if self.replica:
                        tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))

    def _wait_for(self, phase: str, device: torch.device) -> Callable[[dist.Work], None]:
        def wait(work: dist.Work) -> None:
            with self._peers(phase):
                while device.type == "cpu" and not _finished_in(work, SLICE):
                    if self._store.check([self._lost]):
                        raise RuntimeError("another replica has given up")
                work.wait()

        return wait

    @contextmanager
    def _peers(self, phase: str) -> Iterator[None]:
        """Turn a broken or late collective into a PeerLostError that says who is missing."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            missing, reasons = self._reports()
            lost = list(reasons) or missing
            who = ", ".join(map(self.name, lost)) if lost else "another one"
            reason = next(iter(reasons.values()), _said(error))[:400]
            raise PeerLostError(
                f"{phase}: lost {who}, expected all {self.size} to answer; what was under way was not applied: "
                f"see why it ended, then start again from what you saved last ({reason})"
            ) from error

    def _reports(self) -> tuple[list[int], dict[int, str]]:
        """Replicas that do not report within a few seconds that they, too, lost somebody; and the reasons of those
        that gave up by themselves, by replica. Empty if unknown.

        The report also frees those that wait for this replica: gloo keeps its connections open after an abort.
        """
        self.end()
        others = [rank for rank in range(self.size) if rank != self.rank]
        missing = others
        deadline = time.monotonic() + REPORT_SECONDS
        try:
            while missing and time.monotonic() < deadline:
                missing = [replica for replica in missing if not self._store.check([f"{self._lost}/{replica}"])]
                time.sleep(0.05)
            reported = [replica for replica in others if replica not in missing]
            reasons = {replica: self._store.get(f"{self._lost}/{replica}").decode() for replica in reported}
        except RuntimeError:
            return others if len(others) == 1 else [], {}
        return missing, {replica: reason for replica, reason in reasons.items() if reason}


def bound_store(store: Any) -> None:
    """Let a store that a silent link has cut off fail after its own timeout (Linux).

    torch waits without limit for most of a store's answers, so for as long as the kernel repeats what nobody
    acknowledges: a quarter of an hour.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not hasattr(store, "port") or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    seconds = store.timeout.total_seconds()
    options = {
        socket.TCP_USER_TIMEOUT: int(seconds * 1000),
        socket.TCP_KEEPIDLE: min(60, max(1, int(seconds / 2))),  # for a request that was acknowledged before
        socket.TCP_KEEPINTVL: min(60, max(1, int(seconds / 4))),
    }
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not os.readlink(file).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == store.port:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for option, value in options.items():
                        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _said(error: Exception) -> str:
    """The first sentence of an error of gloo's, without the place in its source."""
    text = re.sub(r"^\[[^\]]*\] *", "", str(error).strip())
    return text.partition("\n")[0].partition(". ")[0][:200] or type(error).__name__


def _finished_in(work: dist.Work, time_limit: timedelta) -> bool:
    """Wait for this long. Raises what the work raises; False if it is still under way."""
    try:
        work.wait(time_limit)
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True


@cache
def _end_quietly() -> None:
    """Wait a moment when the interpreter ends: gloo's threads must let go of the last collective before it is gone.

    A script that ends right after a collective, without destroy_process_group, is aborted otherwise (torch 2.13: 6 of
    10 runs of two processes; none with this).
    """
    atexit.register(_pause)


def _pause() -> None:
    with suppress(KeyboardInterrupt):
        time.sleep(0.05)


class _PendingSum:
    def __init__(
        self,
        vector: Tensor,
        num_host: int,
        num_values: int,
        work: dist.Work,
        wait: Callable[[dist.Work], None],
        comm: ProcessGroupComm,
    ) -> None:
        self._vector, self._num_host, self._num_values = vector, num_host, num_values
        self._work, self._wait, self._comm = work, wait, comm

    def wait(self) -> tuple[list[float], Tensor | None]:
        self._wait(self._work)
        mark, mark_squared, *values = self._vector[: self._num_values].tolist()
        if not all_equal(mark, mark_squared, self._comm.size):
            self._comm.end()
            raise InputError.of(
                "replicas", "different calls", "`update` and `evaluate` on every replica in the same order",
                "let all replicas call them, not only the first",
            )  # fmt: skip
        return values[: self._num_host], torch.tensor(values[self._num_host :], dtype=torch.float64)


def first_ranks(size: int) -> dist.ProcessGroup | None:
    """A process group of the first `size` ranks; None on the other ranks. Every rank of the world calls this."""
    return new_group(range(size))


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A process group with the time limit of the world; None on the other ranks. Every rank of the world calls this."""
    store: Any = dist.distributed_c10d._get_default_store()
    group = dist.new_group(list(ranks), timeout=store.timeout)
    return group if isinstance(group, dist.ProcessGroup) else None


def gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """A picklable value of every rank of a group, in rank order."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def _all_answer() -> Iterator[None]:
    """Turn a broken or late collective over the world into a PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(
            f"workers: lost one, expected all {dist.get_world_size()} to answer; see why it ended ({_said(error)})"
        ) from error


def everyone(value: Any) -> list[Any]:
    """A picklable value of every rank of the world, in rank order."""
    assert dist.group.WORLD is not None
    with _all_answer():
        return gathered(value, dist.group.WORLD)


def to_first_rank(value: Any) -> list[Any]:
    """A picklable value of every rank of the world, in rank order, on rank 0; nothing on the others."""
    values: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    with _all_answer():
        dist.gather_object(value, values or None, 0)
    return values


def on_first_rank(function: Callable[[], Any]) -> Any:
    """What a function returns on rank 0 of the world, on every rank; an error of its input is raised on every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except (InputError, OSError) as error:
            outcome[1] = str(error if isinstance(error, InputError) else of_system(error))
    with _all_answer():
        dist.broadcast_object_list(outcome, 0)
    if outcome[1] is not None:
        raise InputError(outcome[1])
    return outcome[0]


def wrapped(model: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
    """The model as people hand it over who used DistributedDataParallel before."""
    return DistributedDataParallel(model, process_group=group)
