"""What every request must satisfy, and the headers that every answer carries."""

from __future__ import annotations

import re

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .query import MAX_QUERY
from .view import render

HOST = re.compile(rb"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
"""Only these names reach the lab: a page of another name that resolves to this machine does not (DNS rebinding)."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Refuses foreign hosts, methods that change something and long queries; adds HEADERS to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise ValueError(f"got {scope['type']!r}, expected http; the lab speaks nothing else")

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await (_refused(scope) or self.app)(scope, receive, send_guarded)


def _refused(scope: Scope) -> Response | None:
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if len(hosts) != 1 or not HOST.fullmatch(hosts[0]):
        return error_page(400, "Host: got another name, expected 127.0.0.1 or localhost; open the address it printed")
    if scope["method"] not in ("GET", "HEAD"):
        sentence = f"method: got {scope['method'][:20]!r}, expected GET or HEAD; nothing here can be changed"
        return error_page(405, sentence, {"Allow": "GET, HEAD"})
    if len(scope["query_string"]) > MAX_QUERY:
        length = len(scope["query_string"])
        return error_page(414, f"query: got {length} bytes, expected at most {MAX_QUERY}; shorten it")
    return None


TITLES = {400: "That cannot be answered", 404: "No such page", 405: "Only to be read", 414: "Too long", 500: "A fault"}


def error_page(status: int, sentence: str, headers: dict[str, str] | None = None) -> Response:
    """A page of the lab that says in one sentence what is wrong."""
    from .app import VIEWS

    title = TITLES.get(status, "That cannot be answered")
    text = render("error.html", title=title, sentence=sentence, views=VIEWS, here=None)
    return Response(text, status, headers, "text/html")
