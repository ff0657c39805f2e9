"""Errors that all replicas raise together, because they agreed on what happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from .comm import Comm
from .engine import Attempt, Engine, Work
from .errors import AbandonedError, CoverageError, NonFiniteError, OutOfMemoryError, PeerError
from .ledger import format_hash
from .memory import is_out_of_memory
from .units import Coverage


def raise_shared(comm: Comm, error: Exception | None, phase: str) -> NoReturn:
    """Raise on every replica what failed on one: the error itself there, a PeerError that quotes it elsewhere."""
    reports = comm.gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    rank, report = next((i, report) for i, report in enumerate(reports) if report is not None)
    raise PeerError(f"{comm.name(rank)} failed in the {phase}, of which nothing was applied: {report}")


def abandoned(group: Work) -> AbandonedError:
    """What every replica raises where the grace of a stop request was over before one of them was in the vote."""
    return AbandonedError(
        f"epoch {group.epoch}, group {group.index}: got a stop request whose grace was over before the vote, expected "
        "the update to be done by then; it is abandoned and nothing was applied: resume from what you saved"
    )


def evaluation_abandoned() -> AbandonedError:
    """The same for an evaluation."""
    return AbandonedError(
        "evaluation: got a stop request whose grace was over before its end, expected it to be done by then; it is "
        "abandoned: evaluate again when you resume"
    )


def check_coverage(group: Work, seen: Coverage) -> None:
    """Raise CoverageError unless the examples that went into forward are the group's, each once."""
    if group.coverage is not None and seen != group.coverage:
        raise CoverageError(
            f"coverage of epoch {group.epoch}, group {group.index}: got {seen.count} examples with hash "
            f"{format_hash(seen)} in forward, expected {group.coverage.count} with hash {format_hash(group.coverage)}; "
            "a loader lost, repeated or swapped examples: check what it returns for the ids it is given"
        )


def raise_non_finite(engine: Engine, group: Work, attempt: Attempt, norm: float) -> NoReturn:
    """Raise NonFiniteError on every replica, naming the microbatches whose loss was not finite."""
    finite = [all(s is None or bool(s.isfinite()) for s in sums) for sums in attempt.sums]
    own = list(zip(attempt.ids, finite, strict=True)) if engine.comm.scores else []
    reports = [pair for pairs in engine.comm.gather(own) for pair in pairs]
    if all(ok for _, ok in reports):
        ids = sorted(i for ids, _ in reports for i in ids or ())
        where = f"every loss was finite; example ids of the group: {ids or 'unknown'}"
    else:
        suspects = ["ids unknown" if ids is None else list(ids) for ids, ok in reports if not ok]
        where = f"microbatches with such a loss, by example ids: {suspects}"
    raise NonFiniteError(
        f"gradient norm of epoch {group.epoch}, group {group.index}: got {norm}, expected finite gradients; "
        f"{where}; nothing was applied: mend or leave out the data, or lower the learning rate"
    )


@contextmanager
def final(engine: Engine, where: str = "after the vote") -> Iterator[None]:
    """A failure that the others cannot take back, after the vote or between stages: it ends the run for all."""
    try:
        yield
    except BaseException as error:
        if is_out_of_memory(error):
            ending = OutOfMemoryError(
                f"memory: got out of memory {where} ({error}), expected room for gradients and optimizer "
                "state; resume from the last checkpoint with fewer examples per microbatch"
            )
            engine.comm.end(str(ending))
            raise ending from error
        engine.comm.end(f"{type(error).__name__}: {error}")
        raise
