"""The pipeline timeline of a run: what was predicted beside what was measured. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from ..errors import InputError
from ..ledger import Event, TimelineObserved
from ..schedule import gantt_text
from ..schedule.drawing import heading, percent, shown_ranks
from ..schedule.measured import Comparison
from ..schedule.timeline_file import read
from ..units import count

MOST_RANKS = 16
"""That get a line of the table."""
LABEL, COLUMN = 17, 12


@dataclass(frozen=True)
class Timeline:
    """A typical update of the last start of a run that recorded some, times in milliseconds."""

    path: str
    updates: int
    """Recorded in that start."""
    attempted: int
    """Number of the typical one."""
    replica: int
    """The slowest one of it."""
    replicas: int
    compared: Comparison

    @classmethod
    def of(cls, run_dir: Path, path: str) -> Timeline:
        """From the file that the ledger names. Raises InputError where it cannot be read or holds something else."""
        starts = read(run_dir / path)
        if not starts:
            raise InputError.of("timeline", path, "recorded updates", "restore the file")
        update, compared = starts[-1].typical()
        replica = max(compared, key=lambda each: compared[each].measured.makespan)
        replicas = starts[-1].start.replicas
        return cls(path, len(starts[-1].updates), update.attempted, replica, replicas, compared[replica])

    def document(self) -> dict[str, Any]:
        """The numbers as JSON can hold them; times in milliseconds."""
        return {
            "path": self.path,
            "recorded_updates": self.updates,
            "attempted": self.attempted,
            "replica": self.replica,
            "schedule": self.compared.measured.schedule.name,
            "num_microbatches": self.compared.measured.schedule.num_microbatches,
            "unit": "ms",
            **self.compared.document(),
        }

    def text(self, width: int) -> str:
        """Both Gantt charts, the numbers side by side, and what bounds the run."""
        compared = self.compared
        of = f"; replica {self.replica}, slowest of {self.replicas}" if self.replicas > 1 else ""
        title = f"pipeline timeline in ms: update {self.attempted}, typical of {self.updates} recorded{of}"
        named = {f"predicted: {heading(compared.measured)}": compared.predicted, "measured": compared.measured}
        return "\n".join(
            [
                *wrap(title, width, subsequent_indent="  "),
                *_indented(gantt_text.pair(named, width - 2).plain.splitlines()),
                "",
                *_indented(_numbers(compared)),
                "",
                *_indented(_parts(compared)),
                *_indented(wrap(compared.sentence, width - 2)),
            ]
        )


def timeline_of(run_dir: Path, events: Sequence[Event]) -> Timeline | InputError | None:
    """The timeline that the ledger names last; the error if its file is no good; None if there is none."""
    observed = next((event for event in reversed(events) if isinstance(event, TimelineObserved)), None)
    if observed is None:
        return None
    try:
        return Timeline.of(run_dir, observed.path)
    except InputError as error:
        return error


def _numbers(compared: Comparison) -> Iterator[str]:
    """Makespan, busy share and the work of each rank: predicted, measured, error; how long each rank waited."""
    predicted, measured = compared.predicted, compared.measured
    yield _row("", "predicted", "measured", "error", "waits", "in transfer")
    yield _row("makespan", *_three(predicted.makespan, measured.makespan))
    error = f"{100 * compared.busy_share_error:+.1f} pts"
    yield _row("busy share", percent(predicted.busy_share), percent(measured.busy_share), error)
    before = -1
    for rank in shown_ranks(len(measured.busy), MOST_RANKS):
        if rank > before + 1:
            yield f"... {count(rank - before - 1, 'rank')} not shown"
        before = rank
        waits = (f"{wait:.1f}" for wait in measured.waits[rank])
        yield _row(f"work of rank {rank}", *_three(predicted.busy[rank], measured.busy[rank]), *waits)


def _parts(compared: Comparison) -> Iterator[str]:
    """The parts that add up to the measured makespan."""
    bounds = compared.bounds
    parts = {
        "work of the busiest rank": bounds.work,
        "  more than the mean rank": bounds.imbalance,
        "fill and drain": bounds.fill_and_drain,
        "transfers": bounds.transfers,
        "not explained by these": bounds.unexplained,
        "measured makespan": bounds.makespan,
    }
    for name, part in parts.items():
        yield _row(f"{name:<{LABEL + COLUMN}}", f"{part:.1f}", percent(part / bounds.makespan))


def _three(predicted: float, measured: float) -> tuple[str, str, str]:
    error = round(100 * (predicted / measured - 1), 1) + 0.0 if measured else 0.0  # + 0.0: never -0.0
    return f"{predicted:.1f}", f"{measured:.1f}", f"{error:+.1f} %"


def _row(name: str, *cells: str) -> str:
    return (name.ljust(LABEL) + "".join(cell.rjust(COLUMN) for cell in cells)).rstrip()


def _indented(lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    return (f"  {line}".rstrip() for line in lines)
