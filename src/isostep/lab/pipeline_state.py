"""One state of the view *Pipeline*: which schedules, under which costs; simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..errors import InputError
from ..schedule import closed_form, search
from ..schedule.costs import Costs
from ..schedule.generate import NAMES, SCHEDULES, generate
from ..schedule.ir import Schedule
from ..schedule.simulate import Simulation, simulate
from ..units import count
from .view import Values

MAX_WORK = 5_000
"""Stages x chunks x microbatches of one state: its slowest answer takes some tenths of a second."""
MAX_SEARCHED = 192
"""Stages x microbatches of a state that is searched, for the same reason."""
AUTO = "auto"
SCHEDULE_NAMES = (*NAMES, AUTO)
"""What the page offers."""


@dataclass(frozen=True)
class Settings:
    """What one simulation is made of. Costs are those of a whole stage; a chunk has 1 / v of them."""

    schedule: str
    stages: int
    num_microbatches: int
    chunks: int | None
    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    transfer: float
    recompute: bool
    forward_only: bool
    memory_limit: int | None = None
    """What a search must keep to; others are only judged by it."""

    @property
    def costs(self) -> dict[str, Any]:
        """The arguments of `Costs.of_stages`."""
        return {
            "forward": self.forward,
            "input_grad": self.input_grad,
            "weight_grad": self.weight_grad,
            "transfer": self.transfer,
            "recompute": 0.0 if self.recompute else None,
        }


@dataclass(frozen=True)
class Outcome:
    """A simulation, and what its formula says."""

    settings: Settings
    sim: Simulation
    note: str = ""
    """Where a searched order comes from."""

    @property
    def chunks(self) -> int:
        """v, as the schedule has it."""
        return self.sim.schedule.chunks

    @property
    def peak(self) -> float:
        """The most that a rank holds, in activations of a whole stage."""
        return max(self.sim.peak_memory)

    @property
    def closed_form(self) -> float | None:
        """Busy share by its formula; None where costs differ, transfers cost, or no formula is known."""
        given = self.settings
        if given.transfer or any(len(set(c)) > 1 for c in (given.forward, given.input_grad, given.weight_grad)):
            return None
        f, b, w = (costs[0] / self.chunks for costs in (given.forward, given.input_grad, given.weight_grad))
        return closed_form.busy_share(
            given.schedule, given.stages, given.num_microbatches, self.chunks, f, b + f if given.recompute else b, w,
            given.forward_only,
        )  # fmt: skip


def settings_of(values: Values) -> Settings:
    """The first schedule of a state."""
    return Settings(
        values["schedule"], values["stages"], values["microbatches"], values["chunks"], values["forward"],
        values["input-grad"], values["weight-grad"], values["transfer"], values["recompute"], values["forward-only"],
        values["memory-limit"],
    )  # fmt: skip


def compared(first: Settings, name: str) -> Settings:
    """The same under another schedule, which takes the number of chunks where it can choose."""
    free = name != AUTO and not SCHEDULES[name].chunks_are_fixed
    return replace(first, schedule=name, chunks=first.chunks if free else None)


@lru_cache(maxsize=8)
def outcome_of(settings: Settings) -> Outcome:
    """Built and simulated. Raises InputError where the schedule does not exist for these sizes, or is too large."""
    if settings.schedule == AUTO:
        return _searched(settings)
    schedule = _schedule(settings)
    return Outcome(settings, simulate(schedule, Costs.of_stages(schedule, **settings.costs)))


def _schedule(settings: Settings) -> Schedule:
    chunks = SCHEDULES[settings.schedule].chunks if settings.chunks is None else settings.chunks
    work = settings.stages * chunks * settings.num_microbatches
    if work > MAX_WORK:
        sizes = (settings.stages, "stage"), (chunks, "chunk"), (settings.num_microbatches, "microbatch")
        raise _too_large(f"{' x '.join(count(*size) for size in sizes)} = {work}", MAX_WORK)
    schedule = generate(settings.schedule, settings.stages, settings.num_microbatches, settings.chunks)
    return schedule.forward_only() if settings.forward_only else schedule


def _searched(settings: Settings) -> Outcome:
    for name, given in (("chunks", settings.chunks), ("forward-only", settings.forward_only)):
        if given:
            raise InputError.of(name, given, f"not to be given with {AUTO}", f"leave out {name}")
    work = settings.stages * settings.num_microbatches
    if work > MAX_SEARCHED:
        sizes = f"{count(settings.stages, 'stage')} x {count(settings.num_microbatches, 'microbatch')}"
        raise _too_large(f"{sizes} = {work}", MAX_SEARCHED)
    limit = settings.memory_limit
    found = search.auto(settings.stages, settings.num_microbatches, memory_limit=limit, **settings.costs)
    return Outcome(settings, found.simulation, f"{AUTO}: the best of {count(found.tried, 'order')}, {found.origin}")


def _too_large(got: str, most: int) -> InputError:
    return InputError.of("microbatches", got, f"at most {most} in all", "choose fewer, or use `isostep simulate`")
