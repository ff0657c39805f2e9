"""Live progress: plain lines for a log, a bar for a terminal, and nothing half-drawn."""

from __future__ import annotations

import io
import os
import re
from typing import Any

import pytest
from rich.console import Console

from isostep.report.progress import Progress

NUMBERS: dict[str, Any] = {
    "loss": 2.5, "supervised_tokens": 72_856, "tokens_per_second": 15_906.4, "grad_norm": 0.5096,
    "learning_rate": 0.003, "memory": 512 * 2**20,
}  # fmt: skip
SHOW_CURSOR = "\x1b[?25h"


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def plain(clock: Clock, *args: int | None, **kwargs: Any) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    return Progress(*args, stream=stream, clock=clock, **kwargs), stream


def terminal(clock: Clock, *args: int | None, width: int = 100) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, legacy_windows=False, _environ={})
    return Progress(*args, console=console, clock=clock), stream


def updates_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^update +(\d+)", text, re.MULTILINE)]


def words(stream: io.StringIO) -> str:
    return " ".join(stream.getvalue().split())


def test_a_line_has_every_number(clock: Clock) -> None:
    progress, stream = plain(clock, 101)
    progress.update(25, examples=800, seconds=0.8, **NUMBERS)
    assert words(stream) == (
        "update 25/101 loss 2.5000 norm 0.5096 lr 3.00e-03 800 examples 72,856 supervised "
        "15,906 tokens/s 512 MiB 1 min 1 s left"
    )


def test_what_is_not_known_is_a_dash(clock: Clock) -> None:
    progress, stream = plain(clock, None)
    progress.update(1)
    assert words(stream) == ("update 1 loss - norm - lr - - examples - supervised - tokens/s - - left")


def test_lines_are_aligned(clock: Clock) -> None:
    progress, stream = plain(clock, 1000, every=0)
    progress.update(1, examples=32, seconds=1, **NUMBERS)
    progress.update(1000, examples=32_000, seconds=1, **(NUMBERS | {"loss": 12.5, "supervised_tokens": 1_072_856}))
    first, last = stream.getvalue().splitlines()
    for word in ("loss", "norm", "lr", "examples", "supervised", "tokens/s", "MiB"):
        assert first.index(word) == last.index(word), word


def test_lines_come_every_few_seconds_and_first_and_last_always(clock: Clock) -> None:
    progress, stream = plain(clock, 9, every=5.0)
    with progress:
        for number in range(1, 10):
            progress.update(number)
            clock.now += 2.0
        assert updates_in(stream.getvalue()) == [1, 4, 7, 9]  # at once, before what is said at the end
    assert updates_in(stream.getvalue()) == [1, 4, 7, 9]


@pytest.mark.parametrize("planned", [None, 100])
def test_the_last_update_of_a_run_that_ends_early_has_its_line(clock: Clock, planned: int | None) -> None:
    progress, stream = plain(clock, planned)

    def train() -> None:
        with progress:
            for number in range(1, 6):
                progress.update(number)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert updates_in(stream.getvalue()) == [1, 5]
    progress.close()
    assert updates_in(stream.getvalue()) == [1, 5]
    assert stream.getvalue().endswith("\n")


def test_a_log_has_no_colour_codes_and_no_wrapped_lines(clock: Clock) -> None:
    progress, stream = plain(clock, 10)
    with progress:
        progress.say("[bold]a line[/] of 200 columns " + "x" * 170)
        progress.update(1, examples=1, seconds=1, **NUMBERS)
    assert "\x1b" not in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 2
    assert stream.getvalue().startswith("[bold]a line[/] of")


def test_quiet_writes_nothing(clock: Clock) -> None:
    progress, stream = plain(clock, 2, quiet=True)
    with progress:
        progress.update(1, **NUMBERS)
        progress.say("a line")
        progress.update(2, **NUMBERS)
    assert stream.getvalue() == ""


def left(progress: Progress, stream: io.StringIO) -> str:
    return stream.getvalue().splitlines()[-1].rpartition("MiB  ")[2]


def test_time_left_follows_the_last_updates_and_not_the_clock(clock: Clock) -> None:
    """The first update took a minute, the last 20 a second each; what passed between them does not count."""
    progress, stream = plain(clock, 121, every=0)
    progress.update(1, seconds=60, **NUMBERS)
    assert left(progress, stream) == "2 h left"
    for number in range(2, 22):
        clock.now += 1000  # validation
        progress.update(number, seconds=1, **NUMBERS)
    assert left(progress, stream) == "1 min 40 s left"


