"""The ledger file: one event per line, only ever appended to.

A line is written by one system call, newline included, so a process that dies leaves whole lines and at most
one torn one at the end, which has no newline. What `append` has returned for survives the death of the
process; what `sync` has returned for survives the loss of power. One process at a time writes a ledger, from any of
its threads.
"""

from __future__ import annotations

import errno
import os
import threading
from io import FileIO
from pathlib import Path
from types import TracebackType

from ..errors import InputError
from .events import CheckpointAnnounced, Dropped, Event, Resumed, RunEnded, RunStarted, from_line, to_line

DURABLE = (RunStarted, Dropped, CheckpointAnnounced, Resumed, RunEnded)
"""Events that are on disk, with all that stand before them, when `append` returns."""

OPENING = b'{"event": "'
"""The bytes that every line begins with."""

BLOCK = 1 << 16
"""Bytes read at a time in search of the last newline."""


def read(path: str | os.PathLike[str]) -> list[Event]:
    """All events of a ledger, in order. A torn last line, which has no newline, is left out.

    Raises InputError, which names the file and the line, for a file that cannot be read and for any whole
    line that is not an event of this version's schema.
    """
    events = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    events.append(from_line(line, f"{path} line {number}"))
    except OSError as error:
        remedy = f"give the ledger of a run ({error.strerror})"
        raise InputError.of("ledger", str(path), "a file that can be read", remedy) from None
    return events


class Ledger:
    """A ledger opened for appending; a new file where there is none. A context manager, or `close` it.

    Opening cuts off a torn last line and leaves every byte before it as it is. Raises InputError, with the
    file unchanged, where it cannot be opened or does not begin like a ledger of this version's schema.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._writing = threading.Lock()
        try:
            self._file = FileIO(self.path, "a+")
        except OSError as error:
            remedy = f"choose another path ({error.strerror})"
            raise InputError.of("ledger", str(path), "a file that can be written", remedy) from None
        try:
            self._check_beginning()
            self._cut_torn_line()
            if self._size() == 0:
                sync_folder(self.path.parent)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, event: Event) -> None:
        """Write one event as one line; on disk when this returns if it is one of `DURABLE`.

        Raises InputError for a value that is not of its field's type, and OSError where the line cannot be
        written whole (a full disk); the file is then as it was before.
        """
        line = to_line(event)
        with self._writing:
            written = os.write(self._file.fileno(), line)
            if written < len(line):
                self._file.truncate(self._size() - written)
                raise OSError(errno.ENOSPC, "no room for the whole event", str(self.path))
        if isinstance(event, DURABLE):
            self.sync()

    def sync(self) -> None:
        """Return when everything appended so far is on disk. Raises OSError."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; closing twice is fine, appending afterwards is a ValueError."""
        self._file.close()

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _check_beginning(self) -> None:
        """Refuse a file that is no ledger, or one of a newer schema, before a byte of it is cut."""
        with open(self.path, "rb") as file:
            first = file.readline()
        if first.endswith(b"\n"):
            from_line(first, f"{self.path} line 1")
        elif not (first.startswith(OPENING) or OPENING.startswith(first)):
            remedy = "choose the ledger of a run, or a new file"
            raise InputError.of(str(self.path), first[:80], "a ledger", remedy)

    def _cut_torn_line(self) -> None:
        """Cut the file behind its last newline."""
        end = _end_of_last_line(self._file.fileno(), self._size())
        if end < self._size():
            self._file.truncate(end)


def _end_of_last_line(descriptor: int, size: int) -> int:
    """Offset behind the last newline in the first `size` bytes; 0 where there is none."""
    end = size
    while end > 0:
        start = max(0, end - BLOCK)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on disk, so that a new file is found after the loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
