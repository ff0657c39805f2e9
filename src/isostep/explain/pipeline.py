"""A pipeline of equal stages: forward alone as a wave, training under two schedules, and the choice of M.

Every number is read off a simulation in which a forward takes 1 tick and a backward 2; the closed form stands beside.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ..errors import InputError
from ..schedule.costs import Costs
from ..schedule.generate import generate
from ..schedule.simulate import Simulation, simulate

SCHEDULES = ("gpipe", "1f1b")
MAX_STAGES, MAX_MICROBATCHES = 64, 256


@dataclass(frozen=True)
class Forward:
    """Forwards alone: each stage works on a microbatch one tick after the stage before did."""

    wave: tuple[tuple[int | None, ...], ...]
    """[stage][tick]: the microbatch that the stage works on, None where it is idle."""
    ticks: int
    busy_share: Fraction
    """Work of all stages / (stages x ticks)."""
    ticks_one_at_a_time: int
    """If a microbatch enters only when the one before has left."""
    busy_share_one_at_a_time: Fraction


@dataclass(frozen=True)
class Training:
    """One group under one schedule."""

    schedule: str
    ticks: int
    busy_share: Fraction
    in_flight: tuple[int, ...]
    """Per stage: the most microbatches whose activations it holds at once."""
    latency_median: float
    """Ticks from the start of a microbatch's forward to the end of its backward on the first stage."""
    latency_worst: float


@dataclass(frozen=True)
class Choice:
    """What training comes to with one number of microbatches per group."""

    num_microbatches: int
    closed_form: Fraction
    """Busy share, M / (M + P - 1)."""
    schedules: tuple[Training, ...]
    """gpipe, 1f1b."""


@dataclass(frozen=True)
class Pipeline:
    """P stages and the M microbatches of a group."""

    stages: int
    num_microbatches: int
    closed_form: Fraction
    """Busy share, M / (M + P - 1)."""
    forward: Forward
    training: tuple[Training, ...]
    """gpipe, 1f1b."""
    choices: tuple[Choice, ...]
    """M = 1, 2, 4, ... up to 4 P or 32, and the M that was given."""


def pipeline(stages: int = 3, num_microbatches: int = 4) -> Pipeline:
    """The small model for P `stages` and M `num_microbatches`.

    Raises InputError where P is not in 1 to 64 or M not in 1 to 256.
    """
    _check("stages", stages, MAX_STAGES)
    _check("microbatches", num_microbatches, MAX_MICROBATCHES)
    powers = (1 << power for power in range(max(4 * stages, 32).bit_length()))
    choices = sorted({num_microbatches, *powers})
    return Pipeline(
        stages=stages,
        num_microbatches=num_microbatches,
        closed_form=closed_form(stages, num_microbatches),
        forward=_forward(stages, num_microbatches),
        training=_trainings(stages, num_microbatches),
        choices=tuple(Choice(m, closed_form(stages, m), _trainings(stages, m)) for m in choices),
    )


def closed_form(stages: int, num_microbatches: int) -> Fraction:
    """Busy share of equal stages: each works M ticks out of M + P - 1."""
    return Fraction(num_microbatches, num_microbatches + stages - 1)


def forward_simulation(stages: int, num_microbatches: int) -> Simulation:
    """Forwards alone, 1 tick each."""
    schedule = generate("gpipe", stages, num_microbatches).forward_only()
    return simulate(schedule, Costs.of(schedule))


def training_simulation(schedule_name: str, stages: int, num_microbatches: int) -> Simulation:
    """Forwards of 1 tick, full backwards of 2."""
    schedule = generate(schedule_name, stages, num_microbatches)
    return simulate(schedule, Costs.of(schedule))


def _check(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        remedy = "take fewer, or use `isostep simulate`"
        raise InputError.of(name, value, f"a whole number from 1 to {most}", remedy)


def _forward(stages: int, num_microbatches: int) -> Forward:
    sim = forward_simulation(stages, num_microbatches)
    wave: list[list[int | None]] = [[None] * round(sim.makespan) for _ in range(stages)]
    for span in sim.spans():
        wave[span.stage][round(span.start)] = span.microbatch_index
    alone = num_microbatches * round(forward_simulation(stages, 1).makespan)
    return Forward(
        wave=tuple(map(tuple, wave)),
        ticks=round(sim.makespan),
        busy_share=_busy_share(sim),
        ticks_one_at_a_time=alone,
        busy_share_one_at_a_time=Fraction(round(sum(sim.busy)), stages * alone),
    )


def _trainings(stages: int, num_microbatches: int) -> tuple[Training, ...]:
    trainings = []
    for name in SCHEDULES:
        sim = training_simulation(name, stages, num_microbatches)
        latency = sim.latency
        trainings.append(
            Training(name, round(sim.makespan), _busy_share(sim), sim.peak_in_flight, latency.median, latency.worst)
        )
    return tuple(trainings)


def _busy_share(sim: Simulation) -> Fraction:
    """Work / (stages x ticks) without rounding: all times are whole ticks."""
    return Fraction(round(sum(sim.busy)), sim.schedule.stages * round(sim.makespan))
