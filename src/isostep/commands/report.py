"""`isostep report`: what happened in a run, from its ledger and the timeline that it names."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..cli import json_path, write_json

EPILOG = """example:
  isostep report runs/first

Prints the sheet of a run with pictures of its curves, and proves again that every example was used exactly once.
Works for runs that are under way, were stopped or were killed. Of a run with --timeline, it draws when each stage of
the pipeline worked, predicted and measured. Reads the ledger and the timeline that it names, nothing else.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `isostep report`."""
    parser.epilog = EPILOG
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the sheet here, - for standard output")


def run(args: argparse.Namespace) -> int:
    """Report one run. Returns 0, or 1 where coverage is not proved. Raises InputError for a directory without one."""
    from rich.console import Console

    from ..ledger.sheet import read_run, sheet
    from ..report.plot import ASCII
    from ..report.text import report_text
    from ..report.timeline import Timeline, timeline_of

    events = read_run(args.run_dir)
    document = sheet(events)
    timeline = timeline_of(args.run_dir, events)
    told = timeline.document() if isinstance(timeline, Timeline) else timeline and {"error": str(timeline)}
    write_json(args.json, document | {"timeline": told})
    if args.json != "-":
        console = Console()
        text = report_text(document, events, console.width, timeline)
        print(text.translate(ASCII) if console.options.ascii_only else text)
    return 0 if document["coverage"]["proved"] else 1
