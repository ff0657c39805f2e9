"""What the actions of a schedule cost: forward, input gradient and weight gradient of each chunk; transfers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import InputError
from .ir import OPS, B, F, I, Schedule, W

MAX_COST = 1e12
Numbers = float | Sequence[float]
Shares = float | None | Sequence[float | None]


@dataclass(frozen=True)
class Costs:
    """Costs in one unit of time, whatever the caller takes. Build with `Costs.of`."""

    forward: tuple[float, ...]
    """f of each chunk, in model order."""
    input_grad: tuple[float, ...]
    """b of each chunk: the backward for its inputs."""
    weight_grad: tuple[float, ...]
    """w of each chunk: the backward for its weights. A full backward takes b + w."""
    transfer: tuple[float, ...]
    """c of each link, between a chunk and the next, P * v - 1 of them; 0 counts where both are on one rank."""
    activation: tuple[float, ...]
    """What one microbatch holds on each chunk between forward and backward, in any unit; 1 counts activations."""
    recompute: tuple[float | None, ...]
    """Of each chunk. None: its activations are kept. A share: that much is kept, the input of the chunk, and the rest
    is computed again before its backward, which takes f longer."""
    weight_share: float = 1.0
    """The share of it that a weight backward still needs once the input backward has run."""
    blocking: bool = False
    """The sender is busy during its transfers too."""

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        forward: Numbers = 1.0,
        input_grad: Numbers = 1.0,
        weight_grad: Numbers = 1.0,
        transfer: Numbers = 0.0,
        *,
        activation: Numbers = 1.0,
        weight_share: float = 1.0,
        recompute: Shares = None,
        blocking: bool = False,
    ) -> Costs:
        """Costs for a schedule: one number for all of its chunks (links), or one for each in model order.

        Raises InputError for a list of another length, and a number that is negative, not finite or above 1e12, and
        for a share that is not in 0 to 1.
        """
        chunks, links = schedule.num_chunks, schedule.num_chunks - 1
        _check_share("weight-share", weight_share)
        return cls(
            forward=numbers("forward", forward, chunks),
            input_grad=numbers("input-grad", input_grad, chunks),
            weight_grad=numbers("weight-grad", weight_grad, chunks),
            transfer=numbers("transfer", transfer, links),
            activation=numbers("activation", activation, chunks),
            recompute=_shares("recompute", recompute, chunks),
            weight_share=weight_share,
            blocking=blocking,
        )

    @classmethod
    def of_stages(
        cls,
        schedule: Schedule,
        forward: Numbers = 1.0,
        input_grad: Numbers = 1.0,
        weight_grad: Numbers = 1.0,
        transfer: Numbers = 0.0,
        *,
        recompute: Shares = None,
        **others: Any,
    ) -> Costs:
        """The same model and machine for every schedule: costs of P whole stages, which v chunks a rank share evenly.

        Chunk k of P * v costs 1/v of stage k // v, holds 1/v of an activation, and recomputes if that stage does.
        transfer: one number, or one for each of the P - 1 links between neighbouring ranks; from the last rank to the
        first the slowest of them.
        others: as in `of`. Raises InputError as `of` does.
        """
        v, ranks = schedule.chunks, schedule.rank_of

        def cut(name: str, given: Numbers) -> tuple[float, ...]:
            whole = numbers(name, given, schedule.stages, "stage")
            return tuple(whole[chunk // v] / v for chunk in range(schedule.num_chunks))

        again = _shares("recompute", recompute, schedule.stages, "stage")
        links = numbers("transfer", transfer, schedule.stages - 1)
        between = [links[min(a, b)] if abs(a - b) == 1 else max(links, default=0.0) for a, b in pairwise(ranks)]
        return cls.of(
            schedule,
            cut("forward", forward),
            cut("input-grad", input_grad),
            cut("weight-grad", weight_grad),
            between,
            activation=1 / v,
            recompute=[again[chunk // v] for chunk in range(schedule.num_chunks)],
            **others,
        )

    def durations(self) -> list[list[float]]:
        """The time of each op (in the order of OPS) on each chunk."""
        again = [0.0 if kept is None else f for f, kept in zip(self.forward, self.recompute, strict=True)]
        inputs = [b + f for b, f in zip(self.input_grad, again, strict=True)]
        full = [b + w for b, w in zip(inputs, self.weight_grad, strict=True)]
        return [list(self.forward), full, inputs, list(self.weight_grad)]

    def memory_changes(self, trains: bool) -> tuple[np.ndarray, np.ndarray]:
        """What each op on each chunk takes when it starts and frees when it ends; float64 (ops, chunks) both.

        trains: False where there is no backward to hold an activation for, so that a forward frees its own.
        """
        kept = np.array([1.0 if share is None else share for share in self.recompute])
        takes, frees = np.zeros((len(OPS), len(kept))), np.zeros((len(OPS), len(kept)))
        takes[F] = kept
        takes[B] = takes[I] = 1 - kept
        frees[B], frees[I], frees[W] = 1.0, 1 - self.weight_share, self.weight_share
        if not trains:
            takes[F] = frees[F] = 1.0
        return takes * self.activation, frees * self.activation


def numbers(name: str, given: Numbers, count: int, one: str = "chunk") -> tuple[float, ...]:
    """`count` checked costs from one number or a sequence of them. Raises InputError; `one` is what each is for."""
    values = (given,) if isinstance(given, int | float) else tuple(given)
    for value in values:
        if not (math.isfinite(value) and 0 <= value <= MAX_COST):
            raise InputError.of(name, value, f"a number from 0 to {MAX_COST:g}", "choose another")
    each = "link" if name == "transfer" else one
    return tuple(map(float, _for_each(name, values, count, each)))


def _shares(name: str, given: Shares, count: int, one: str = "chunk") -> tuple[float | None, ...]:
    """`count` checked shares, None where there is none. Raises InputError."""
    values = (given,) if given is None or isinstance(given, int | float) else tuple(given)
    for value in values:
        if value is not None:
            _check_share(name, value)
    return _for_each(name, values, count, one)


def _check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise InputError.of(name, share, "a share from 0 to 1", "choose another")


def _for_each(name: str, values: tuple[Any, ...], count: int, one: str) -> tuple[Any, ...]:
    """One value for all, or one for each. Raises InputError for another number of them."""
    if len(values) not in (1, count):
        expected = f"1 number, or {count}: one for each {one}" if count > 1 else "1 number"
        raise InputError.of(name, f"{len(values)} numbers", expected, "give as many")
    return values * count if len(values) == 1 else values
