"""What the pictures of a simulation share: words, the window of time, the ranks shown, steps of an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ..errors import InputError
from ..explain.draw import number
from ..units import count

if TYPE_CHECKING:
    from .ir import Schedule
    from .measured import Measured
    from .simulate import Simulation, Span

WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
"""Each op in words, in the order of legends."""


Timeline: TypeAlias = "Simulation | Measured"
"""What can be drawn, in one unit of time, whatever it is."""


def heading(sim: Timeline) -> str:
    """Which schedule over what: 1f1b, 4 stages, 8 microbatches. Of one from a file, the name of the file."""
    schedule = sim.schedule
    file = "".join(letter if letter.isprintable() else "?" for letter in Path(schedule.name).name)
    name = file if len(file) <= 40 else f"{file[:37]}..."
    chunks = f" x {count(schedule.chunks, 'chunk')}" if schedule.chunks > 1 else ""
    sizes = f"{count(schedule.stages, 'stage')}{chunks}, {count(schedule.num_microbatches, 'microbatch')}"
    return f"{name}, {sizes}"


def percent(share: float) -> str:
    """A share of one: 72.7 %."""
    return f"{100 * share:.1f} %"


def peaks(held: Sequence[float]) -> str:
    """One number where all ranks agree, one per rank where they fit 16 characters, else the least and the most."""
    each = " ".join(map(number, held[:9]))
    if len(set(held)) == 1:
        return number(held[0])
    return each if len(held) <= 8 and len(each) <= 16 else f"{number(min(held))} to {number(max(held))}"


def unit(sim: Timeline) -> str:
    """What the numbers of `peak_memory` and `in_flight` count, as far as the costs tell."""
    each = set(sim.costs.activation)
    if sim.schedule.chunks > 1 and each == {1.0}:
        return "chunk activations"
    return "stage activations" if each == {1 / sim.schedule.chunks} else "held"


def local_chunks(schedule: Schedule) -> tuple[int, ...]:
    """For each stage index, how many chunks of its rank come before it in the model: 0 .. v - 1."""
    seen = [0] * schedule.stages
    chunks = []
    for rank in schedule.rank_of:
        chunks.append(seen[rank])
        seen[rank] += 1
    return tuple(chunks)


def shown_ranks(stages: int, most: int) -> list[int]:
    """All ranks, or the first and last ones where there are more than `most` (an even number)."""
    return [rank for rank in range(stages) if stages <= most or rank < most // 2 or rank >= stages - most // 2]


SHORTEST = 1e-9
"""The shortest window that is drawn, as a share of the makespan."""


def window(sim: Timeline, start: float, end: float | None) -> tuple[float, float]:
    """The part of the time to draw, in the unit of the costs; `end` None or beyond the makespan is the makespan.

    Raises InputError where it is empty or next to it, negative, not a number, or begins after the makespan.
    """
    if not (start == 0 or 0 < start < sim.makespan):
        raise InputError.of("from", start, f"a time of 0 or more, before {number(sim.makespan)}", "choose another")
    if end is None:
        return start, sim.makespan
    if not end > start:
        raise InputError.of("to", end, f"a time after {number(start)}, where the window begins", "choose another")
    end = min(end, sim.makespan)
    if end - start < sim.makespan * SHORTEST:
        expected = f"a window of at least {number(sim.makespan * SHORTEST)}"
        raise InputError.of("to", end, expected, "choose a later time")
    return start, end


def first_spans(sim: Timeline, start: float, end: float, most: int) -> tuple[list[Span], float]:
    """At most `most` spans of a window, and the end of the window that they fill: the first part where they are more.

    The work done grows with `most` and not with the number of actions in the window.
    """
    length = end - start
    guess = sim.makespan * 2 * most / sim.schedule.size
    while guess < length and len(sim.spans(start, start + guess)) <= most:
        guess *= 2
    spans = sim.spans(start, start + min(guess, length) if length else math.inf)
    if len(spans) <= most:
        return spans, end
    spans.sort(key=lambda span: (span.start, span.rank))
    last = spans[most].start
    return [span for span in spans[:most] if span.start < last] or spans[:most], max(last, start)


def axis_step(length: float, slots: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that goes into `length` at most `slots` times."""
    least = length / max(slots, 1.0)
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10, 20) if step * power >= least * (1 - 1e-9))


def axis_times(start: float, end: float, step: float) -> list[float]:
    """The multiples of `step` in a window."""
    first, last = math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9)
    return [index * step for index in range(first, last + 1)]
