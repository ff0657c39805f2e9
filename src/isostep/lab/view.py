"""What a view is, and how its answer becomes HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..explain import draw
from .fields import Field

FOLDER = Path(__file__).parent
MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
NOT_SHOWN = "Not shown: speed, quality, optimizer state, the cost of communication."

Values = Mapping[str, Any]
"""The parsed value of each field of a view."""


@dataclass(frozen=True)
class View:
    """One page: its controls, and the function that answers a state."""

    name: str
    """Its path, and the first word of its templates."""
    title: str
    lead: str
    """The sentences under the title."""
    summary: str
    """The sentence on the first page."""
    fields: tuple[Field, ...]
    answer: Callable[[Values, Mapping[str, str]], dict[str, Any]]
    """Context of the result's template, from the values and the texts of the query. Raises InputError."""
    presets: tuple[tuple[str, str], ...] = ()
    """Links to states worth a look: text and query string."""
    not_shown: str = NOT_SHOWN
    form: Callable[[Mapping[str, str]], dict[str, Any]] = lambda texts: {}
    """More context for the form's template."""


def number(value: float) -> str:
    """A number as a reader sees it: 6 digits, thousands apart, a true minus sign."""
    text = f"{value:,}" if isinstance(value, int) and abs(value) < 10**15 else draw.number(float(value))
    return text.replace("-", MINUS)


def plain(value: float) -> str:
    """A number as an attribute of a control."""
    return f"{value:.15g}"


def short(value: float | Fraction) -> str:
    """A number of at most 4 digits."""
    return draw.decimal(value).replace("-", MINUS)


def machine(value: float | Fraction) -> str:
    """A number as a program reads it, all digits."""
    return repr(float(value)) if isinstance(value, Fraction) else repr(value)


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        auto_reload=False,
    )
    environment.filters.update(num=number, plain=plain, short=short, machine=machine, fraction=draw.fraction)
    return environment


ENVIRONMENT = _environment()


def render(template: str, **context: Any) -> str:
    """A template of this package, filled in. Everything but Markup is escaped."""
    return ENVIRONMENT.get_template(template).render(context)
