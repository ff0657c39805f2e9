"""What an update needs from the other replicas, as a protocol; and the answer of a replica that is alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from .gradients import GradientSums


class Pending(Protocol):
    """A sum over replicas that is under way."""

    def wait(self) -> tuple[list[float], Tensor | None]:
        """The summed host values and device values. Raises PeerLostError if a replica is lost or late."""
        ...


class Comm(Protocol):
    """The replicas of one update. Every rank makes the same calls in the same order.

    rank, size: of this process among all that take part; a replica that is cut into stages has several.
    counts, scores: whether this rank speaks for its replica's counts and examples, and for its loss sums; one rank of
        each replica does.
    """

    replica: int
    replicas: int
    rank: int
    size: int
    counts: bool
    scores: bool

    def name(self, rank: int) -> str:
        """What an error calls a rank."""
        ...

    def sum(self, phase: str, host: Sequence[float], device: Tensor | None = None) -> Pending:
        """Start one small all-reduce of host numbers and of a float64 device vector, added up in float64.

        `phase` names what a late replica was waited for in.
        """
        ...

    def reduce(self, gradients: GradientSums, backward: Callable[[], None] | None, present: Sequence[bool]) -> None:
        """Replace each gradient by its SUM over replicas, in static bucket order.

        backward: runs the replica's last backward, during which buckets whose gradients are final are sent; given by
            every replica or by none.
        present: per parameter, whether any replica is known to hold a gradient for it before that backward.
        """
        ...

    def reduce_early(self, gradients: GradientSums) -> None:
        """Where a replica is cut into stages: sum over replicas before the vote, while other stages are at work.

        `reduce` does what is left.
        """
        ...

    def everywhere(self, squares: Sequence[float | None]) -> list[float]:
        """Per parameter its squared norm, wherever in the replica the parameter is; 0 where it has no gradient."""
        ...

    def agreed(self, fine: bool) -> bool:
        """Whether all ranks of this replica say so."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """A picklable value of every rank, in order of ranks. For error reports, not for the fast path."""
        ...

    def end(self, reason: str = "") -> None:
        """Give up: make the other replicas fail instead of wait, and tell them the reason."""
        ...


@contextmanager
def leaving(comm: Comm) -> Iterator[None]:
    """A replica that is interrupted makes the others fail instead of wait."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        comm.end(type(error).__name__)
        raise


class _Known:
    def __init__(self, host: Sequence[float], device: Tensor | None) -> None:
        self._values = list(host), device

    def wait(self) -> tuple[list[float], Tensor | None]:
        return self._values


class InOnePiece:
    """What `Comm` asks of a rank that is a whole replica."""

    counts = scores = True

    def name(self, rank: int) -> str:
        return f"replica {rank}"

    def reduce_early(self, gradients: GradientSums) -> None:
        pass

    def everywhere(self, squares: Sequence[float | None]) -> list[float]:
        return [square or 0.0 for square in squares]

    def agreed(self, fine: bool) -> bool:
        return fine


class Solo(InOnePiece):
    """One replica: its own sums are the group's."""

    replica = rank = 0
    replicas = size = 1

    def sum(self, phase: str, host: Sequence[float], device: Tensor | None = None) -> Pending:
        return _Known(host, device)

    def reduce(self, gradients: GradientSums, backward: Callable[[], None] | None, present: Sequence[bool]) -> None:
        if backward is not None:
            backward()

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def end(self, reason: str = "") -> None:
        pass
