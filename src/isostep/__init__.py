"""isostep: one update, any layout.

Names are imported when they are first used, so that what needs no torch starts without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data.collate import pad_batch
    from .data.groups import groups, ready_groups
    from .distributed.stages import StagedModel
    from .errors import (
        AbandonedError,
        CoverageError,
        InputError,
        IsostepError,
        NonFiniteError,
        OutOfMemoryError,
        PeerError,
        PeerLostError,
    )
    from .inspection import inspect
    from .ledger import Ledger
    from .loss_scale import LossScale
    from .objective import Term, causal_lm, mse, token_cross_entropy
    from .result import UpdateResult
    from .updater import Updater

__version__ = "0.1.0"

_HOME = {
    "AbandonedError": "errors",
    "CoverageError": "errors",
    "InputError": "errors",
    "IsostepError": "errors",
    "Ledger": "ledger",
    "LossScale": "loss_scale",
    "NonFiniteError": "errors",
    "OutOfMemoryError": "errors",
    "PeerError": "errors",
    "PeerLostError": "errors",
    "StagedModel": "distributed.stages",
    "Term": "objective",
    "UpdateResult": "result",
    "Updater": "updater",
    "causal_lm": "objective",
    "groups": "data.groups",
    "inspect": "inspection",
    "mse": "objective",
    "pad_batch": "data.collate",
    "ready_groups": "data.groups",
    "token_cross_entropy": "objective",
}

__all__ = [
    "AbandonedError",
    "CoverageError",
    "InputError",
    "IsostepError",
    "Ledger",
    "LossScale",
    "NonFiniteError",
    "OutOfMemoryError",
    "PeerError",
    "PeerLostError",
    "StagedModel",
    "Term",
    "UpdateResult",
    "Updater",
    "causal_lm",
    "groups",
    "inspect",
    "mse",
    "pad_batch",
    "ready_groups",
    "token_cross_entropy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
