"""`isostep runs`: a table of all runs below a folder."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..cli import json_path, write_json
from ..errors import InputError, IsostepError

DEFAULT = "runs"
DEEPEST = 6
"""Levels of folders that are searched for runs."""

LEAST_FIRST = ("purpose", "started (UTC)", "took", "D", "verdict", "loss")
"""Columns that a narrow terminal does without, in this order."""

NUMBERS = ("applied", "loss", "D")

UNBROKEN = 140
"""Columns of a table that is no terminal's, so that each run is one line."""

EPILOG = """example:
  isostep runs
  isostep runs experiments/september --json runs.json

The newest run first. A run is a folder with a ledger.jsonl.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `isostep runs`."""
    parser.epilog = EPILOG
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help=f"where to look (default {DEFAULT})")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the table here, - for standard output")


def run(args: argparse.Namespace) -> int:
    """List the runs. Returns 0, without runs too. Raises InputError for a folder that was named and is none."""
    folder = Path(DEFAULT) if args.folder is None else args.folder
    if args.folder is not None and not folder.is_dir():
        raise InputError.of("folder", str(folder), "a directory that exists", "check the path")
    rows = sorted((_row(run_dir, folder) for run_dir in _run_dirs(folder)), key=lambda row: -float(row["started"]))
    write_json(args.json, {"schema": 1, "folder": str(folder), "runs": rows})
    if args.json != "-":
        _show(rows, folder)
    return 0


def _run_dirs(folder: Path) -> Iterator[Path]:
    """Every folder with a ledger below a folder, and itself; nothing is looked for inside a run."""
    from ..ledger.sheet import LEDGER

    for path, folders, files in os.walk(folder):
        here = Path(path)
        if LEDGER in files:
            yield here
            folders.clear()
        elif len(here.relative_to(folder).parts) >= DEEPEST:
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]


def _row(run_dir: Path, folder: Path) -> dict[str, Any]:
    """One run; a ledger that cannot be read is a row that says why."""
    from ..ledger.sheet import LEDGER, read_run, sheet

    name = str(run_dir if run_dir == folder else run_dir.relative_to(folder))
    try:
        document = sheet(read_run(run_dir), prove=False)
    except IsostepError as error:
        return {"name": name, "state": "broken", "error": str(error), "started": (run_dir / LEDGER).stat().st_mtime}
    last = document["validation"]["last"]
    return {
        "name": name,
        "state": document["state"],
        "purpose": document["purpose"],
        "applied": document["updates"]["applied"],
        "planned": document["updates"]["planned"],
        "validation_loss": last["loss"] if last else None,
        "replicas": document["layouts"][-1]["replicas"] if document["layouts"] else None,
        "started": document["time"]["started"],
        "wall_seconds": document["time"]["wall_seconds"],
        "verdict": document["quality"]["verdict"],
    }


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """The texts of one run, by heading."""
    from ..ledger.words import duration, moment, number

    started = moment(row["started"])[:16]
    if row["state"] == "broken":
        return {"run": row["name"], "state": "broken", "started (UTC)": started}
    planned = "" if row["planned"] is None else f"/{row['planned']:,}"
    return {
        "run": row["name"],
        "state": row["state"],
        "purpose": row["purpose"] or "-",
        "applied": f"{row['applied']:,}{planned}",
        "loss": number(row["validation_loss"]),
        "D": str(row["replicas"] or "-"),
        "started (UTC)": started,
        "took": duration(row["wall_seconds"]),
        "verdict": row["verdict"],
    }


def _show(rows: list[dict[str, Any]], folder: Path) -> None:
    if not rows:
        print(f"no runs in {folder}: `isostep train --run-dir {folder}/first` makes one")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, UNBROKEN)
    shown = [_cells(row) for row in rows]
    headers = list(next((cells for cells in shown if "applied" in cells), shown[0]))
    widths = {h: max(len(h), *(len(cells.get(h, "")) for cells in shown)) for h in headers}
    for header in LEAST_FIRST:
        if sum(widths[h] + 1 for h in headers) > console.width and header in headers:
            headers.remove(header)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for header in headers:
        table.add_column(
            header, justify="right" if header in NUMBERS else "left", no_wrap=header != "run", overflow="fold"
        )
    for cells in shown:
        table.add_row(*(Text(cells.get(header, "-")) for header in headers))
    console.print(table)
    for row in rows:
        if row["state"] == "broken":
            console.print(f"{row['name']} is broken: {row['error']}", markup=False, soft_wrap=True)
