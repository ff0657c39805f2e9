"""A request to stop, and how long the update under way may still take."""

from __future__ import annotations

import time


class StopRequest:
    """What one replica was asked for. Without locks, so that a signal handler may ask, even one inside another."""

    def __init__(self) -> None:
        self.requested = False
        self._deadlines: list[float] = []

    def ask(self, grace: float | None) -> None:
        """Stop after the update under way; abandon that if it is not in its vote `grace` seconds from now."""
        if grace is not None:
            self._deadlines.append(time.monotonic() + grace)  # none is replaced, so the earliest one counts
        self.requested = True

    @property
    def overdue(self) -> bool:
        """Whether the grace of some request is over."""
        return any(time.monotonic() >= deadline for deadline in self._deadlines)

    def answer(self) -> None:
        """Forget what was asked: all replicas know it by now."""
        self.requested = False
        self._deadlines.clear()
