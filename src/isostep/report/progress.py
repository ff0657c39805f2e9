"""Live progress of a training loop: a bar on a terminal, a line every few seconds elsewhere. Imports no torch.

Knows numbers and nothing of what they come from. Only replica 0 has one.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..ledger.words import duration, mebibytes, number, whole

EVERY = 5.0
"""Seconds from one plain line to the next, at least."""

WINDOW = 20
"""Updates whose seconds give the time that is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What the last update told."""

    update: int
    loss: float | None
    examples: int | None
    supervised_tokens: int | None
    tokens_per_second: float | None
    grad_norm: float | None
    learning_rate: float | None
    memory: int | None
    seconds_left: float | None


class _Console(Console):
    """A console that goes quiet when nobody reads any more; rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        go_quiet(self.file)


def go_quiet(stream: IO[str]) -> None:
    """Send what is still written to a broken stream nowhere."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class Progress:
    """Shows how far a run is. A context manager: on leaving, however, the display is whole and below is free.

    planned_updates: updates of the whole run, attempted ones. planned_examples: the same in examples, which gives the
        time left where the number of updates is not known.
    stream: stdout unless given. quiet: nothing is ever written.
    every: seconds between plain lines; the first and the last update have theirs always.
    """

    def __init__(
        self,
        planned_updates: int | None = None,
        planned_examples: int | None = None,
        *,
        stream: IO[str] | None = None,
        quiet: bool = False,
        every: float = EVERY,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.planned_updates, self.planned_examples = planned_updates, planned_examples
        self.quiet, self._every, self._clock = quiet, every, clock
        self._console = console or _Console(file=stream or sys.stdout, highlight=False)
        self._seconds: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._examples_before: int | None = None
        self._shown_at: float | None = None
        self._held: _State | None = None
        live = not quiet and self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, auto_refresh=False) if live else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(
        self,
        update: int,
        *,
        loss: float | None = None,
        examples: int | None = None,
        supervised_tokens: int | None = None,
        tokens_per_second: float | None = None,
        grad_norm: float | None = None,
        learning_rate: float | None = None,
        memory: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """Tell of one update: its number from 1, its loss, and what the run has used by now. None is shown as "-".

        memory: peak in bytes. seconds: what this update took, without validation and checkpoints around it.
        """
        if seconds is not None:
            before = self._examples_before
            self._seconds.append((seconds, 0 if examples is None or before is None else examples - before))
        self._examples_before = examples
        state = _State(
            update=update, loss=loss, examples=examples, supervised_tokens=supervised_tokens,
            tokens_per_second=tokens_per_second, grad_norm=grad_norm, learning_rate=learning_rate, memory=memory,
            seconds_left=self._seconds_left(update, examples),
        )  # fmt: skip
        if self.quiet:
            return
        if self._live is not None:
            self._held = state
            self._live.update(self._picture(state), refresh=self._is_due(state))
        elif self._is_due(state):
            self._held = None
            self._print(self._line(state))
        else:
            self._held = state

    def say(self, text: str) -> None:
        """Print lines above the display."""
        if not self.quiet:
            self._print(text)

    def close(self) -> None:
        """Show the last update if it has not been shown, and end the display. Closing twice is fine."""
        held, self._held = self._held, None
        if self._live is not None:
            self._live.stop()  # draws what it holds, and shows the cursor again
        elif held is not None:
            self._print(self._line(held))

    def _seconds_left(self, update: int, examples: int | None) -> float | None:
        """By the mean of the last updates; None where the end or their seconds are not known."""
        spent = sum(seconds for seconds, _ in self._seconds)
        used = sum(n for _, n in self._seconds)
        if self.planned_updates is not None and self._seconds:
            return spent / len(self._seconds) * max(0, self.planned_updates - update)
        if self.planned_examples is not None and examples is not None and used:
            timed = sum(seconds for seconds, n in self._seconds if n)
            return timed / used * max(0, self.planned_examples - examples)
        return None

    def _is_due(self, state: _State) -> bool:
        """Whether it is time to show something: a bar ten times a second, a line every few seconds."""
        now, every = self._clock(), 0.1 if self._live is not None else self._every
        if self._shown_at is None or now - self._shown_at >= every or state.update == self.planned_updates:
            self._shown_at = now
            return True
        return False

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        try:
            self._console.file.flush()
        except BrokenPipeError:
            self._console.on_broken_pipe()

    def _line(self, state: _State) -> str:
        """Aligned columns for a log."""
        planned = "" if self.planned_updates is None else f"/{self.planned_updates}"
        width = max(4, len(planned) - 1)
        left = "-" if state.seconds_left is None else duration(state.seconds_left)
        columns = [
            f"update {state.update:>{width}}{planned}",
            f"loss {number(state.loss):>7}",
            f"norm {number(state.grad_norm):>7}",
            f"lr {_rate(state.learning_rate):>8}",
            f"{whole(state.examples):>7} examples",
            f"{whole(state.supervised_tokens):>9} supervised",
            f"{_speed(state.tokens_per_second):>7} tokens/s",
            f"{mebibytes(state.memory):>9}",
            f"{left} left",
        ]
        return "  ".join(columns)

    def _picture(self, state: _State) -> Group:
        """Three lines: the bar, what was measured, what was used."""
        done, of = self._share(state)
        planned = "" if self.planned_updates is None else f"/{self.planned_updates:,}"
        bar = Table.grid(padding=(0, 1), expand=False)
        cells = [Text(f"update {state.update:,}{planned}"), ProgressBar(total=of, completed=done or 0, width=30)]
        percent = "" if done is None or of is None else f"{100 * done / of:.0f} %"
        left = "-" if state.seconds_left is None else duration(state.seconds_left)
        bar.add_row(*cells, Text(percent), Text(f"{left} left"))
        values = f"loss {number(state.loss)}  norm {number(state.grad_norm)}  lr {_rate(state.learning_rate)}"
        used = f"{whole(state.examples)} examples  {whole(state.supervised_tokens)} supervised"
        speed = f"{_speed(state.tokens_per_second)} tokens/s  {mebibytes(state.memory)}"
        return Group(bar, *(Text(line, no_wrap=True, overflow="ellipsis") for line in (values, f"{used}  {speed}")))

    def _share(self, state: _State) -> tuple[float | None, float | None]:
        """How much of how much is done, in updates or else in examples."""
        if self.planned_updates:
            return state.update, self.planned_updates
        if self.planned_examples and state.examples is not None:
            return state.examples, self.planned_examples
        return None, None


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
