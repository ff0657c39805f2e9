"""The pages, their addresses, and what each answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import lru_cache

from markupsafe import Markup
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ..errors import InputError
from ..schedule.gantt_svg import STYLE
from . import batch, pipeline, replicas, tokens
from .files import WRITERS, file_of
from .guard import Guard, error_page
from .query import FRAGMENT, texts_of, values_of
from .view import FOLDER, View, render
from .worked_files import worked_files, worked_text

VIEWS = (replicas.VIEW, tokens.VIEW, batch.VIEW, pipeline.VIEW)
CACHED = 48
"""Answers kept. The largest is about a megabyte."""
AT_ONCE = 1
"""Answers computed at the same time: more of them share one interpreter, and all come late."""

Texts = tuple[tuple[str, str], ...]
"""Names and texts of a query, sorted: equal for equal states."""


def build_app() -> Guard:
    """The lab as an ASGI application."""
    slots = asyncio.Semaphore(AT_ONCE)
    app = Starlette(
        routes=[
            Route("/", _index),
            *(Route(f"/{view.name}", _endpoint(view, slots)) for view in VIEWS),
            *(Route(f"/pipeline/{name}", _file_endpoint(name, slots)) for name in WRITERS),
            Route("/worked/{name}", _worked),
            Route("/gantt.css", _gantt_style),
            Mount("/static", StaticFiles(directory=FOLDER / "static")),
        ],
        exception_handlers={InputError: _refused, HTTPException: _http_error, Exception: _fault},
    )
    app.router.redirect_slashes = False
    return Guard(app)


def _endpoint(view: View, slots: asyncio.Semaphore) -> Callable[[Request], Awaitable[Response]]:
    """Answers of a view, computed beside the event loop, first come first served."""

    async def endpoint(request: Request) -> Response:
        async with slots:
            return await run_in_threadpool(answer, view, request.scope["query_string"])

    return endpoint


def _file_endpoint(name: str, slots: asyncio.Semaphore) -> Callable[[Request], Awaitable[Response]]:
    """A file of a pipeline state."""

    def write(query: bytes) -> Response:
        return download(*file_of(name, values_of(pipeline.VIEW.fields, texts_of(query))))

    async def endpoint(request: Request) -> Response:
        async with slots:
            return await run_in_threadpool(write, request.scope["query_string"])

    return endpoint


def answer(view: View, query: bytes) -> Response:
    """The page of one state, or its result alone; status 400 with one sentence where the state is refused."""
    texts, alone = {}, b"fragment=1" in query.split(b"&")
    try:
        texts = texts_of(query)
        if texts.pop(FRAGMENT, "1") != "1":
            raise InputError.of(FRAGMENT, "another value", "1", "remove it")
        status, fragment = 200, fragment_of(view.name, tuple(sorted(texts.items())))
    except InputError as error:
        status, fragment = 400, render("refused.html", sentence=str(error))
    return Response(fragment if alone else page_of(view, texts, fragment), status, media_type="text/html")


@lru_cache(maxsize=CACHED)
def fragment_of(name: str, texts: Texts) -> str:
    """The result of one state as HTML. Raises InputError."""
    view = next(view for view in VIEWS if view.name == name)
    given = dict(texts)
    values = values_of(view.fields, given)
    return render(f"{name}_result.html", **view.answer(values, given))


def page_of(view: View, texts: dict[str, str], fragment: str) -> str:
    """The whole page around a result, its controls filled with the texts of the query."""
    return render(
        "view.html",
        here=view.name,
        title=view.title,
        lead=view.lead,
        views=VIEWS,
        fields={field.name: field for field in view.fields},
        texts={field.name: field.text(texts) for field in view.fields},
        presets=[(text, f"/{view.name}{query}") for text, query in view.presets],
        not_shown=view.not_shown,
        fragment=Markup(fragment),  # rendered by this package: everything in it is escaped
        **view.form(texts),
    )


async def _index(request: Request) -> Response:
    values_of((), texts_of(request.scope["query_string"]))
    text = render("index.html", title="Views", views=VIEWS, here=None, worked=worked_files().items())
    return Response(text, media_type="text/html")


async def _gantt_style(request: Request) -> Response:
    return Response(STYLE, media_type="text/css")


async def _worked(request: Request) -> Response:
    values_of((), texts_of(request.scope["query_string"]))
    name = request.path_params["name"]
    text = worked_text(name)
    if text is None:
        raise HTTPException(404)
    return download(text, name, "text/x-python")


def download(text: str, name: str, media_type: str) -> Response:
    """A file to be saved. name: plain letters, digits, dashes and dots."""
    return Response(text, headers={"Content-Disposition": f'attachment; filename="{name}"'}, media_type=media_type)


async def _refused(request: Request, error: Exception) -> Response:
    return error_page(400, str(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = f"{error.detail}: nothing is at this address; the views are in the head of this page."
    return error_page(error.status_code, sentence, dict(error.headers or {}))


async def _fault(request: Request, error: Exception) -> Response:
    return error_page(500, "The lab has a fault: its own terminal says which. Please report it.")
