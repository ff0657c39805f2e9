"""The lab as a server on this machine alone."""

from __future__ import annotations

import errno
import signal
import socket
import sys
import webbrowser

import uvicorn

from ..errors import InputError
from .app import build_app

HOST = "127.0.0.1"


class Server(uvicorn.Server):
    """Says where it listens, once it does."""

    address: str
    open_browser: bool

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then print the address."""
        await super().startup(sockets)
        print(f"isostep lab: {self.address} (Ctrl-C ends it)", flush=True)
        if self.open_browser:
            webbrowser.open(self.address)


def serve(port: int, open_browser: bool) -> int:
    """Serve until a signal ends it. Returns 0 after SIGTERM; raises KeyboardInterrupt after Ctrl-C.

    Raises InputError where the port is taken or may not be used. Port 0 takes a free one.
    """
    listener = _listener(port)
    config = uvicorn.Config(
        build_app(),
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    server = Server(config)
    server.address = f"http://{HOST}:{listener.getsockname()[1]}"
    server.open_browser = open_browser
    signal.signal(signal.SIGTERM, lambda *_: None)  # the server hears it first, and raises it again when it has ended
    server.run([listener])
    sys.stdout.flush()
    return 0


def _listener(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        free = (
            "a port that is free" if error.errno == errno.EADDRINUSE else f"a port that can be used ({error.strerror})"
        )
        raise InputError.of("--port", port, free, "choose another, or 0 for any free one") from None
    return listener
