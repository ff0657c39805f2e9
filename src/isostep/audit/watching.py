"""Watching a loop in code: `with watch() as seen: ...`, then `seen.report()`; and `assert_exact` for tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ..distributed.meeting import Meeting, process_group_starts
from ..errors import InputError
from .around import installed
from .capture import Capture
from .document import EXACT, WEIGHTINGS, Report
from .replacing import replaced
from .verdict import judge


class Watch:
    """Watches everything that torch does on this thread while it is entered. Every rank enters and leaves it.

    What the loop computes stays the same but for rounding: a mean is taken as a sum over its count.
    weighting: what weights are judged by, one of declared, token, example, microbatch.
    timeout: seconds that ranks wait for each other when they leave.
    Raises InputError for another weighting, RuntimeError if it is entered twice.
    """

    def __init__(self, weighting: str = "declared", timeout: float = 60.0) -> None:
        if weighting not in WEIGHTINGS:
            raise InputError.of("weighting", weighting, f"one of {', '.join(WEIGHTINGS)}", "choose one")
        self.weighting = weighting
        self.timeout = timeout
        self.meeting = Meeting()
        self.capture = Capture()
        self._stack: ExitStack | None = None
        self._report: Report | None = None
        self._left = False

    def __enter__(self) -> Watch:
        if self._stack is not None:
            raise RuntimeError("this watch has been entered before; make another one")
        self._stack = ExitStack()
        try:
            for owner, name in process_group_starts():
                self._stack.enter_context(replaced(owner, name, self._joining))
            self._stack.enter_context(installed(self.capture))
            self._stack.enter_context(self.capture)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        self.leave()
        if kind is None:
            self.meet()
        else:
            self.capture.log.ended = False
            self.capture.log.notes.append(f"the loop ended with {kind.__name__}")

    def leave(self) -> None:
        """Take every hook away. What was seen stays."""
        if self._stack is not None:
            self._stack.close()
            self._left = True

    def meet(self) -> Report:
        """Bring the logs of all ranks together and judge them; every rank gets the report."""
        log = self.capture.log
        log.rank, log.world = self.meeting.rank, self.meeting.world
        report: Report = self.meeting.gather(log, self.timeout, lambda logs: judge(logs, self.weighting))
        self._report = report
        return report

    def report(self) -> Report:
        """The report. Raises RuntimeError before the watch is left, or where an error kept the ranks from meeting."""
        if self._report is None and self._left and self.meeting.world == 1:
            return self.meet()
        if self._report is None:
            raise RuntimeError("nothing to report yet: leave the `with` block first, without an error")
        return self._report

    def _joining(self, original: Any) -> Any:
        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.meeting.joined()
            return result

        return init_process_group


def watch(weighting: str = "declared", timeout: float = 60.0) -> Watch:
    """Watch a loop: `with isostep.audit.watch() as seen: train()`, then `print(seen.report())`. See `Watch`."""
    return Watch(weighting, timeout)


def assert_exact(train: Callable[[], Any], weighting: str = "declared", timeout: float = 60.0) -> Report:
    """Run `train()` and raise AssertionError, with the report as its text, unless every weight was exact.

    A report with findings, with a factor, or of nothing seen is not exact. In a test: `assert_exact(lambda: main([]))`.
    """
    with watch(weighting, timeout) as seen:
        train()
    report = seen.report()
    if report.verdict != EXACT or report.findings:
        raise AssertionError(f"the update is not exact\n{report}")
    return report


__all__ = ["Watch", "assert_exact", "watch"]
