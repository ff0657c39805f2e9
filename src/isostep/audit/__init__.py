"""What weight did every token really have? `watch` a loop, or `assert_exact` in a test."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .document import Report
    from .watching import Watch, assert_exact, watch

_HOME = {"Report": "document", "Watch": "watching", "assert_exact": "watching", "watch": "watching"}

__all__ = ["Report", "Watch", "assert_exact", "watch"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
