"""`isostep audit`: somebody's training script, unchanged, for a few updates, and what every token weighed in them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..audit.document import WEIGHTINGS, Report, exit_code
from ..cli import json_path, positive_float, positive_int, process_count, write_json
from ..errors import InputError, IsostepError

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

_KEPT: list[socket.socket] = []
"""Ends that signals are written to for as long as this process lives."""


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
    out = _stdout_kept() if args.json == "-" else None

    def show(report: Report) -> None:
        if os.environ.get("RANK", "0") == "0":
            _show(args, report.document(), out)

    report = _audit(args, show)
    show(report)
    _leave(report.exit_code)
    return report.exit_code


def _audit(args: argparse.Namespace, finish: Any) -> Report:
    from ..audit.run import Options, Run

    options = Options(args.updates, args.weighting, args.timeout, args.loss)
    run = Run(options, finish)
    if FOLDER in os.environ:
        _hear_sigterm(run.report_alone)
    return run.run(args.script, args.arguments)


def _stdout_kept() -> Any:
    """The real stdout; what anybody writes to it from now on goes to stderr."""
    sys.stdout.flush()
    kept = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return kept


def _hear_sigterm(then: Any) -> None:
    """Call `then` in a thread when the launcher ends this process because another one is gone, wherever it waits."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        while (byte := ours.recv(1)) and byte[0] != signal.SIGTERM:
            pass
        if byte:
            then()

    threading.Thread(target=listen, daemon=True).start()
    _KEPT.append(theirs)


def _leave(code: int) -> None:
    """End, though the script may have left threads that nobody will stop."""
    sys.stdout.flush()
    sys.stderr.flush()
    if any(t is not threading.main_thread() and not t.daemon for t in threading.enumerate()):
        os._exit(code)


def _start(args: argparse.Namespace) -> int:
    """Run this command again in several processes; the first of them leaves the report in a folder."""
    from ..distributed.launch import run_processes

    with tempfile.TemporaryDirectory(prefix="isostep-") as folder:
        os.environ[FOLDER] = folder
        report = Path(folder, "report")
        try:
            run_processes(args.procs, ["-m", "isostep", "audit", *_options(args)], Path(folder))
        except IsostepError:
            if report.exists():
                _show(args, json.loads(report.read_text()))
            raise
        return _show(args, json.loads(report.read_text()))


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
            (folder / "report.part").write_text(json.dumps(report.document()))
            (folder / "report.part").rename(folder / "report")

    def leave_and_end(report: Report) -> None:
        from ..audit.run import leave_at_once

        leave(report)
        leave_at_once(0)  # the report says what is wrong; a failed worker would be an error of its own

    if args.json == "-":
        _stdout_kept()
    try:
        report = _audit(args, leave_and_end)
    except KeyboardInterrupt:
        os._exit(130)
    leave(report)
    _leave(0)
    return 0


def _show(args: argparse.Namespace, document: dict[str, Any], out: Any = None) -> int:
    from rich.console import Console

    from ..audit.text import report_text

    sys.stdout.flush()
    if out is not None:
        out.write(json.dumps(document, indent=2) + "\n")
        out.flush()
    else:
        write_json(args.json, document)
    if args.json != "-":
        print(report_text(document, min(100, max(80, Console().width))))
    return exit_code(document["verdict"], len(document["findings"]))
