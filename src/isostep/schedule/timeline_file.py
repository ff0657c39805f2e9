"""The file of measured timelines of a run, `timeline.jsonl`: a line per start of the run, a line per recorded update.

Times are seconds, those of an update from its first start on rank 0's clock; ranks are those of the world, replica *
P + stage rank. A last line without its newline, as a killed run leaves it, is ignored.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..errors import InputError
from .costs import Costs
from .generate import generate
from .ir import Schedule
from .layers import Layer
from .measured import Comparison, Handover, Measured, chunk_costs
from .simulate import Simulation, Span, simulate

NAME = "timeline.jsonl"
"""Of the file in a run directory."""
SCHEMA = 1
MS = 1000.0
"""Milliseconds of a second: comparisons are in milliseconds."""
REMEDY = "restore the file, or read it with the isostep version that wrote it"


@dataclass(frozen=True)
class Start:
    """What holds for all updates of one start of a run: the pipeline, and what its layers were measured to cost."""

    stages: int
    """P."""
    replicas: int
    """D."""
    schedule: str
    chunks: int
    """v, chunks of a rank."""
    boundaries: tuple[int, ...]
    """Chunk k has the layers boundaries[k] to boundaries[k + 1] - 1."""
    recomputes: tuple[bool, ...]
    """Of each stage rank: whether it recomputes activations."""
    tokens: int
    """Of the microbatch that the layers and the transfer were measured with, padding counted."""
    transfer_seconds: float
    """For what such a microbatch hands from one rank to the next."""
    source: str
    """How the layers were measured."""
    layers: tuple[Layer, ...]
    """Times in seconds."""
    kept_bytes: tuple[float, ...]
    """Of each layer: what is kept where its activations are recomputed."""

    def __post_init__(self) -> None:
        sizes = (len(self.boundaries) - 1, self.boundaries[-1:], len(self.kept_bytes), len(self.recomputes))
        chunks, layers = self.stages * self.chunks, len(self.layers)
        if sizes != (chunks, (layers,), layers, self.stages) or not self.tokens > 0:
            expected = f"{chunks} chunks over {layers} layers on {self.stages} stage ranks, and tokens"
            raise InputError.of("start", sizes, expected, REMEDY)

    def order(self, num_microbatches: int) -> Schedule:
        """The schedule of one replica's microbatches, filler included."""
        return generate(self.schedule, self.stages, num_microbatches, self.chunks)

    def predicted(self, num_microbatches: int, tokens: float) -> Simulation:
        """The simulation in milliseconds, and bytes, for microbatches of so many tokens: costs grow in proportion.

        torch runs nothing where the first chunk's backward for its inputs stands: its weight backward is all of it.
        """
        schedule, scale = self.order(num_microbatches), tokens / self.tokens
        costs = chunk_costs(self.layers, self.boundaries, scale * MS)
        costs["weight_grad"][0] += costs["input_grad"][0]
        costs["input_grad"][0] = 0.0
        held, kept = (
            [math.fsum(row[begin:end]) * scale for begin, end in pairwise(self.boundaries)]
            for row in ([layer.activation_bytes or 0.0 for layer in self.layers], self.kept_bytes)
        )
        shares = [
            min(1.0, k / h) if self.recomputes[rank] and h else None
            for rank, h, k in zip(schedule.rank_of, held, kept, strict=True)
        ]
        return simulate(
            schedule,
            Costs.of(
                schedule,
                costs["forward"],
                costs["input_grad"],
                costs["weight_grad"],
                self.transfer_seconds * scale * MS,
                activation=held,
                recompute=shares if any(self.recomputes) else None,
            ),
        )


@dataclass(frozen=True)
class Update:
    """One recorded update of all replicas."""

    attempted: int
    num_microbatches: tuple[int, ...]
    """Of each replica, filler included; 0 where it had nothing to do."""
    tokens_per_microbatch: tuple[float, ...]
    """The mean of each replica, padding and filler counted."""
    spans: tuple[Span, ...]
    transfers: tuple[Handover, ...]

    def __post_init__(self) -> None:
        if len(self.num_microbatches) != len(self.tokens_per_microbatch):
            got, expected = len(self.tokens_per_microbatch), f"{len(self.num_microbatches)}, one for each replica"
            raise InputError.of("tokens_per_microbatch", got, expected, REMEDY)


