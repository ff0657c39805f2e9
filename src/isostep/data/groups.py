"""Groups that carry data: `groups` over a map-style data set, `ready_groups` over batches that come ready made."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from ..engine import BeforeFetch, Microbatch
from ..errors import InputError
from ..grouping import Cursor, Group, GroupPlan, LastGroup
from ..objective import Batch
from ..units import Coverage
from .collate import pad_batch

Load = Callable[[tuple[int, ...]], Batch]
Collate = Callable[[list[Any]], Batch]


@dataclass(frozen=True)
class DataGroup:
    """A group of a map-style data set: which examples, and how to load a microbatch of them."""

    group: Group
    fetch: Load
    more: bool = True

    @property
    def epoch(self) -> int:
        return self.group.epoch

    @property
    def index(self) -> int:
        return self.group.index

    @property
    def positions(self) -> tuple[int, int]:
        return self.group.start, self.group.stop

    @property
    def ids(self) -> tuple[int, ...]:
        return self.group.ids

    @property
    def coverage(self) -> Coverage:
        return self.group.coverage

    @property
    def largest_microbatch(self) -> int:
        return self.group.largest_microbatch

    @property
    def divisible(self) -> bool:
        return True

    @property
    def after(self) -> Cursor:
        """Where the next group begins."""
        return Cursor(self.group.epoch, self.group.stop, self.group.index + 1)

    def load(self, replica: int, replicas: int, before_fetch: BeforeFetch) -> list[Microbatch]:
        microbatches = []
        for index, ids in enumerate(self.group.microbatches_of(replica, replicas)):
            before_fetch(index, ids)
            batch = self.fetch(ids)
            found = ids_of(batch)
            microbatches.append(Microbatch(batch, len(ids), ids if found is None else found))
        return microbatches

    def limited(self, examples_per_microbatch: int) -> DataGroup:
        return replace(self, group=self.group.limited(examples_per_microbatch))

    def settle(self, *, more: bool) -> None:
        pass


class ReadyGroup:
    """Microbatches that a replica was handed ready made. Their order is not isostep's, so it cannot be proved."""

    positions = (-1, -1)
    coverage = None
    divisible = False
    after = None

    def __init__(
        self,
        batches: Sequence[Batch],
        *,
        epoch: int = 0,
        index: int = 0,
        more: bool = True,
        error: Exception | None = None,
    ) -> None:
        self.batches = list(batches)
        self.epoch, self.index, self.more = epoch, index, more
        self._error = error

    @property
    def largest_microbatch(self) -> int:
        return max(map(count_examples, self.batches), default=0)

    def load(self, replica: int, replicas: int, before_fetch: BeforeFetch) -> list[Microbatch]:
        if self._error is not None:  # of the loader that brought the batches: raised where it reaches all replicas
            raise self._error
        return [Microbatch(batch, count_examples(batch), ids_of(batch)) for batch in self.batches]

    def limited(self, examples_per_microbatch: int) -> ReadyGroup:
        return self

    def settle(self, *, more: bool) -> None:
        self.more = more


class Groups:
    """The groups of some epochs, in order. Iterate once per run; `dropped` fills with groups left out on the way."""

    def __init__(self, plan: GroupPlan, fetch: Load, epochs: int, start: Cursor) -> None:
        self.plan, self.epochs, self.start = plan, epochs, start
        self.dropped: list[Group] = []
        self._fetch = fetch

    def __iter__(self) -> Iterator[DataGroup]:
        for group, drop in self.plan.walk(self.start, self.epochs):
            if drop:
                self.dropped.append(group)
            else:
                yield DataGroup(group, self._fetch)

    def __len__(self) -> int:
        """Updates from `start` to the end. Raises TypeError for a budget of tokens, where nobody knows before."""
        per_epoch = self.plan.updates_per_epoch
        if per_epoch is None:
            raise TypeError("a budget of tokens has no length before it is walked")
        return max(0, (self.epochs - self.start.epoch) * per_epoch - self.start.index)


