"""What the phases of an update hand to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from .comm import Comm
from .gradients import GradientSums
from .ledger import Counts
from .loss_scale import LossScale
from .memory import is_out_of_memory
from .objective import Batch, Forward, Objective, Outputs
from .stopping import StopRequest
from .units import Coverage

BeforeFetch: TypeAlias = Callable[[int, tuple[int, ...]], None]


@dataclass(frozen=True)
class Microbatch:
    """The examples of one forward and backward on one replica. `ids` is None where the batch carries none."""

    batch: Batch
    examples: int
    ids: tuple[int, ...] | None = None

    @cached_property
    def coverage(self) -> Coverage:
        return Coverage.of(self.ids or ())


class Work(Protocol):
    """A group as the update sees it. Positions are -1 and `coverage` None where the order is not isostep's."""

    @property
    def epoch(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def positions(self) -> tuple[int, int]: ...
    @property
    def coverage(self) -> Coverage | None: ...
    @property
    def largest_microbatch(self) -> int: ...
    @property
    def divisible(self) -> bool:
        """Whether `limited` can cut the microbatches; the same on every replica."""
        ...

    @property
    def more(self) -> bool:
        """Whether this replica has data for another group."""
        ...

    def load(self, replica: int, replicas: int, before_fetch: BeforeFetch) -> list[Microbatch]:
        """This replica's microbatches, in order. Calls before_fetch(index, ids) before each that it loads."""
        ...

    def limited(self, examples_per_microbatch: int) -> Work:
        """The same examples in smaller microbatches."""
        ...

    def settle(self, *, more: bool) -> None:
        """Learn whether any replica has data for another group."""
        ...


class Stages(Protocol):
    """A model that is cut into stages on several ranks, of which this process is one."""

    def run(
        self,
        batches: Sequence[Batch],
        before_layer: Callable[[int, int], None],
        precision: Callable[[], AbstractContextManager[Any]],
        loss: Callable[[Outputs, Batch], Tensor],
        after_backward: Callable[[], None],
    ) -> None:
        """Forward and backward of this replica's microbatches, in the order of the schedule.

        Each is called where it is needed: before_layer(index, layer) before the forward of a layer, counted over the
        whole model; forwards are inside precision();
        loss(outputs, batch) behind the last chunk's forward, in microbatch order, after_backward() after a backward.
        """
        ...

    def alone(
        self,
        batches: Sequence[Batch],
        precision: Callable[[], AbstractContextManager[Any]],
        loss: Callable[[Outputs, Batch], Tensor],
        after_backward: Callable[[], None],
    ) -> None:
        """Take the memory that `run` takes on this rank, without the other ranks.

        What they would hand over is zeros, so that nobody waits for a rank whose memory runs out.
        """
        ...

    def evaluated(
        self, batches: Sequence[Batch], precision: Callable[[], AbstractContextManager[Any]]
    ) -> list[Outputs]:
        """Forwards alone: what the last chunk gives for each batch, on the rank that has it; else None for each."""
        ...


@dataclass
class Engine:
    """Everything that an update works on. One per model; every replica holds the same values.

    intact: whether parameters and optimizers are as an update left them, and no optimizer failed half-way.
    """

    model: nn.Module
    gradients: GradientSums
    objective: Objective
    forward: Forward
    comm: Comm
    device: torch.device
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[Any] = ()
    loss_scale: LossScale | None = None
    clip_norm: float | None = None
    autocast: torch.dtype | None = None
    overlap: bool = False
    seed: int = 0
    examples_that_fit: int | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    intact: bool = True
    stages: Stages | None = None

    def precision(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)


@dataclass(frozen=True)
class Counted:
    """Phase 1's outcome, of the whole group. `factors[t]` is c_t / N_t, or None where N_t is 0."""

    denominators: dict[str, float]
    factors: tuple[float | None, ...]
    counts: Counts
    loss_scale: float | None

    @property
    def empty(self) -> bool:
        return all(factor is None for factor in self.factors)


@dataclass
class Attempt:
    """Phase 2's outcome, of this replica.

    sums: per microbatch S_t of every term, or None for a term that is empty in the whole group.
    last_loss: waits for its backward where reduction overlaps that.
    abandoned: the grace of a stop request was over before all microbatches had run.
    """

    coverage: Coverage = field(default_factory=Coverage)
    ids: list[tuple[int, ...] | None] = field(default_factory=list)
    sums: list[list[Tensor | None]] = field(default_factory=list)
    last_loss: Tensor | None = None
    error: Exception | None = None
    abandoned: bool = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep an error for the vote instead of raising it, so that no replica waits for one that failed."""
        try:
            yield
        except Exception as error:
            self.error = error
            if is_out_of_memory(error):
                forget_frames(error)


def forget_frames(error: BaseException | None) -> None:
    """Drop the frames of an error and of those behind it: they hold activations that must go before a smaller try."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@dataclass(frozen=True)
class Verdict:
    """Phase 3's outcome, of all replicas. `sums` is S_t of the group, float64 [terms]."""

    out_of_memory: bool
    stop_requested: bool
    coverage: Coverage
    present: Sequence[bool]
    sums: Tensor
