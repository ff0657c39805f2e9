"""The ledger of a run: what happened, one event per line. Reports read nothing else. Imports no torch."""

from .events import (
    SCHEMA,
    CheckpointAnnounced,
    Counts,
    CoverageStatus,
    Dropped,
    EndReason,
    Evaluated,
    Event,
    OutOfMemory,
    Resumed,
    RunEnded,
    RunStarted,
    UpdateDone,
    UpdateStatus,
    format_hash,
)
from .fold import CoverageProof, EpochProof, IdsOf, Totals, fold, prove_coverage, standing_events
from .ledger import Ledger, read

__all__ = [
    "SCHEMA",
    "CheckpointAnnounced",
    "Counts",
    "CoverageProof",
    "CoverageStatus",
    "Dropped",
    "EndReason",
    "EpochProof",
    "Evaluated",
    "Event",
    "IdsOf",
    "Ledger",
    "OutOfMemory",
    "Resumed",
    "RunEnded",
    "RunStarted",
    "Totals",
    "UpdateDone",
    "UpdateStatus",
    "fold",
    "format_hash",
    "prove_coverage",
    "read",
    "standing_events",
]
