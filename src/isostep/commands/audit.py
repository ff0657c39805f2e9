"""`isostep audit`: somebody's training script, unchanged, for a few updates, and what every token weighed in them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..audit.document import WEIGHTINGS, Report, exit_code
from ..cli import json_path, positive_float, positive_int, process_count, write_json
from ..errors import InputError

EPILOG = """examples:
  isostep audit train.py --its --args
  isostep audit --procs 2 train.py
  torchrun --nproc-per-node 2 -m isostep audit train.py
  isostep audit --symptom

Runs the script as it is, stops it after a few updates, and prints the weight that every supervised token had in the
gradient that the optimizer applied, over all ranks, beside the weight that the script's own loss declares. What is
wrong is named, with the lines that mend it. Options go before the script; everything after it is the script's.
Exit code 0: nothing found. 1: something found, or the script failed. 3: not observed, and why.
"""

FOLDER = "ISOSTEP_AUDIT_FOLDER"
"""Where workers that this command has started leave their report."""


class _Symptoms(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from ..audit.symptoms import symptoms_text

        print(symptoms_text())
        parser.exit()


def updates_number(text: str) -> int | None:
    """Argument type: a number of updates, or None for all."""
    return None if text == "all" else positive_int(text)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `isostep audit`."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--symptom", action=_Symptoms, nargs=0, help="the complaints people come with, and their causes"
    )
    parser.add_argument("--procs", type=process_count, default=1, help="start that many workers (default 1)")
    parser.add_argument(
        "--updates", type=updates_number, default=4, metavar="K|all",
        help="stop after K updates; all runs the script to its end (default 4)",
    )  # fmt: skip
    parser.add_argument(
        "--weighting", choices=WEIGHTINGS, default="declared",
        help="what should weigh the same: what the loss declares (default), each token, example or microbatch",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=positive_float, default=600.0, metavar="S", help="seconds the script may take (default 600)"
    )
    parser.add_argument(
        "--loss", metavar="MODULE:FUNCTION",
        help="a function of yours that computes the loss, where torch's own do not (a fused kernel, a custom one)",
    )  # fmt: skip
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the report here, - for standard output")
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Audit one script. Returns the report's exit code. Raises InputError for a script that cannot be read."""
    if not args.script.is_file() or not os.access(args.script, os.R_OK):
        raise InputError.of("SCRIPT", str(args.script), "a Python file that can be read", "give its path")
    launched = "RANK" in os.environ
    if args.procs > 1 and not launched:
        return _start(args)
    if FOLDER in os.environ:
        return _work(args, Path(os.environ[FOLDER]))
    report = _audit(args, lambda report: _show(args, report.document()))
    return _show(args, report.document()) if os.environ.get("RANK", "0") == "0" else report.exit_code


def _audit(args: argparse.Namespace, finish: Any) -> Report:
    from ..audit.run import Options, Run

    options = Options(args.updates, args.weighting, args.timeout, args.loss)
    quiet = contextlib.redirect_stdout(sys.stderr) if args.json == "-" else contextlib.nullcontext()
    with quiet:
        return Run(options, finish).run(args.script, args.arguments)


def _start(args: argparse.Namespace) -> int:
    """Run this command again in several processes; the first of them leaves the report in a folder."""
    from ..distributed.launch import run_processes

    with tempfile.TemporaryDirectory(prefix="isostep-") as folder:
        os.environ[FOLDER] = folder
        run_processes(args.procs, ["-m", "isostep", "audit", *_options(args)], Path(folder))
        return _show(args, json.loads(Path(folder, "report.json").read_text()))


def _options(args: argparse.Namespace) -> Sequence[str]:
    updates = "all" if args.updates is None else str(args.updates)
    json_option = ["--json", "-"] if args.json == "-" else []
    loss_option = [] if args.loss is None else ["--loss", args.loss]
    return [
        "--updates", updates, "--weighting", args.weighting, "--timeout", str(args.timeout), *json_option, *loss_option,
        str(args.script), *args.arguments,
    ]  # fmt: skip


def _work(args: argparse.Namespace, folder: Path) -> int:
    """One of the processes that this command has started."""
    from ..distributed.launch import say_started

    say_started(folder)

    def leave(report: Report) -> None:
        if os.environ["RANK"] == "0":
            (folder / "report.json").write_text(json.dumps(report.document()))

    leave(_audit(args, leave))
    return 0


def _show(args: argparse.Namespace, document: dict[str, Any]) -> int:
    from rich.console import Console

    from ..audit.text import report_text

    sys.stdout.flush()
    write_json(args.json, document)
    if args.json != "-":
        print(report_text(document, min(100, max(80, Console().width))))
    return exit_code(document["verdict"], len(document["findings"]))
