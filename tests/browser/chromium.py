"""A headless Chromium of this machine, looking at a lab, and what it must never see."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
EXECUTABLE = next((path for path in map(shutil.which, NAMES) if path), None)
MISSING = "needs Chromium: apt-get install chromium"
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
DESKTOP: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 360, "height": 740}


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser for several pages."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=EXECUTABLE, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Seen:
    """What a page said and asked for."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    most_at_once: int = 0
    """Requests for results under way at the same time."""


@contextmanager
def looking(browser: Browser, base: str, expect_refusals: bool = False, **options: Any) -> Iterator[tuple[Page, Seen]]:
    """A page of a new context; at its end no error was on its console, and nothing but the lab was asked.

    expect_refusals: the browser's own line about an answer of status 400 is no error.
    """
    context = browser.new_context(**{"viewport": DESKTOP, **options})
    context.set_default_timeout(5000)
    page, seen = context.new_page(), Seen()
    under_way: set[int] = set()

    def begin(request: Any) -> None:
        seen.requests.append(request.url)
        if "fragment=1" in request.url:
            under_way.add(id(request))
            seen.most_at_once = max(seen.most_at_once, len(under_way))

    def note(message: Any) -> None:
        refusal = expect_refusals and "status of 400" in message.text
        if message.type in ("error", "warning") and not refusal:
            seen.errors.append(message.text)

    page.on("request", begin)
    page.on("requestfinished", lambda request: under_way.discard(id(request)))
    page.on("console", note)
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    try:
        yield page, seen
        foreign = [url for url in seen.requests if not url.startswith(f"{base}/")]
        assert not seen.errors, seen.errors
        assert not foreign, foreign
    finally:
        context.close()