@dataclass(frozen=True)
class Recorded:
    """The recorded updates of one start."""

    start: Start
    updates: tuple[Update, ...]

    def typical(self) -> tuple[Update, dict[int, Comparison]]:
        """The update with the median makespan, the lower one of two, of those with the most frequent number of
        microbatches; and its `comparisons`. Raises InputError for spans that no such run has.
        """
        most, _ = Counter(update.num_microbatches for update in self.updates).most_common(1)[0]
        both = [(u, comparisons(self.start, u)) for u in self.updates if u.num_microbatches == most]
        middle = statistics.median_low([slowest(compared).measured.makespan for _, compared in both])
        return next(pair for pair in both if slowest(pair[1]).measured.makespan == middle)


def comparisons(start: Start, update: Update) -> dict[int, Comparison]:
    """Prediction and measurement, in milliseconds, of each replica that had something to do.

    Raises InputError where the spans are not those of the schedule.
    """
    found = {}
    for replica, num_microbatches in enumerate(update.num_microbatches):
        if num_microbatches:
            first = replica * start.stages
            own = range(first, first + start.stages)
            measured = Measured.of(
                start.order(num_microbatches),
                (s._replace(rank=s.rank - first) for s in update.spans if s.rank in own),
                (
                    h._replace(source=h.source - first, target=h.target - first)
                    for h in update.transfers
                    if h.source in own
                ),
                MS,
            )
            predicted = start.predicted(num_microbatches, update.tokens_per_microbatch[replica])
            found[replica] = Comparison(predicted, measured)
    return found


def slowest(compared: dict[int, Comparison]) -> Comparison:
    """Of the replica that took longest; the others wait for it."""
    return max(compared.values(), key=lambda each: each.measured.makespan)


@dataclass(frozen=True)
class Line:
    """One line of the file: a start or an update."""

    __pydantic_config__: ClassVar = ConfigDict(allow_inf_nan=False, strict=True, extra="forbid")

    schema: Literal[1]
    start: Start | None = None
    update: Update | None = None


def line(what: Start | Update) -> str:
    """A start or an update as a line of the file; times of an update to a tenth of a microsecond."""

    def rounded(row: Sequence[Any]) -> list[Any]:
        return [round(value, 7) if isinstance(value, float) else value for value in row]

    if isinstance(what, Start):
        return json.dumps({"schema": SCHEMA, "start": asdict(what)}) + "\n"
    rows = {name: [rounded(row) for row in getattr(what, name)] for name in ("spans", "transfers")}
    document = {field.name: rows.get(field.name, getattr(what, field.name)) for field in fields(what)}
    return json.dumps({"schema": SCHEMA, "update": document}) + "\n"


def cut_torn_line(path: Path) -> None:
    """Cut off what a killed run left behind the last newline, so that lines can be added."""
    if path.exists():
        with open(path, "r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def read(path: Path) -> list[Recorded]:
    """The starts of a run that recorded updates, in order.

    Raises InputError, which names the line and the field, for a file that cannot be read or that is not such a file.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise InputError.of("timeline", str(path), f"a file that can be read ({error.strerror})", REMEDY) from None
    found: list[Recorded] = []
    for number, text in enumerate(lines, start=1):
        where = f"{path} line {number}"
        try:
            each = LINES.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, (where, *first["loc"])))
            got = text.decode(errors="replace") if first["input"] is text else str(first["input"])
            raise InputError.of(place, got[:60], f"schema {SCHEMA}: {first['msg']}", REMEDY) from None
        if each.start is not None:
            found.append(Recorded(each.start, ()))
        elif each.update is not None and found:
            found[-1] = replace(found[-1], updates=(*found[-1].updates, each.update))
        else:
            raise InputError.of(where, "no start of a run", "one before the first update", REMEDY)
    return [each for each in found if each.updates]


LINES = TypeAdapter(Line)
