"""What a ledger adds up to, and the proof that each example was used exactly once per epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from ..units import Coverage
from .events import (
    Counts,
    Dropped,
    Evaluated,
    Event,
    OutOfMemory,
    Resumed,
    RunStarted,
    UpdateDone,
    format_hash,
)

IdsOf = Callable[[int, int, int], Sequence[int]]
"""(epoch, start, stop) -> example ids at positions [start, stop) in the order of the epoch."""


def standing_events(events: Iterable[Event]) -> list[Event]:
    """The events that no later resume supersedes, in order.

    `Resumed(from_update=n)` supersedes the updates after attempt n, and the drops and evaluations that follow
    those. A drop or an evaluation right after attempt n stands, until the resumed run repeats it. Everything
    else (out of memory, checkpoints, ends of the run) did happen and stands.
    """
    standing: list[Event] = []
    for event in events:
        if isinstance(event, Resumed):
            _supersede(standing, event.from_update)
        elif isinstance(event, Dropped | Evaluated):
            _remove_repeated(standing, event)
        standing.append(event)
    return standing


def _supersede(standing: list[Event], from_update: int) -> None:
    later = (i for i, e in enumerate(standing) if isinstance(e, UpdateDone) and e.attempted > from_update)
    first = next(later, len(standing))
    standing[first:] = [e for e in standing[first:] if not isinstance(e, UpdateDone | Dropped | Evaluated)]


def _remove_repeated(standing: list[Event], event: Dropped | Evaluated) -> None:
    """Remove what `event` repeats: the same drop or evaluation, since the last update but before a resume."""
    resumed = False
    for i in range(len(standing) - 1, -1, -1):
        earlier = standing[i]
        if isinstance(earlier, UpdateDone):
            return
        resumed = resumed or isinstance(earlier, Resumed)
        if resumed and _repeats(event, earlier):
            del standing[i]
            return


def _repeats(event: Dropped | Evaluated, earlier: Event) -> bool:
    if isinstance(event, Dropped):
        return isinstance(earlier, Dropped) and earlier.epoch == event.epoch
    return isinstance(earlier, Evaluated) and earlier.after_applied == event.after_applied


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What the standing events of a ledger add up to.

    attempted = applied + skipped + empty, in updates. `counters` are summed over the attempted updates,
    `applied_counters` over the applied ones. `out_of_memory` counts events, superseded attempts included.
    `last_loss` is the loss of the last applied update; None before the first.
    """

    attempted: int
    applied: int
    skipped: int
    empty: int
    counters: Counts
    applied_counters: Counts
    dropped_examples: int
    out_of_memory: int
    last_loss: float | None
    evaluations: tuple[Evaluated, ...]


