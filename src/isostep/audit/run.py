"""Running somebody's script, unchanged, under a watch, and stopping it after the updates asked for."""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from .custom import named, run_with_loss
from .document import Report
from .watching import Watch

PATIENCE = 10.0
"""Seconds that a script has to end once it has been asked to."""


class Stop(BaseException):
    """Ends a script from inside. Not an Exception: `except Exception` around a training loop lets it through."""


@dataclass(frozen=True)
class Options:
    """How to run a script. updates: None for all."""

    updates: int | None = 4
    weighting: str = "declared"
    timeout: float = 600.0
    """Seconds that the script may take, and at most a tenth of it that ranks wait for each other afterwards."""
    loss: str | None = None
    """module:function of a loss that torch does not have."""


class Run:
    """One script on one rank. `finish` is called with the report where the script will not end by itself."""

    def __init__(self, options: Options, finish: Callable[[Report], None]) -> None:
        self.options = options
        self.watch = Watch(options.weighting, min(60.0, options.timeout))
        self.watch.capture.before_pass = self._before_pass
        self._finish = finish
        self._asked: float | None = None
        self._late = False
        self._ended = threading.Event()

    def run(self, script: Path, arguments: Sequence[str]) -> Report:
        """Run the script as `python script ...` would, and report. An error of the script is printed as Python does,
        and the report says so.
        """
        log = self.watch.capture.log
        threading.Thread(target=self._watchdog, daemon=True).start()
        argv, path = sys.argv, list(sys.path)
        sys.argv, sys.path[0] = [str(script), *arguments], str(script.parent.resolve())
        try:
            with _without_meeting(self.watch):
                self._execute(script)
        except Stop:
            pass
        except SystemExit as end:
            if self._asked is None and end.code not in (None, 0):
                log.ended = False
                log.notes.append(f"the script ended by itself with exit code {end.code}")
        except InputError:
            raise
        except Exception as error:
            if self._asked is None:
                log.ended = False
                log.notes.append(f"the script failed: {type(error).__name__}: {str(error)[:200]}")
                _print_error(error, script)
        finally:
            sys.argv, sys.path[:] = argv, path
            self._ended.set()
        return self._report()

    def _execute(self, script: Path) -> None:
        loss = self.options.loss
        if loss is None:
            runpy.run_path(str(script), run_name="__main__")
        elif loss.partition(":")[0] in ("__main__", script.stem):
            run_with_loss(script, loss.partition(":")[2], self.watch.capture)
        else:
            with named(self.watch.capture, loss):
                runpy.run_path(str(script), run_name="__main__")

    def _report(self) -> Report:
        log = self.watch.capture.log
        log.stopped = self._asked is not None
        if not log.ended:
            self.watch.timeout = min(self.watch.timeout, 5)  # the others may never come
        if self._late:
            log.ended = False
            log.notes.append(f"the script was stopped after {self.options.timeout:g} s")
        try:
            return self.watch.meet()
        except TimeoutError:
            from .verdict import judge

            log.notes.append("the other ranks did not report in time")
            return judge([log], self.options.weighting)

    def _before_pass(self) -> None:
        updates = self.options.updates
        if self._asked is None and not self._late and (updates is None or self.watch.capture.updates < updates):
            return
        now = time.monotonic()
        self._asked = self._asked or now
        if now - self._asked > PATIENCE:
            self._give_up()
        raise Stop

    def _watchdog(self) -> None:
        """End a script that takes too long: at its next pass, and where there is none, at once."""
        begin = time.monotonic()
        while not self._ended.wait(0.2):
            now = time.monotonic()
            self._late |= self._asked is None and now - begin > self.options.timeout
            overdue = now - begin - self.options.timeout if self._late else now - (self._asked or now)
            if overdue > PATIENCE:
                self._give_up()

    def report_alone(self) -> None:
        """Another rank is gone: report what this one saw, and end."""
        from .verdict import judge

        time.sleep(0.5)  # an error of the script that comes of it
        log = self.watch.capture.log
        log.rank, log.world = self.watch.meeting.rank, self.watch.meeting.world
        log.ended = False
        report = judge([log], self.options.weighting)
        self._finish(report)
        leave_at_once(report.exit_code)

    def _give_up(self) -> None:
        """The script has caught the request to stop, or hangs: report what was seen, and end this process."""
        self.watch.capture.log.notes.append("the script did not end when it was asked to, and was ended")
        self._asked = self._asked or time.monotonic()
        report = self._report()
        self._finish(report)
        leave_at_once(report.exit_code)


def _print_error(error: BaseException, script: Path) -> None:
    """As Python prints it: from the script on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    ours = os.path.dirname(os.path.abspath(__file__))
    text = traceback.TracebackException(type(error), error, trace)
    text.stack[:] = [f for f in text.stack if not os.path.abspath(f.filename).startswith(ours)]
    sys.stderr.write("".join(text.format()))


def leave_at_once(code: int) -> None:
    """End this process, whatever its threads do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _without_meeting:  # noqa: N801
    """Enter a watch, and leave it without waiting for other ranks."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def __enter__(self) -> None:
        self.watch.__enter__()

    def __exit__(self, *_: object) -> None:
        self.watch.leave()
