"""The largest microbatch that fits, found by trying the longest examples."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

import torch
from torch import Tensor

from .comm import leaving
from .data.groups import Collate
from .engine import Attempt, Counted, Engine
from .errors import InputError
from .keeping import PutBack, untouched
from .ledger import Counts
from .memory import available_bytes, half, in_use_bytes, is_out_of_memory, peak_bytes, reset_peak
from .objective import Batch, Outputs, to_device
from .units import Coverage, all_equal, derive_key, marks
from .update import backward, weighted_loss
from .verdicts import raise_shared


def largest_microbatch(
    engine: Engine, data: Any, *, at_most: int, lengths: Sequence[int] | None, collate: Collate, fraction: float
) -> int:
    """The largest number of examples per microbatch, up to `at_most`, that fits on every replica.

    Sizes of 1, 2, 4, ... are tried with the longest examples of the data, then those between the last that fits and
    the first that does not. A try is what training does: two microbatches, since the second one finds the gradients
    of the first in memory, and a step of the optimizers. Other memory of phases 4 and 5 is not tried. A rank with some
    of the stages tries what their schedule holds at most, for a group of `at_most` examples a replica.

    data: map-style, the same on every replica. lengths: tokens by id; by default `data.lengths`; without either,
        every example is read once and its longest entry taken for its length.
    fraction: of the memory that is available on a CPU, where no allocation fails before the kernel kills. It is
        shared out among the ranks of this host, and a size is not tried where the peaks so far predict that a
        replica would need more. On a device, only torch's own error says that a size does not fit.

    Afterwards parameters, buffers, gradients, optimizers and random generators are as before, and a new peak of
    memory has begun. Raises OutOfMemoryError on every replica where not even one example fits.
    """
    _check(data, at_most, fraction)
    budget = Budget.of(engine, fraction)
    attempt = Attempt()
    ids: list[int] = []
    with leaving(engine.comm), untouched(engine.model, engine.optimizers, engine.device) as put_back:
        with attempt.recording():
            ids = longest(data, at_most, lengths)
        trial = _Trial(engine, data, ids, at_most, collate, budget, put_back)
        size = search(trial.fits, len(ids)) if _agree(engine, attempt.error, ids, 0) else 0
    reset_peak(engine.device)
    return size or half(1)


def search(fits: Callable[[int], bool], at_most: int) -> int:
    """The largest size up to `at_most` that fits, by doubling and then halving the gap; 0 where 1 does not fit."""
    good, bad = 0, at_most + 1
    while bad - good > 1:
        size = min(max(1, 2 * good), at_most) if bad > at_most else (good + bad) // 2
        if fits(size):
            good = size
        else:
            bad = size
    return good


def longest(data: Any, count: int, lengths: Sequence[int] | None) -> list[int]:
    """Ids of the longest examples, the longest first; see `largest_microbatch` for what their length is."""
    lengths = getattr(data, "lengths", None) if lengths is None else lengths
    if lengths is None:
        lengths = [length_of(data[i]) for i in range(len(data))]
    return nlargest(count, range(len(data)), key=lengths.__getitem__)


def length_of(example: Any) -> int:
    """Of the longest entry of an example, strings left out; 1 for what has no length."""
    entries = (
        example.values() if isinstance(example, Mapping) else example if isinstance(example, (tuple, list)) else ()
    )
    if isinstance(example, Mapping) or any(hasattr(entry, "__len__") for entry in entries):
        return max((length_of(entry) for entry in entries if not isinstance(entry, str)), default=1)
    try:
        return len(example)
    except TypeError:
        return 1


@dataclass
class Budget:
    """Memory that this process may use on a CPU, and what the next try is predicted to use. No limit on a device.

    peaks: what was in use by size tried; 0 is a size as well.
    """

    limit: float = math.inf
    peaks: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: Engine, fraction: float) -> Budget:
        """What is in use and this rank's share of what is available, before any rank tries anything."""
        available = available_bytes()
        if engine.device.type != "cpu" or available is None:
            return cls()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", engine.comm.size))
        return cls(in_use_bytes(engine.device) + fraction * available / local)

    def allows(self, size: int) -> bool:
        """Whether a straight line through the last two peaks stays within the limit."""
        below = sorted(n for n in self.peaks if n < size)[-2:]
        if len(below) < 2:
            return True
        a, b = below
        slope = max(0.0, (self.peaks[b] - self.peaks[a]) / (b - a))
        return self.peaks[b] + slope * (size - b) <= self.limit


