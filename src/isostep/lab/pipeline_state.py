"""One state of the view *Pipeline*: which schedules, under which costs; simulated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..errors import InputError
from ..schedule import closed_form, search
from ..schedule.costs import Costs
from ..schedule.generate import NAMES, SCHEDULES, generate
from ..schedule.ir import Schedule
from ..schedule.simulate import Simulation, simulate
from ..units import count
from .view import Values, plain

MAX_WORK = 5_000
"""Stages x chunks x microbatches of one state: its slowest answer takes some tenths of a second."""
MAX_SEARCHED = 384
"""Stages x microbatches of a state that is searched, for the same reason: about a second."""
MAX_ORDERS = 280
"""Orders that a search may try; very unequal costs ask for more."""
AUTO = "auto"
SCHEDULE_NAMES = (*NAMES, AUTO)
"""What the page offers."""
CHOOSE_CHUNKS = tuple(name for name in NAMES if not SCHEDULES[name].chunks_are_fixed)
"""Schedules that have a choice of v."""


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
    transfer: tuple[float, ...]
    """One number, or one for each link between neighbouring ranks."""
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
        if any(given.transfer) or any(len(set(c)) > 1 for c in (given.forward, given.input_grad, given.weight_grad)):
            return None
        f, b, w = (costs[0] / self.chunks for costs in (given.forward, given.input_grad, given.weight_grad))
        return closed_form.busy_share(
            given.schedule, given.stages, given.num_microbatches, self.chunks, f, b + f if given.recompute else b, w,
            given.forward_only,
        )  # fmt: skip


def settings_of(values: Values, schedule: str | None = None) -> Settings:
    """The first schedule of a state, or another under the same costs.

    The number of chunks is for schedules that have a choice; the others ignore it.
    """
    name = values["schedule"] if schedule is None else schedule
    return Settings(
        name, values["stages"], values["microbatches"], values["chunks"] if name in CHOOSE_CHUNKS else None,
        values["forward"], values["input-grad"], values["weight-grad"], values["transfer"], values["recompute"],
        values["forward-only"], values["memory-limit"],
    )  # fmt: skip


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
        got = f"{' x '.join(count(*size) for size in sizes)} = {work}"
        raise InputError.of(
            "microbatches", got, f"at most {MAX_WORK} in all", "choose fewer, or use `isostep simulate`"
        )
    schedule = generate(settings.schedule, settings.stages, settings.num_microbatches, settings.chunks)
    return schedule.forward_only() if settings.forward_only else schedule


def _searched(settings: Settings) -> Outcome:
    if settings.forward_only:
        raise InputError.of("forward-only", True, f"not to be given with {AUTO}", "leave out forward-only")
    work = settings.stages * settings.num_microbatches
    remedy = f"choose fewer, or run `{command_of(settings)}`"
    if work > MAX_SEARCHED:
        got = f"{count(settings.stages, 'stage')} x {count(settings.num_microbatches, 'microbatch')} = {work}"
        expected = f"fewer: {AUTO} searches at most {MAX_SEARCHED} stages x microbatches here"
        raise InputError.of("microbatches", got, expected, remedy)

    def progress(tried: int) -> None:
        if tried > MAX_ORDERS:
            expected = f"at most {MAX_ORDERS}: costs as unequal as these need more"
            raise InputError.of(AUTO, f"more than {MAX_ORDERS} orders to try", expected, remedy)

    limit = settings.memory_limit
    found = search.auto(
        settings.stages, settings.num_microbatches, memory_limit=limit, progress=progress, **settings.costs
    )
    return Outcome(settings, found.simulation, f"{AUTO}: the best of {count(found.tried, 'order')}, {found.origin}")


def command_of(settings: Settings) -> str:
    """The command that searches these settings without a bound."""
    parts = [f"isostep simulate --schedule {AUTO} --stages {settings.stages}"]
    parts.append(f"--microbatches {settings.num_microbatches}")
    for flag, costs, default in (
        ("forward", settings.forward, (1.0,)),
        ("input-grad", settings.input_grad, (1.0,)),
        ("weight-grad", settings.weight_grad, (1.0,)),
        ("transfer", settings.transfer, (0.0,)),
    ):
        if costs != default:
            parts.append(f"--{flag} {','.join(map(plain, costs))}")
    if settings.recompute:
        parts.append("--recompute")
    if settings.memory_limit is not None:
        parts.append(f"--memory-limit {settings.memory_limit}")
    return " ".join(parts)
