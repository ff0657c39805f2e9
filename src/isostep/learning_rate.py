"""The learning rate as a factor of its peak, by what has been applied so far. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from . import config
from .errors import InputError

Shape = Literal["constant", "linear", "cosine", "warmup-stable-decay"]
Unit = Literal["updates", "examples", "supervised_tokens"]


@dataclass(frozen=True)
class LearningRate:
    """A linear warm-up to 1, and then a shape that reaches `final_factor` at `total`.

    With p units applied before an update, W = warmup, T = total, D = decay and f = final_factor, its factor is

        (p + 1) / W                     where p < W
        f + (1 - f) * s(x)              where p >= W

    and x goes from 0 to 1. p + 1 is the first unit of the update itself, so that no update has a factor of 0 in its
    warm-up: counted in updates, the first one has 1 / W and the W-th 1.

        constant                s = 1; total and final_factor have no effect
        linear                  s = 1 - x,                   x = (p - W) / (T - W)
        cosine                  s = (1 + cos(pi * x)) / 2,   x = (p - W) / (T - W)
        warmup-stable-decay     s = 1 - sqrt(x),             x = (p - (T - D)) / D; 1 before

    The last (Hu et al. 2024, arXiv 2404.06395) decays as Hägele et al. 2024 (arXiv 2405.18392) found best. An update
    that begins at T or later has f. When all of T is applied no update is left, so the last one has a little more.

    Lengths count in `unit`. total is None for a constant shape only; decay is None for all but warmup-stable-decay.
    Raises InputError where a total is missing, or shorter than what lies in it.
    """

    shape: Shape
    unit: Unit
    warmup: int
    decay: int | None
    total: int | None
    final_factor: float

    def __post_init__(self) -> None:
        if self.shape == "constant":
            return
        if self.total is None:
            raise InputError.of(
                "schedule.total", None, f"the number of {_words(self.unit)} at whose end {self.shape} ends",
                "give it, or count in schedule.unit = \"examples\": nobody knows before how many this run applies",
            )  # fmt: skip
        if self.warmup >= self.total:
            raise InputError.of(
                "schedule.total", self.total, f"more than the {self.warmup} {_words(self.unit)} of schedule.warmup",
                "lower schedule.warmup, or let the run be longer",
            )  # fmt: skip
        if self.shape == "warmup-stable-decay" and self.warmup + self._decay > self.total:
            raise InputError.of(
                "schedule.total", self.total,
                f"at least schedule.warmup + schedule.decay = {self.warmup} + {self._decay} {_words(self.unit)}",
                "lower one of them, or let the run be longer",
            )  # fmt: skip

    def factor(self, progress: float) -> float:
        """What the peak is multiplied by, 0 to 1, in an update before which `progress` >= 0 units were applied."""
        if progress < self.warmup:
            return min(1.0, (progress + 1) / self.warmup)
        if self.shape == "constant":
            return 1.0
        begin = self._decay_begin
        x = min(1.0, max(0.0, (progress - begin) / (self._total - begin)))
        return self.final_factor + (1 - self.final_factor) * _falling(self.shape, x)

    def text(self) -> str:
        """Shape, lengths and unit in one line: "cosine to 0 over 92 updates, after 10 of warm-up"."""
        unit = _words(self.unit)
        if self.shape == "constant":
            return f"constant, after {self.warmup:,} {unit} of warm-up" if self.warmup else "constant"
        end = f"to {self.final_factor:g} over {self._total - self._decay_begin:,}"
        warm = f", after {self.warmup:,} of warm-up" if self.warmup else ", without warm-up"
        if self.shape == "warmup-stable-decay":
            stable = self._decay_begin - self.warmup
            return f"{self.shape}: {stable:,} {unit} at the peak, then 1 - sqrt {end}{warm}"
        return f"{self.shape} {end} {unit}{warm}"

    @property
    def _total(self) -> int:
        assert self.total is not None
        return self.total

    @property
    def _decay(self) -> int:
        assert self.decay is not None
        return self.decay

    @property
    def _decay_begin(self) -> int:
        return self._total - self._decay if self.shape == "warmup-stable-decay" else self.warmup


def learning_rate_of(schedule: config.Schedule, derived_total: int | None) -> LearningRate:
    """The learning rate of a run whose own length, in the schedule's unit, is `derived_total` (None: unknown).

    `schedule.total` comes first. Without `schedule.warmup`, warm-up takes a tenth of the total; without
    `schedule.decay`, the decay of warmup-stable-decay takes the last fifth, at least 1 unit. Raises InputError as
    LearningRate does.
    """
    total = derived_total if schedule.total is None else schedule.total
    warmup = (total or 0) // 10 if schedule.warmup is None else schedule.warmup
    decay = None
    if schedule.shape == "warmup-stable-decay" and total is not None:
        decay = max(1, total // 5) if schedule.decay is None else schedule.decay
    if schedule.shape == "constant":
        total = None
    return LearningRate(schedule.shape, schedule.unit, warmup, decay, total, schedule.final_factor)


def _falling(shape: str, x: float) -> float:
    """From 1 at x = 0 to 0 at x = 1."""
    if shape == "linear":
        return 1 - x
    return (1 + math.cos(math.pi * x)) / 2 if shape == "cosine" else 1 - math.sqrt(x)


def _words(unit: str) -> str:
    return unit.replace("_", " ")