@dataclass
class _Trial:
    """Tries sizes; every replica tries the same ones and gets the same answers."""

    engine: Engine
    data: Any
    ids: list[int]
    at_most: int
    collate: Collate
    budget: Budget
    put_back: PutBack

    def fits(self, size: int) -> bool:
        """Whether microbatches of `size` examples fit on every replica. Raises on every replica what one raises."""
        attempt = Attempt()
        allowed = self.budget.allows(size)
        if allowed:
            try:
                with attempt.recording():
                    self._measure(size)
            finally:
                self.engine.gradients.clear()
            self.put_back()
            if self.engine.device.type == "cuda":
                torch.cuda.empty_cache()
        return _agree(self.engine, attempt.error, self.ids, size, allowed=allowed)

    def _measure(self, size: int) -> None:
        device = self.engine.device
        if not self.budget.peaks:
            self._train(size)  # the first time, for the optimizers to make their state
            self.budget.peaks[0] = in_use_bytes(device)
        reset_peak(device)
        self._train(size)
        self.budget.peaks[size] = peak_bytes(device)

    def _batch(self, size: int) -> Batch:
        """The longest examples, so many."""
        return to_device(self.collate([self.data[i] for i in self.ids[:size]]), self.engine.device)

    def _train(self, size: int) -> None:
        """Two microbatches, or those of a schedule, and a step. Denominators are 1: they change no memory."""
        engine = self.engine
        factors = tuple(term.coefficient for term in engine.objective.terms)
        counted = Counted(denominators={}, factors=factors, counts=Counts(), loss_scale=None)
        batch = self._batch(size)

        def loss(outputs: Outputs, batch: Batch) -> Tensor:
            return weighted_loss(engine.objective, counted, outputs, batch, Attempt())

        engine.gradients.begin()
        if engine.stages is not None:
            whole, rest = divmod(self.at_most, size)
            batches = [batch] * whole + ([self._batch(rest)] if rest else [])
            engine.stages.alone(batches, engine.precision, loss, engine.gradients.part)
        for _ in range(0 if engine.stages is not None else 2):
            with engine.precision():
                outputs = engine.forward(engine.model, batch)
            backward(loss(outputs, batch))
            engine.gradients.part()
            del outputs
        engine.gradients.hand_over()
        for optimizer in engine.optimizers:
            optimizer.step()
        engine.gradients.clear()


def _agree(engine: Engine, error: Exception | None, ids: list[int], size: int, *, allowed: bool = True) -> bool:
    """Whether all replicas had room. Raises on every replica if one failed, or if they try different things."""
    no_room = not allowed or (error is not None and is_out_of_memory(error))
    failed = error is not None and not is_out_of_memory(error)
    key = derive_key(Coverage.of(ids).hash, size)
    (num_failed, num_no_room, mark, mark_squared), _ = engine.comm.sum("fit", [failed, no_room, *marks(key)]).wait()
    if num_failed:
        raise_shared(engine.comm, error if failed else None, "search for the largest microbatch")
    if not all_equal(mark, mark_squared, engine.comm.size):
        raise InputError.of(
            "longest examples", "others here", "the same on every replica", "give all the same data and at_most"
        )
    return not num_no_room


def _check(data: Any, at_most: int, fraction: float) -> None:
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__") and len(data)):
        raise InputError.of("data", type(data).__name__, "a map-style data set with examples", "give one")
    if isinstance(at_most, bool) or not isinstance(at_most, int) or at_most < 1:
        raise InputError.of("at_most", at_most, "a whole number of 1 or more", "give a positive size")
    if not 0 < fraction <= 1:
        raise InputError.of("fraction", fraction, "a number above 0 and up to 1", "leave it out for 0.8")