def groups(
    data: Any,
    *,
    examples_per_update: int | None = None,
    tokens_per_update: int | None = None,
    examples_per_microbatch: int | None = None,
    tokens_per_microbatch: int | None = None,
    seed: int = 0,
    epochs: int = 1,
    last_group: LastGroup = "keep",
    start: int | Cursor = 0,
    collate: Collate = pad_batch,
    load: Load | None = None,
    length_of: Callable[[int], int] | None = None,
) -> Groups:
    """The groups of a map-style data set: the same on every replica, each of which loads only its own microbatches.

    data: has `len(data)` and `data[i]` for ids 0 <= i < len(data). One budget per update and one per microbatch, in
        examples or tokens; without one per microbatch, a microbatch has one example.
    last_group: "keep" the partial group at an epoch's end, with its true denominator, or "drop" it.
    start: number of groups that are done already, or the `cursor` of an Updater.
    collate: list of examples -> batch. load: ids -> batch, instead of `data[i]` and collate.
    length_of: id -> tokens, for budgets of tokens; by default `data.lengths[id]` where there is such a thing.

    A batch with an integer entry `id` says itself which examples it holds; they must be those that were asked for.
    Raises InputError for sizes that make no group.
    """
    if not (hasattr(data, "__len__") and (load is not None or hasattr(data, "__getitem__"))):
        raise InputError.of(
            "data", type(data).__name__, "a map-style data set with len() and [i]",
            "use ready_groups(...) for a DataLoader or another iterable of batches",
        )  # fmt: skip
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise InputError.of("epochs", epochs, "a whole number of 1 or more", "give a positive number")
    if examples_per_microbatch is None and tokens_per_microbatch is None:
        examples_per_microbatch = 1
    lengths = getattr(data, "lengths", None)
    plan = GroupPlan(
        num_examples=len(data),
        examples_per_update=examples_per_update,
        tokens_per_update=tokens_per_update,
        examples_per_microbatch=examples_per_microbatch,
        tokens_per_microbatch=tokens_per_microbatch,
        seed=seed,
        last_group=last_group,
        length_of=length_of or (lengths.__getitem__ if lengths is not None else None),
    )
    return Groups(plan, load or partial(_fetch, data, collate), epochs, _cursor(plan, start))


def ready_groups(batches: Iterable[Batch], *, microbatches_per_replica: int, epoch: int = 0) -> Iterator[ReadyGroup]:
    """Groups of batches that come ready made, from a DataLoader or any iterable: each replica brings its own.

    Every group takes up to `microbatches_per_replica` of them. Replicas may run out at different times: those
    without data join with an empty group until the last one is done, which each learns from `Updater.update`.
    So every replica has one group at least, even where no replica has data.
    """
    if microbatches_per_replica < 1:
        raise InputError.of("microbatches_per_replica", microbatches_per_replica, "1 or more", "give a positive size")
    iterator = iter(batches)
    waiting, error = _take(iterator, microbatches_per_replica)
    index = 0
    more = True
    while more:
        current, failed = waiting, error
        waiting, error = ([], None) if failed else _take(iterator, microbatches_per_replica)
        group = ReadyGroup(current, epoch=epoch, index=index, more=bool(waiting or error), error=failed)
        yield group
        more, index = group.more, index + 1


def ids_of(batch: Batch) -> tuple[int, ...] | None:
    """The ids that a batch itself carries: its integer entry `id`; None where it has none."""
    ids: Any = batch.get("id") if isinstance(batch, Mapping) else None
    if isinstance(ids, (Tensor, np.ndarray)):
        ids = ids.reshape(-1).tolist()
    try:
        return tuple(map(operator.index, ids if isinstance(ids, (list, tuple)) else [ids]))
    except TypeError:
        return None


def count_examples(batch: Batch) -> int:
    """Length of the first tensor in a batch; 0 where there is none with a dimension."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 0
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((n for value in values if (n := count_examples(value))), 0)


def _fetch(data: Any, collate: Collate, ids: tuple[int, ...]) -> Batch:
    return collate([data[i] for i in ids])


def _take(iterator: Iterator[Batch], count: int) -> tuple[list[Batch], Exception | None]:
    """Up to `count` batches, and the error that ended them, if one did."""
    batches: list[Batch] = []
    try:
        batches.extend(batch for _, batch in zip(range(count), iterator, strict=False))
    except Exception as error:
        return batches, error
    return batches, None


def _cursor(plan: GroupPlan, start: int | Cursor) -> Cursor:
    if isinstance(start, Cursor):
        return start
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise InputError.of("start", start, "0 or more groups done, or a Cursor", "give Updater.cursor")
    per_epoch = plan.updates_per_epoch
    if per_epoch is None or plan.examples_per_update is None:
        if start:
            raise InputError.of("start", start, "a Cursor", "a budget of tokens resumes from Updater.cursor")
        return Cursor()
    if start == 0:
        return Cursor()
    epoch, before = divmod(start - 1, per_epoch)  # behind the last group that is done, like its own cursor
    return Cursor(epoch, min((before + 1) * plan.examples_per_update, plan.num_examples), before + 1)
