"""The `isostep` command: finds the command, turns errors into one line, returns the exit code."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import __version__
from .errors import InputError, IsostepError, of_system

COMMANDS = {
    "train": "train the built-in decoder on real text through one exact update",
    "report": "what happened in a run: its sheet, curves and proof of coverage, from its ledger alone",
    "runs": "a table of all runs below a folder",
    "verify": "check the update against an independent reference, over a grid of layouts",
    "audit": "run a training script and read out what weight every token really had",
    "inspect": "find parts of a model whose result depends on how the update is split",
    "simulate": "a pipeline schedule on paper: how long it takes, where it is idle, what it holds; drawn",
    "explain": "worked pictures of replicas, tokens, batches and pipelines",
    "lab": "the same pictures as local pages: move a number and see what it changes",
}


MAX_PROCS = 64
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line on stderr and exit code 2, and whose flags are never shortened."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {shortened(' '.join(message.split()), 400)}; see `{self.prog} --help`\n")


def positive_int(text: str) -> int:
    """Argument type: an integer of 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {shortened(text)!r}, expected a whole number of 1 or more")
    return value


def process_count(text: str) -> int:
    """Argument type: a number of local workers, at most 64: more do not fit on one machine."""
    value = positive_int(text)
    if value > MAX_PROCS:
        raise argparse.ArgumentTypeError(f"got {shortened(text)!r}, expected at most {MAX_PROCS} local workers")
    return value


def positive_float(text: str) -> float:
    """Argument type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"got {shortened(text)!r}, expected a finite number above 0")
    return value


def json_path(text: str) -> str:
    """Argument type: a path that a document can be written to, or - for stdout. Checked before any work is done."""
    if text != "-" and (not text or Path(text).is_dir() or not os.access(Path(text).parent, os.W_OK)):
        raise argparse.ArgumentTypeError(f"got {shortened(text)!r}, expected a file that can be written")
    return text


def seed_number(text: str) -> int:
    """Argument type: a seed, 0 to 2**63 - 1."""
    if not (text.isascii() and text.isdigit() and int(text[:20]) < 1 << 63 and len(text) < 20):
        raise argparse.ArgumentTypeError(f"got {shortened(text)!r}, expected a whole number from 0 to 2**63 - 1")
    return int(text)


def shortened(text: str, length: int = 60) -> str:
    """A value as an error line can quote it."""
    return text if len(text) <= length else f"{text[:length]}..."


def write_json(path: str | None, document: dict[str, Any]) -> None:
    """Write a document (which has `"schema": 1`) to `path`; nothing if `path` is None, stdout if it is "-".

    Raises InputError where the file cannot be written, IsostepError where the disk is full.
    """
    if path is None:
        return
    text = json.dumps(document, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    write_text("--json", path, text)


def write_text(flag: str, path: str, text: str) -> None:
    """Write a file that `flag` asked for. Raises InputError where it cannot be written, IsostepError on a full disk."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        remedy = f"choose another path ({error.strerror})"
        refused = InputError.of(flag, path, "a file that can be written", remedy)
        raise (IsostepError(str(refused)) if error.errno in NO_ROOM else refused) from None


def build_parser(names: Sequence[str]) -> Parser:
    """The parser of all commands; only the modules of `names` are imported and configured."""
    parser = Parser(prog="isostep", description="One optimizer update, any layout.")
    parser.add_argument("--version", action="version", version=f"isostep {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name in names:
            importlib.import_module(f"isostep.commands.{name}").configure(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 fine, 1 a finding or a failed run, 2 bad usage or input, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names of files and layers may be beyond what a terminal can show
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else torch adds stack traces to what is one line here
    try:
        args = build_parser([a for a in arguments[:1] if a in COMMANDS]).parse_args(arguments)
        return importlib.import_module(f"isostep.commands.{args.command}").run(args)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except IsostepError as error:
        print(f"isostep: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads any more: `... | head`
        return 1
    except OSError as error:
        print(f"isostep: {of_system(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print(f"isostep: {str(stop) or 'interrupted; nothing is left running'}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
