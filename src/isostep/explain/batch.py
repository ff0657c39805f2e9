"""How the sizes of one update multiply, and which ranks are replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import InputError

MAX_COUNT = 10**12

LastGroup = Literal["keep", "drop"]


@dataclass(frozen=True)
class Epoch:
    """The updates of one pass over the data set."""

    examples: int
    last_group: LastGroup
    updates: int
    examples_in_last_update: int
    """0 if the epoch has no update at all."""
    examples_dropped: int


@dataclass(frozen=True)
class WorldSizeFault:
    """What follows when the world size is taken for the number of replicas."""

    factor: int
    """World size / replicas; 1 means that nothing goes wrong."""
    examples_per_update_believed: int
    gradient_scale: float
    """The gradient as a multiple of the right one, if its sum is divided by the examples believed."""


@dataclass(frozen=True)
class BatchSizes:
    """Examples and tokens at each scope of one update. Tokens are upper bounds: full context length."""

    examples_per_microbatch: int
    microbatches_per_replica: int
    replicas: int
    stages: int
    slices: int
    context_length: int | None
    examples_per_replica: int
    """Per update, as are all counts below."""
    examples_per_update: int
    tokens_per_microbatch: int | None
    tokens_per_replica: int | None
    tokens_per_update: int | None
    ranks_per_replica: int
    world_size: int
    epoch: Epoch | None
    world_size_fault: WorldSizeFault

    def ranks(self, replica: int, stage: int) -> range:
        """The ranks that hold one stage of one replica: its tensor slices.

        Ranks are counted with the replica outermost, then the stage, then the slice.
        """
        first = (replica * self.stages + stage) * self.slices
        return range(first, first + self.slices)


def batch_sizes(
    examples_per_microbatch: int,
    microbatches_per_replica: int,
    replicas: int,
    stages: int = 1,
    slices: int = 1,
    context_length: int | None = None,
    examples: int | None = None,
    last_group: LastGroup = "keep",
) -> BatchSizes:
    """The sizes of one update, and of one epoch if `examples`, the size of the data set, is known.

    Raises InputError where a count is not in 1 to 10**12.
    """
    given = {
        "examples per microbatch": examples_per_microbatch,
        "accumulate": microbatches_per_replica,
        "replicas": replicas,
        "stages": stages,
        "slices": slices,
        "context length": context_length,
        "examples": examples,
    }
    for name, count in given.items():
        if count is not None:
            check_count(name, count, least=1)
    examples_per_replica = examples_per_microbatch * microbatches_per_replica
    examples_per_update = examples_per_replica * replicas
    ranks_per_replica = stages * slices
    return BatchSizes(
        examples_per_microbatch=examples_per_microbatch,
        microbatches_per_replica=microbatches_per_replica,
        replicas=replicas,
        stages=stages,
        slices=slices,
        context_length=context_length,
        examples_per_replica=examples_per_replica,
        examples_per_update=examples_per_update,
        tokens_per_microbatch=_tokens(examples_per_microbatch, context_length),
        tokens_per_replica=_tokens(examples_per_replica, context_length),
        tokens_per_update=_tokens(examples_per_update, context_length),
        ranks_per_replica=ranks_per_replica,
        world_size=replicas * ranks_per_replica,
        epoch=None if examples is None else epoch_of(examples, examples_per_update, last_group),
        world_size_fault=WorldSizeFault(
            factor=ranks_per_replica,
            examples_per_update_believed=examples_per_update * ranks_per_replica,
            gradient_scale=1 / ranks_per_replica,
        ),
    )


def epoch_of(examples: int, examples_per_update: int, last_group: LastGroup) -> Epoch:
    """Updates of one epoch. A last group that is not full is kept, with its true size, or dropped."""
    full, rest = divmod(examples, examples_per_update)
    kept = rest if last_group == "keep" else 0
    last = kept or (examples_per_update if full else 0)
    return Epoch(examples, last_group, full + (kept > 0), last, rest - kept)


def check_count(name: str, count: int, least: int) -> None:
    """Raises InputError if `count` is not a whole number from `least` to 10**12."""
    if isinstance(count, int) and least <= count <= MAX_COUNT:
        return
    raise InputError.of(name, count, f"a whole number from {least} to {MAX_COUNT}", "change it")


def _tokens(examples: int, context_length: int | None) -> int | None:
    return None if context_length is None else examples * context_length
