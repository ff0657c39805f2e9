"""What tests do with a page of the lab, and read from it."""

from __future__ import annotations

from urllib.parse import urlsplit

from playwright.sync_api import Page, expect

from lab_server import APP, answer, numbers


def shown(page: Page) -> dict[str, float]:
    """The numbers of the result on the page."""
    return numbers(page.locator("#result").inner_html())


def expected(page: Page) -> dict[str, float]:
    """The numbers of the state in the address."""
    address = urlsplit(page.url)
    got = answer(APP, address.path, address.query)
    assert got.status == 200, got.text[-900:]
    return numbers(got.text)


def unfold(page: Page) -> None:
    """Open the controls that are rarely used."""
    page.locator("details").evaluate_all("folds => folds.forEach(fold => { fold.open = true; })")


def set_to(page: Page, name: str, text: str) -> None:
    control = page.locator(f'[name="{name}"]')
    if control.get_attribute("type") == "checkbox":
        control.check()
    elif control.evaluate("control => control.tagName") == "SELECT":
        control.select_option(text)
    else:
        control.fill(text)


def settle(page: Page) -> None:
    """Wait until the last state asked for is on the page."""
    expect(page.locator("form[data-asking]")).to_have_count(0)
