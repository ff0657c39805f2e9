"""Schedules as the CSV files that torch.distributed.pipelining reads: a row per rank, a cell per action.

A cell is a stage index, an op and a microbatch index: 2F0; an empty cell is idle; "(0F8;7B0)OVERLAP_F_B" is a forward
overlapped with a full backward. Cells of communication (SEND_F, RECV_B, UNSHARD, REDUCE_GRAD, ...), which torch adds
where it needs them, are passed over when a file is read.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import InputError
from .ir import MAX_CHUNKS, OPS, Schedule, check_size, encode
from .validate import first_fault

ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
OVERLAPPED = re.compile(r"\((\d{1,9}F\d{1,9});(\d{1,9}B\d{1,9})\)OVERLAP_F_B")
COMMUNICATION = re.compile(r"\d{1,9}(WAIT_)?(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d{0,9}")
MAX_BYTES = 1 << 30


def text(schedule: Schedule) -> str:
    """The file's text, compute only."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for rank in range(schedule.stages):
        overlapped = schedule.overlapped[rank] if schedule.overlapped else frozenset()
        cells = list(map(str, schedule.actions(rank)))
        for place in sorted(overlapped, reverse=True):
            cells[place : place + 2] = [f"({cells[place]};{cells[place + 1]})OVERLAP_F_B"]
        writer.writerow(cells)
    return out.getvalue()


def read(path: str | Path) -> Schedule:
    """A schedule from a file, checked. Raises InputError, which names row and column, for the first thing wrong."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise InputError.of("schedule", str(path), "a file", "choose another")
        if path.stat().st_size > MAX_BYTES:
            raise InputError.of("schedule", str(path), "a file of at most 1 GiB", "choose another")
        lines = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError.of("schedule", str(path), f"a CSV file ({error.strerror})", "choose another") from None
    except UnicodeDecodeError:
        raise InputError.of("schedule", str(path), "a CSV file of text", "choose another") from None
    return parse(lines, str(path))


def parse(lines: str, name: str) -> Schedule:
    """A schedule from a file's text; `name` is what an error calls it. Raises InputError as `read` does."""
    rows = [_Row.of(cells, name, rank) for rank, cells in enumerate(_cells(lines, name))]
    rank_of = _ranks(rows, name)
    chunks = len(rank_of) // len(rows)
    _check_microbatches(rows, len(rank_of), name)
    microbatches = 1 + max(microbatch for row in rows for _, _, microbatch in row.actions)
    check_size(len(rows), chunks, microbatches)
    orders = []
    for row in rows:
        codes = [encode(OPS.index(op), s, np.array([mb]), len(rank_of), microbatches) for s, op, mb in row.actions]
        orders.append(np.concatenate(codes))
    overlapped = tuple(row.overlapped for row in rows) if any(row.overlapped for row in rows) else ()
    schedule = Schedule(name, len(rows), chunks, microbatches, rank_of, tuple(orders), overlapped)
    fault = first_fault(schedule)
    if fault is not None:
        place = rows[fault.rank].place(name, fault.rank, fault.position)
        raise InputError.of(place, fault.got, fault.expected, fault.remedy)
    return schedule


def _cells(lines: str, name: str) -> list[list[str]]:
    """The cells of each row, without the empty rows at the end."""
    try:
        rows = list(csv.reader(io.StringIO(lines)))
    except csv.Error as error:
        raise InputError.of(name, str(error), "rows of short cells such as 2F0", "mend the file") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if len(rows) > MAX_CHUNKS:
        raise InputError.of(name, f"{len(rows)} rows", f"at most {MAX_CHUNKS:,}, one per rank", "choose another file")
    return rows


@dataclass(frozen=True)
class _Row:
    actions: list[tuple[int, str, int]]
    columns: list[int]
    """Where each action stands, from 1."""
    overlapped: frozenset[int]

    @classmethod
    def of(cls, cells: list[str], name: str, rank: int) -> _Row:
        actions: list[tuple[int, str, int]] = []
        columns: list[int] = []
        overlapped: set[int] = set()
        for column, cell in enumerate(cells, start=1):
            cell = cell.strip()
            if not cell or COMMUNICATION.fullmatch(cell):
                continue
            if match := OVERLAPPED.fullmatch(cell):
                overlapped.add(len(actions))
                parts = match.groups()
            else:
                parts = (cell,)
            for part in parts:
                if not (match := ACTION.fullmatch(part)):
                    place = f"{name}, row {rank + 1}, column {column}"
                    shown = part if len(part) <= 40 else f"{part[:40]}..."
                    raise InputError.of(place, shown, "an action such as 2F0, with F, B, I or W", "mend this cell")
                actions.append((int(match[1]), match[2], int(match[3])))
                columns.append(column)
        if not actions:
            raise InputError.of(f"{name}, row {rank + 1}", "no action", "a row of actions per rank", "fill the row")
        return cls(actions, columns, frozenset(overlapped))

    def place(self, name: str, rank: int, position: int) -> str:
        """Row and column of an action, as an error calls it."""
        if position >= len(self.columns):
            return f"{name}, row {rank + 1}, at its end"
        return f"{name}, row {rank + 1}, column {self.columns[position]}"


def _check_microbatches(rows: list[_Row], num_stages: int, name: str) -> None:
    """Raises InputError at the first cell of a microbatch beyond those that every stage has: most likely a slip."""
    stages_of: dict[int, set[int]] = {}
    for row in rows:
        for stage, _, microbatch in row.actions:
            stages_of.setdefault(microbatch, set()).add(stage)
    common = 0
    while len(stages_of.get(common, ())) == num_stages:
        common += 1
    if len(stages_of) == common or not common:
        return
    for rank, row in enumerate(rows):
        for position, (stage, op, microbatch) in enumerate(row.actions):
            if microbatch > common or (microbatch == common and 2 * len(stages_of[common]) <= num_stages):
                expected = f"microbatches 0 to {common - 1}, those that every stage has"
                remedy = "mend its number, or add this microbatch to the other stages"
                raise InputError.of(row.place(name, rank, position), f"{stage}{op}{microbatch}", expected, remedy)


def _ranks(rows: list[_Row], name: str) -> tuple[int, ...]:
    """The rank of each stage index. Raises InputError for a stage on two ranks or on none, and for unequal ranks."""
    if not rows:
        raise InputError.of(name, "an empty file", "a row of actions per rank", "choose another file")
    found: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for position, (stage, op, microbatch) in enumerate(row.actions):
            if found.setdefault(stage, rank) != rank:
                expected = f"stage {stage} on one rank (row {found[stage] + 1} has it too)"
                raise InputError.of(row.place(name, rank, position), f"{stage}{op}{microbatch}", expected, "choose one")
    count = len(found)
    missing = next((stage for stage in range(count) if stage not in found), None)
    if missing is not None:
        raise InputError.of(
            name, f"no action of stage {missing}", f"stages 0 to {max(found)}", "number them without gaps"
        )
    counted = Counter(found.values())
    held = [counted[rank] for rank in range(len(rows))]
    if len(set(held)) != 1:
        got = f"{max(held)} stages on row {held.index(max(held)) + 1}, {min(held)} on row {held.index(min(held)) + 1}"
        raise InputError.of(name, got, "as many stages on every rank", "spread them evenly")
    return tuple(found[stage] for stage in range(count))