def test_time_left_by_examples_where_updates_are_not_known(clock: Clock) -> None:
    """The last two updates: 30 examples in 6 seconds. 70 of 100 are left: 14 s."""
    progress, stream = plain(clock, None, 100, every=0)
    progress.update(1, examples=0, seconds=50, **NUMBERS)
    assert left(progress, stream) == "- left"
    progress.update(2, examples=10, seconds=3, **NUMBERS)
    progress.update(3, examples=30, seconds=3, **NUMBERS)
    assert left(progress, stream) == "14 s left"


def test_time_left_is_not_known_without_seconds_or_an_end(clock: Clock) -> None:
    for progress, stream in (plain(clock, 10), plain(clock, None)):
        progress.update(2, **NUMBERS)
        assert left(progress, stream) == "- left"


# -------------------------------------------------------------------------------------------- a terminal


def screen(text: str) -> list[str]:
    """What a terminal shows in the end: the control codes that rich's live display uses, carried out."""
    rows, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", text):
        if token == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif token == "\r":
            column = 0
        elif token.endswith("A"):
            row -= int(token[2:-1] or 1)
        elif token.endswith("K"):
            rows[row] = ""
        elif not token.startswith("\x1b"):
            rows[row] = rows[row][:column].ljust(column) + token + rows[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in rows if line.strip()]


def test_a_terminal_shows_one_bar(clock: Clock) -> None:
    progress, stream = terminal(clock, 101)
    with progress:
        for number in range(1, 51):
            clock.now += 1
            progress.update(number, examples=32 * number, seconds=2, **NUMBERS)
    assert "\x1b[" in stream.getvalue()
    bar, measured, used = screen(stream.getvalue())
    assert bar.split()[:2] == ["update", "50/101"]
    assert bar.endswith("50 % 1 min 42 s left")
    assert "━" in bar
    assert measured == "loss 2.5000  norm 0.5096  lr 3.00e-03"
    assert used == "1,600 examples  72,856 supervised  15,906 tokens/s  512 MiB"


def test_a_terminal_is_not_drawn_for_every_fast_update(clock: Clock) -> None:
    progress, stream = terminal(clock, 10_000)
    with progress:
        for number in range(1, 1001):
            clock.now += 0.001
            progress.update(number, **NUMBERS)
    drawn = set(re.findall(r"update ([\d,]+)/", stream.getvalue()))
    assert {"1", "1,000"} <= drawn
    assert len(drawn) < 20


def test_lines_are_said_above_the_bar(clock: Clock) -> None:
    progress, stream = terminal(clock, 10)
    with progress:
        progress.update(1, **NUMBERS)
        progress.say("validation loss [2.3]")
        progress.update(10, **NUMBERS)
    shown = screen(stream.getvalue())
    assert shown[0] == "validation loss [2.3]"
    assert shown[1].startswith("update 10/10 ")
    assert len(shown) == 4


def test_an_interrupted_bar_is_left_whole(clock: Clock) -> None:
    progress, stream = terminal(clock, 10)

    def train() -> None:
        with progress:
            progress.update(1, **NUMBERS)
            progress.update(2, **NUMBERS)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    text = stream.getvalue()
    assert screen(text)[0].startswith("update 2/10 ")
    assert text.removesuffix(SHOW_CURSOR).endswith("\n")
    assert text.rindex(SHOW_CURSOR) > text.rindex("update 2/10")
    progress.close()
    assert stream.getvalue() == text


def test_a_bar_without_a_known_end(clock: Clock) -> None:
    progress, stream = terminal(clock, None, None)
    with progress:
        progress.update(1)
    assert screen(stream.getvalue())[0].endswith("- left")
    progress, stream = terminal(clock, None, 200)
    with progress:
        progress.update(3, examples=50)
    assert "25 %" in screen(stream.getvalue())[0]


def test_a_narrow_terminal_is_not_overrun(clock: Clock) -> None:
    progress, stream = terminal(clock, 101, width=50)
    with progress:
        progress.update(1, examples=32, seconds=1, **NUMBERS)
        clock.now += 1
        progress.update(2, examples=64, seconds=1, **NUMBERS)
    shown = screen(stream.getvalue())
    assert max(map(len, shown)) <= 50
    assert sum(line.startswith("loss") for line in shown) == 1


def test_a_dumb_terminal_gets_lines(clock: Clock) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, _environ={"TERM": "dumb"})
    with Progress(2, console=console, clock=clock) as progress:
        progress.update(1)
        progress.update(2)
    assert updates_in(stream.getvalue()) == [1, 2]
    assert "\x1b" not in stream.getvalue()


def test_a_reader_that_goes_away_ends_nothing() -> None:
    """`isostep train | head`: rich would end the process."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream, Progress(10, stream=stream, every=0) as progress:
        os.close(read)
        for update in range(1, 4):
            progress.update(update, loss=1.0)
            progress.say("nobody reads this")
