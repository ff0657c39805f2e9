"""A lab and a browser for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from lab_server import Running, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def lab() -> Iterator[Running]:
    with running() as lab:
        yield lab


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from chromium import chromium  # needs playwright, which is not always there

    with chromium() as browser:
        yield browser
