from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

HEADER = ("library", "version", "recipe", "A", "D", "weight x tokens", "verdict", "kinds found")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", metavar="FILE", help="write what the audits found as a Markdown table")


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Iterator[list[tuple[str, ...]]]:
    """Rows for --table FILE."""
    rows: list[tuple[str, ...]] = []
    yield rows
    path = request.config.getoption("--table")
    if path and rows:
        lines = [HEADER, tuple("---" for _ in HEADER), *rows]
        Path(path).write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
