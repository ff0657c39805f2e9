"""The files of a pipeline state that the lab hands out: each is the library's own text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

from ..schedule import csv_file, gantt_svg, trace
from .pipeline_state import Outcome, outcome_of, settings_of
from .view import Values

SVG_WIDTH = 1200
SVG, JSON = "image/svg+xml", "application/json"


def _gantt(outcome: Outcome, values: Values) -> str:
    return gantt_svg.draw(outcome.sim, values["from"] or 0.0, values["to"], SVG_WIDTH)


def _memory(outcome: Outcome, values: Values) -> str:
    start, end = values["from"] or 0.0, values["to"]
    return gantt_svg.memory(outcome.sim, values["memory-limit"], SVG_WIDTH, start=start, end=end)


WRITERS: dict[str, tuple[str, Callable[[Outcome, Values], str]]] = {
    "schedule.csv": ("text/csv", lambda outcome, values: csv_file.text(outcome.sim.schedule)),
    "gantt.svg": (SVG, _gantt),
    "memory.svg": (SVG, _memory),
    "trace.json": (JSON, lambda outcome, values: json.dumps(trace.document(outcome.sim))),
    "simulation.json": (JSON, lambda outcome, values: json.dumps(outcome.sim.document(spans=True))),
}
"""Media type and text of each file, by its name."""


def file_of(name: str, values: Values) -> tuple[str, str, str]:
    """(text, file name, media type) of the first schedule of a state. Raises InputError for what cannot be built."""
    outcome = outcome_of(settings_of(values))
    media_type, write = WRITERS[name]
    given = outcome.settings
    prefix = f"{given.schedule}-{given.stages}-stages-{given.num_microbatches}-microbatches-{_state(outcome, values)}"
    return write(outcome, values), f"{prefix}-{name}", media_type


def _state(outcome: Outcome, values: Values) -> str:
    """8 hexadecimal digits that tell states apart: files of different costs or windows have different names."""
    state = repr((outcome.settings, values["from"] or 0.0, values["to"]))
    return hashlib.sha256(state.encode()).hexdigest()[:8]
