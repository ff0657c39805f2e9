"""The worked examples that the lab hands out, as they stand in the clone or in the installed package."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "worked"


@cache
def worked_files() -> dict[str, str]:
    """Each file's name and the first line of its docstring, by name."""
    return {path.name: _first_line(path) for path in sorted(FOLDER.glob("*.py"))}


def worked_text(name: str) -> str | None:
    """The text of one worked example; None where there is none of that name."""
    return (FOLDER / name).read_text(encoding="utf-8") if name in worked_files() else None


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return (docstring or path.name).splitlines()[0]
