"""Which examples feed which update: epoch order -> groups -> microbatches -> lanes -> replicas.

For a budget of examples the k-th group of an epoch is a pure function of (seed, epoch, k): nothing is stored,
nothing is walked over, whatever the size of the data set. A budget of tokens depends on the lengths of all
examples before it, so it is walked with a `Cursor` that a checkpoint keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import isqrt
from typing import Literal

import numpy as np

from .errors import InputError
from .units import Coverage, derive_key, mix64_array

LastGroup = Literal["keep", "drop"]
ROUNDS = 20
"""Of the permutation. With 10, the orders of 6 or 12 examples are measurably not equally likely."""


class EpochOrder:
    """The order of one epoch: a keyed permutation of range(size), evaluated only where it is asked for.

    A generalised Feistel cipher over Z_a x Z_b with a * b just above `size`, and cycle walking (Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains", section 5); the round function is SplitMix64's
    finalizer under a key per round. It is a shuffle, not a secret.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        if not 1 <= size < 1 << 62:
            raise InputError.of("data set size", size, "1 to 2**62 - 1 examples", "give a data set with examples")
        self.size = size
        self._a = np.uint64(isqrt(size - 1) + 1)
        self._b = np.uint64(-(-size // int(self._a)))
        self._keys = [np.uint64(derive_key(seed, epoch, i)) for i in range(ROUNDS)]

    def ids(self, start: int, stop: int) -> list[int]:
        """Example ids at positions start <= i < stop of this epoch. O(stop - start) time and memory."""
        if not 0 <= start <= stop <= self.size:
            raise InputError.of("positions", (start, stop), f"0 <= start <= stop <= {self.size}", "stay in the epoch")
        values = self._permute(np.arange(start, stop, dtype=np.uint64))
        while (outside := values >= np.uint64(self.size)).any():
            values[outside] = self._permute(values[outside])
        return values.tolist()

    def _permute(self, values: np.ndarray) -> np.ndarray:
        right, left = np.divmod(values, self._a)
        for i, key in enumerate(self._keys):
            if i % 2 == 0:
                left = (left + mix64_array(right ^ key) % self._a) % self._a
            else:
                right = (right + mix64_array(left ^ key) % self._b) % self._b
        return right * self._a + left


def hosted(num_lanes: int, replica: int, replicas: int) -> range:
    """The lanes that a replica hosts: consecutive, balanced to within one, none where lanes are fewer than replicas.

    Every lane has exactly one host. Which host never changes what is in a lane.
    """
    return range(-(-replica * num_lanes // replicas), -(-(replica + 1) * num_lanes // replicas))


@dataclass(frozen=True)
class Group:
    """All examples of one update, cut into microbatches.

    `ids` are those at positions `start` to `stop` of the epoch's order, microbatch after microbatch: in that order,
    or, for a budget of tokens, the longest first, since examples of like length waste little on padding. The
    microbatches depend on the data order and the microbatch size alone, never on the number of replicas. Each
    microbatch is a lane of its own.
    """

    epoch: int
    index: int
    start: int
    stop: int
    microbatches: tuple[tuple[int, ...], ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(example_id for microbatch in self.microbatches for example_id in microbatch)

    @cached_property
    def coverage(self) -> Coverage:
        """What must have gone into forward, over all replicas, before the optimizer may run."""
        return Coverage.of(self.ids)

    @property
    def lanes(self) -> tuple[range, ...]:
        """Per lane, the indices of its microbatches, whose gradients are summed in this order."""
        return tuple(range(i, i + 1) for i in range(len(self.microbatches)))

    def microbatches_of(self, replica: int, replicas: int) -> list[tuple[int, ...]]:
        """Ids of the microbatches that a replica runs, in order; an empty list where it has none."""
        lanes = self.lanes
        return [self.microbatches[i] for lane in hosted(len(lanes), replica, replicas) for i in lanes[lane]]

    @property
    def largest_microbatch(self) -> int:
        """Examples in the largest microbatch."""
        return max(map(len, self.microbatches), default=0)

    def limited(self, examples_per_microbatch: int) -> Group:
        """The same examples, every microbatch cut into pieces of at most this many."""
        pieces = (piece for ids in self.microbatches for piece in chunks(ids, examples_per_microbatch))
        return replace(self, microbatches=tuple(pieces))


def chunks(ids: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Consecutive pieces of `size` ids; the last one may be shorter."""
    return [tuple(ids[i : i + size]) for i in range(0, len(ids), size)]


def chunks_by_tokens(ids: Sequence[int], lengths: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """Consecutive pieces of at most `limit` tokens each, padding to the longest of the piece counted.

    An example longer than the limit is a piece of its own.
    """
    cuts, longest = [0], 0
    for i, length in enumerate(lengths):
        longest = max(longest, length)
        if i > cuts[-1] and longest * (i - cuts[-1] + 1) > limit:
            cuts.append(i)
            longest = length
    return [tuple(ids[a:b]) for a, b in pairwise([*cuts, len(ids)]) if b > a]


@dataclass(frozen=True)
class Cursor:
    """Where the next group begins: epoch, position in its order, and index of the group within the epoch."""

    epoch: int = 0
    position: int = 0
    index: int = 0


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """How a data set becomes groups. Exactly one budget per update and one per microbatch; sizes of 1 or more.

    `length_of(id)` gives an example's number of tokens and is needed by the two token budgets.
    Raises InputError for sizes and combinations that make no group.
    """

    num_examples: int
    examples_per_update: int | None = None
    tokens_per_update: int | None = None
    examples_per_microbatch: int | None = None
    tokens_per_microbatch: int | None = None
    seed: int = 0
    last_group: LastGroup = "keep"
    length_of: Callable[[int], int] | None = None

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise InputError.of("data set", self.num_examples, "1 example or more", "give a data set with examples")
        _one_budget(self, "examples_per_update", "tokens_per_update")
        _one_budget(self, "examples_per_microbatch", "tokens_per_microbatch")
        if (self.tokens_per_update or self.tokens_per_microbatch) and self.length_of is None:
            raise InputError.of("length_of", None, "a function id -> tokens", "a budget of tokens needs lengths")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InputError.of("seed", self.seed, "an int", "give one")
        if self.last_group not in ("keep", "drop"):
            raise InputError.of("last_group", self.last_group, "'keep' or 'drop'", "choose one")
        if self.last_group == "drop" and self.updates_per_epoch == 0:
            raise InputError.of(
                "examples_per_update", self.examples_per_update, f"at most {self.num_examples} (the data set)",
                "with last_group='drop' no group would be left; use a smaller update or 'keep'",
            )  # fmt: skip

    @property
    def updates_per_epoch(self) -> int | None:
        """Updates that an epoch attempts; None for a budget of tokens, where it is not known before the walk."""
        if self.examples_per_update is None:
            return None
        whole, rest = divmod(self.num_examples, self.examples_per_update)
        return whole + (rest > 0 and self.last_group == "keep")

    def order(self, epoch: int) -> EpochOrder:
        return EpochOrder(self.num_examples, self.seed, epoch)

    def ids_of(self, epoch: int, start: int, stop: int) -> list[int]:
        """Ids at positions [start, stop) of an epoch's order; what a ledger's coverage is proved against."""
        return self.order(epoch).ids(start, stop)

    def group(self, epoch: int, index: int) -> Group:
        """The index-th group of an epoch, a pure function of (seed, epoch, index). Needs a budget of examples."""
        size = self.examples_per_update
        if size is None:
            raise InputError.of("group index", index, "a cursor", "a budget of tokens must be walked: use `walk`")
        if not 0 <= index * size < self.num_examples:
            last = (self.num_examples - 1) // size
            raise InputError.of("group index", index, f"0 to {last}, the last of an epoch", "stay in the epoch")
        return self._group(Cursor(epoch, index * size, index), self.order(epoch))

    def walk(self, cursor: Cursor, epochs: int) -> Iterator[tuple[Group, bool]]:
        """Groups from `cursor` to the end of epoch number `epochs` - 1, each with whether it is to be dropped."""
        for epoch in range(cursor.epoch, epochs):
            order = self.order(epoch)
            here = cursor if epoch == cursor.epoch else Cursor(epoch)
            while here.position < self.num_examples:
                group = self._group(here, order)
                yield group, self.last_group == "drop" and self._is_partial(group)
                here = Cursor(epoch, group.stop, group.index + 1)

    def _group(self, cursor: Cursor, order: EpochOrder) -> Group:
        ids = self._take(cursor.position, order)
        if self.examples_per_microbatch is not None:
            pieces = chunks(ids, self.examples_per_microbatch)
        else:
            assert self.length_of is not None
            assert self.tokens_per_microbatch is not None
            lengths = {i: self.length_of(i) for i in ids}
            packed = sorted(ids, key=lambda i: -lengths[i])  # stable, so a function of the order alone
            pieces = chunks_by_tokens(packed, [lengths[i] for i in packed], self.tokens_per_microbatch)
        return Group(cursor.epoch, cursor.index, cursor.position, cursor.position + len(ids), tuple(pieces))

    def _take(self, position: int, order: EpochOrder) -> list[int]:
        """Ids of the group that begins at `position`: as many as fit the budget, at least one."""
        if self.examples_per_update is not None:
            return order.ids(position, min(position + self.examples_per_update, self.num_examples))
        assert self.length_of is not None
        assert self.tokens_per_update is not None
        taken: list[int] = []
        tokens = 0
        while position + len(taken) < self.num_examples:
            begin = position + len(taken)
            for example_id in order.ids(begin, min(begin + 64, self.num_examples)):
                tokens += self.length_of(example_id)
                if taken and tokens > self.tokens_per_update:
                    return taken
                taken.append(example_id)
        return taken

    def _is_partial(self, group: Group) -> bool:
        """Whether the end of the epoch, not the budget, ended this group."""
        if group.stop < self.num_examples:
            return False
        if self.examples_per_update is not None:
            return group.stop - group.start < self.examples_per_update
        assert self.length_of is not None
        assert self.tokens_per_update is not None
        return sum(map(self.length_of, group.ids)) < self.tokens_per_update


def _one_budget(plan: GroupPlan, examples: str, tokens: str) -> None:
    """Check that exactly one of the two budgets is given, and that it is a whole number of 1 or more."""
    given = {name: getattr(plan, name) for name in (examples, tokens) if getattr(plan, name) is not None}
    if len(given) != 1:
        raise InputError.of(f"{examples} and {tokens}", given or None, "exactly one of them", "give one")
    ((name, value),) = given.items()
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError.of(name, value, "a whole number of 1 or more", "give a positive size")
