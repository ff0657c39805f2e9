"""`isostep lab`: local pages to think with, computed by the functions behind `explain` and `simulate`."""

from __future__ import annotations

import argparse

from ..cli import shortened
from ..errors import InputError

EPILOG = """examples:
  isostep lab
  isostep lab --port 0 --open

Serves pages on 127.0.0.1 only: replicas, tokens, batch and pipeline. Every state is a link. Ctrl-C ends it.
Needs the extra `lab`: pip install "PATH_OF_THIS_CLONE[lab]".
"""
PORT = 8642


def port_number(text: str) -> int:
    """Argument type: a port, 0 to 65535."""
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"got {shortened(text)!r}, expected a port from 0 to 65535")
    return int(text)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `isostep lab`."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--port", type=port_number, default=PORT, help=f"where to listen; 0 takes a free port (default {PORT})"
    )
    parser.add_argument("--open", action="store_true", help="open the first page in your browser")


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM. Raises InputError where the port is taken or the extra is missing."""
    try:
        from ..lab.server import serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("starlette", "uvicorn", "jinja2", "anyio", "h11"):
            raise
        remedy = 'run: pip install "PATH_OF_THIS_CLONE[lab]"'
        raise InputError.of("lab", f"no module {error.name}", "the extra `lab`", remedy) from None
    return serve(args.port, args.open)