def fold(events: Iterable[Event]) -> Totals:
    """Add up the events of a ledger, without those that a later resume supersedes."""
    standing = standing_events(events)
    updates = [e for e in standing if isinstance(e, UpdateDone)]
    applied = [u for u in updates if u.status == "applied"]
    statuses = Counter(u.status for u in updates)
    return Totals(
        attempted=len(updates),
        applied=statuses["applied"],
        skipped=statuses["skipped"],
        empty=statuses["empty"],
        counters=sum((u.counters for u in updates), Counts()),
        applied_counters=sum((u.counters for u in applied), Counts()),
        dropped_examples=sum(len(e.ids) for e in standing if isinstance(e, Dropped)),
        out_of_memory=sum(isinstance(e, OutOfMemory) for e in standing),
        last_loss=applied[-1].loss if applied else None,
        evaluations=tuple(e for e in standing if isinstance(e, Evaluated)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochProof:
    """How the examples of one epoch were used, in examples. `num_examples` is the size of the data set."""

    epoch: int
    num_examples: int
    applied: int
    skipped: int
    empty: int
    dropped: int
    faults: tuple[str, ...]

    @property
    def covered(self) -> int:
        """Examples that the epoch has used or dropped so far."""
        return self.applied + self.skipped + self.empty + self.dropped

    def text(self) -> str:
        """One line: the numbers, and whether they are proved."""
        verdict = "each exactly once" if self.covered == self.num_examples else "each at most once so far"
        if self.faults:
            verdict = f"NOT proved, {len(self.faults)} fault(s)"
        return (
            f"epoch {self.epoch}: {self.covered} of {self.num_examples} examples, {verdict}: "
            f"{self.applied} applied, {self.skipped} skipped, {self.empty} empty, {self.dropped} dropped"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageProof:
    """Outcome of `prove_coverage`: `faults` says where, what was got and what was expected, one line each."""

    epochs: tuple[EpochProof, ...]
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the use of every example is proved."""
        return not self.faults

    def text(self) -> str:
        """One line per epoch, then one per fault."""
        return "\n".join([*(epoch.text() for epoch in self.epochs), *self.faults])


def prove_coverage(events: Iterable[Event], ids_of: IdsOf) -> CoverageProof:
    """Prove from a ledger and the order alone that every example was used exactly once in every epoch.

    Of the standing events: the positions of updates and drops of an epoch follow each other from 0, without
    gap or overlap, to the end of the data set (the last epoch may still be in progress); every range has the
    count and the hash of the ids that `ids_of` gives for it; and the ids of a complete epoch are 0 to
    num_examples - 1, once each. An update of unknown coverage is a fault: nothing can be proved about it.
    Holds the ids of one group at a time. Raises what `ids_of` raises.
    """
    standing = standing_events(events)
    started = next((e for e in standing if isinstance(e, RunStarted)), None)
    if started is None:
        return CoverageProof(epochs=(), faults=("ledger: got no run_started, expected it first",))
    faults: list[str] = []
    checks: list[_EpochCheck] = []
    ranges = (e for e in standing if isinstance(e, UpdateDone | Dropped))
    for epoch, part in groupby(ranges, key=lambda event: event.epoch):
        expected = checks[-1].epoch + 1 if checks else 0
        if epoch != expected:
            faults.append(f"ledger: got epoch {epoch}, expected epoch {expected} next")
        checks.append(_EpochCheck(epoch, started.num_examples, ids_of))
        for event in part:
            checks[-1].add(event)
    epochs = tuple(check.finish(in_progress=check is checks[-1]) for check in checks)
    return CoverageProof(epochs=epochs, faults=(*faults, *(f for epoch in epochs for f in epoch.faults)))


class _EpochCheck:
    """Follows the ranges of one epoch in the order of the ledger."""

    def __init__(self, epoch: int, num_examples: int, ids_of: IdsOf) -> None:
        self.epoch = epoch
        self._num_examples = num_examples
        self._ids_of = ids_of
        self._position = 0
        self._examples: Counter[str] = Counter()
        self._total = Coverage()
        self._unknown = 0
        self._faults: list[str] = []

    def add(self, event: UpdateDone | Dropped) -> None:
        """Check the range of one update or drop, and count its examples."""
        start, stop = event.start, event.stop
        if isinstance(event, UpdateDone) and (event.coverage == "unknown" or start < 0):
            self._unknown += 1
        elif not 0 <= start < stop <= self._num_examples:
            self._fault(event, f"got this range, expected one within [0, {self._num_examples})")
        else:
            self._check_place(event)
            self._check_ids(event)
            self._examples[_status(event)] += stop - start

    def finish(self, *, in_progress: bool) -> EpochProof:
        """The proof of this epoch. `in_progress`: more updates of it may follow."""
        if self._unknown:
            times = f"{self._unknown} updates of unknown coverage"
            self._faults.append(f"epoch {self.epoch}: got {times}, expected none")
        elif self._position == self._num_examples:
            self._check_total()
        elif not in_progress:
            self._missing(self._num_examples)
        return EpochProof(
            epoch=self.epoch,
            num_examples=self._num_examples,
            applied=self._examples["applied"],
            skipped=self._examples["skipped"],
            empty=self._examples["empty"],
            dropped=self._examples["dropped"],
            faults=tuple(self._faults),
        )

    def _check_place(self, event: UpdateDone | Dropped) -> None:
        """The range begins where the one before it ended."""
        if event.start > self._position and not self._unknown:
            self._missing(event.start)
        elif event.start < self._position:
            self._fault(event, f"got this start, expected {self._position}: used twice or out of order")
        self._position = max(self._position, event.stop)

    def _check_ids(self, event: UpdateDone | Dropped) -> None:
        """The recorded count and hash are those of the ids at these positions."""
        expected = Coverage.of(self._ids_of(self.epoch, event.start, event.stop))
        self._total += expected
        length = event.stop - event.start
        if expected.count != length:
            self._fault(event, f"got {expected.count} ids from the order, expected {length}")
        if isinstance(event, UpdateDone) and event.num_examples != length:
            self._fault(event, f"got {event.num_examples} examples, expected {length}")
        if event.ids_hash != format_hash(expected):
            self._fault(event, f"got ids_hash {event.ids_hash}, expected {format_hash(expected)}")
        if isinstance(event, Dropped) and (got := Coverage.of(event.ids)) != expected:
            self._fault(event, f"got dropped ids {got}, expected {expected} (hash/count)")

    def _check_total(self) -> None:
        """Ranges that are right one by one hold each id of the data set once, all together."""
        expected = _coverage_of_all(self._num_examples)
        if not self._faults and self._total != expected:
            ids = f"{expected} of ids 0 to {self._num_examples - 1}, each once (hash/count)"
            self._faults.append(f"epoch {self.epoch}, all positions: got {self._total}, expected {ids}")

    def _missing(self, stop: int) -> None:
        where = f"epoch {self.epoch}, positions [{self._position}, {stop})"
        self._faults.append(f"{where}: got no update and no drop, expected exactly one")

    def _fault(self, event: UpdateDone | Dropped, text: str) -> None:
        number = f" by attempted update {event.attempted}" if isinstance(event, UpdateDone) else ""
        where = f"epoch {self.epoch}, positions [{event.start}, {event.stop}) {_status(event)}{number}"
        self._faults.append(f"{where}: {text}")


@lru_cache(maxsize=1)
def _coverage_of_all(num_examples: int) -> Coverage:
    return Coverage.of(range(num_examples))


def _status(event: UpdateDone | Dropped) -> str:
    return event.status if isinstance(event, UpdateDone) else "dropped"
