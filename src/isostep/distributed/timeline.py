"""What each rank of a pipeline does when: its records, one clock for all ranks, and how long a transfer takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..schedule.measured import Received, Sent
from ..schedule.simulate import Span
from .comm import gathered

Clock: TypeAlias = Callable[[], float]
"""Seconds from any origin, as `time.perf_counter`."""
Reading: TypeAlias = tuple[float, float]
"""What a clock showed, and how far it was ahead of rank 0's then; seconds."""
What: TypeAlias = tuple[int, int, str]
"""Stage index, microbatch index, op."""


@dataclass(frozen=True)
class Recording:
    """One rank's part of an update, in seconds of its own clock, or of rank 0's once `on_first_clock`."""

    sizes: tuple[int, ...]
    """Elements that enter the first chunk with each microbatch: tokens, where they are token ids. Filler included."""
    spans: tuple[Span, ...]
    sent: tuple[Sent, ...]
    received: tuple[Received, ...]

    def on_first_clock(self, before: Reading, after: Reading) -> Recording:
        """The same in rank 0's time. before, after: readings around the update; between them a clock drifts evenly."""
        (begun, ahead), (ended, ahead_then) = before, after
        drift = (ahead_then - ahead) / (ended - begun) if ended > begun else 0.0

        def at(moment: float) -> float:
            return moment - ahead - drift * (moment - begun)

        return replace(
            self,
            spans=tuple(s._replace(start=at(s.start), end=at(s.end)) for s in self.spans),
            sent=tuple(s._replace(time=at(s.time)) for s in self.sent),
            received=tuple(r._replace(waited=at(r.waited), time=at(r.time)) for r in self.received),
        )


class Recorder:
    """Takes down when each action of this rank begins and ends, each send is posted and each receive waited for.

    A forward ends behind the loss, where there is one. On a CPU a mark is a look at the clock; on a CUDA device it is
    an event on the current stream, which nothing waits for until `take` turns all of them into times of the clock.
    """

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self._device = device
        self.start([])

    def start(self, sizes: Sequence[int]) -> None:
        """Forget everything; an update with microbatches of these sizes begins."""
        self._sizes = tuple(sizes)
        self._actions: list[tuple[What, Any, Any]] = []
        self._sent: list[tuple[What, Any]] = []
        self._received: list[tuple[What, Any, Any]] = []
        self._waited: tuple[Any, Any] | None = None
        self._open: tuple[What, Any] | None = None

    def begin(self, stage: int, microbatch_index: int, op: str) -> None:
        """An action begins; the wait before it, if there was one, was for what it needs."""
        if self._waited is not None:
            source, kind = (stage - 1, "F") if op == "F" else (stage + 1, "B")
            self._received.append(((source, microbatch_index, kind), *self._waited))
            self._waited = None
        self._open = (stage, microbatch_index, op), self._mark()

    def end(self) -> None:
        """The action that began last ends."""
        if self._open is not None:
            self._actions.append((*self._open, self._mark()))
            self._open = None

    def sent(self, stage: int, microbatch_index: int, op: str) -> None:
        """A chunk posts what it sends: activations (op F) or their gradients (op B)."""
        self._sent.append(((stage, microbatch_index, op), self._mark()))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait."""
        begun = self._mark()
        yield
        self._waited = begun, self._mark()

    def take(self, rank: int) -> Recording:
        """What was recorded since `start`, by this rank of the world; forgotten here. Waits for a CUDA device."""
        at = self._times()
        recording = Recording(
            sizes=self._sizes,
            spans=tuple(Span(rank, *what, at(begun), at(ended)) for what, begun, ended in self._actions),
            sent=tuple(Sent(*what, at(moment)) for what, moment in self._sent),
            received=tuple(Received(*what, at(begun), at(ended)) for what, begun, ended in self._received),
        )
        self.start([])
        return recording

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return self.clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _times(self) -> Callable[[Any], float]:
        """What turns a mark into seconds of the clock."""
        if self._device.type != "cuda":
            return lambda mark: mark
        torch.cuda.synchronize(self._device)
        last = self._mark()
        last.synchronize()
        now = self.clock()
        return lambda mark: now - mark.elapsed_time(last) / 1000


def clock_offsets(
    group: dist.ProcessGroup, device: torch.device, clock: Clock = time.perf_counter, rounds: int = 16
) -> list[float]:
    """By how many seconds the clock of each rank is ahead of rank 0's; the same list on every rank of the group.

    Rank 0 asks each of the others `rounds` times for its time. Of the answer that came back soonest it takes the
    middle between asking and hearing for the moment at which the other looked, which is off by at most half of that
    round trip (Cristian 1989).
    """
    offsets = torch.zeros(dist.get_world_size(group), dtype=torch.float64, device=device)
    answer = offsets[:1].clone()
    rank = dist.get_rank(group)
    for other in range(1, len(offsets)):
        soonest = float("inf")
        for _ in range(rounds if rank in (0, other) else 0):
            if rank == 0:
                asked = clock()
                dist.send(answer, group=group, group_dst=other)
                dist.recv(answer, group=group, group_src=other)
                shown, heard = answer.item(), clock()
                if heard - asked < soonest:
                    soonest = heard - asked
                    offsets[other] = shown - (asked + heard) / 2
            else:
                dist.recv(answer, group=group, group_src=0)
                answer.item()  # a CUDA device has received it only now
                answer.fill_(clock())
                dist.send(answer, group=group, group_dst=0)
    dist.broadcast(offsets, group=group, group_src=0)
    return offsets.tolist()


def link_seconds(group: dist.ProcessGroup, nbytes: int, device: torch.device, rounds: int = 16) -> float:
    """Median seconds of handing a tensor of `nbytes` from one rank to the next; the same on every rank of the group.

    Half of the time there and back, over all pairs of neighbours in turn. 0 for a single rank.
    """
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    rank, times = dist.get_rank(group), []
    for left in range(dist.get_world_size(group) - 1):
        if rank not in (left, left + 1):
            continue
        for index in range(rounds + 1):
            begun = time.perf_counter()
            _hand_over(tensor, group, left, left + 1)
            _hand_over(tensor, group, left + 1, left)
            if rank == left and index:  # the first one opens the connection
                times.append((time.perf_counter() - begun) / 2)
    everything = [seconds for each in gathered(times, group) for seconds in each]
    return statistics.median(everything) if everything else 0.0


def _hand_over(tensor: Tensor, group: dist.ProcessGroup, source: int, target: int) -> None:
    """One transfer, over when the receiver has it."""
    if dist.get_rank(group) == source:
        dist.send(tensor, group=group, group_dst=target)
    else:
        dist.recv(tensor, group=group, group_src=source)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
