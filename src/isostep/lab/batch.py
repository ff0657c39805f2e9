"""The view *Batch*: how the sizes of one update multiply, and which ranks are replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..explain.batch import BatchSizes, Epoch, batch_sizes
from ..units import count
from .fields import Choice, Field, Slider, Whole
from .view import TIMES, Values, View

MAX_SIZE = 1_000_000
DRAWN = 8
"""Replicas and stages of the grid that are drawn."""


def _size(name: str, label: str, default: str, most: int = 16) -> Field:
    return Whole(name, label, default, least=1, most=MAX_SIZE, slider=Slider(1, most))


def answer(values: Values, texts: Mapping[str, str]) -> dict[str, Any]:
    """The ladder of units, the grid of ranks and the fault of taking the world size for the replicas."""
    sizes = batch_sizes(
        values["m"], values["accumulate"], values["replicas"], values["stages"], values["slices"],
        values["context"], values["examples"], values["last"],
    )  # fmt: skip
    return {
        "sizes": sizes,
        "ladder": _ladder(sizes),
        "epoch": None if sizes.epoch is None else _epoch(sizes.epoch),
        "grid": _grid(sizes),
        "left_out": _left_out(sizes),
        "summary": _summary(sizes),
        "brief": f"{count(sizes.examples_per_update, 'example')}, {count(sizes.world_size, 'rank')}",
    }


def _ladder(sizes: BatchSizes) -> list[dict[str, Any]]:
    context = sizes.context_length
    rungs = (
        ("example", "", None, 1),
        ("microbatch", "m", sizes.examples_per_microbatch, sizes.examples_per_microbatch),
        ("replica, per update", "A", sizes.microbatches_per_replica, sizes.examples_per_replica),
        ("update", "D", sizes.replicas, sizes.examples_per_update),
    )
    return [
        {
            "scope": scope,
            "letter": letter,
            "factor": factor,
            "examples": examples,
            "tokens": None if context is None else examples * context,
        }
        for scope, letter, factor, examples in rungs
    ]


def _epoch(epoch: Epoch) -> str:
    text = f"An epoch of {count(epoch.examples, 'example')} is {count(epoch.updates, 'update')}"
    if epoch.updates:
        text += f", the last of {count(epoch.examples_in_last_update, 'example')}"
    if epoch.examples_dropped:
        text += f"; {count(epoch.examples_dropped, 'example')} dropped"
    return f"{text}."


def _grid(sizes: BatchSizes) -> list[list[str]]:
    return [
        [_ranks(sizes.ranks(replica, stage)) for stage in range(min(sizes.stages, DRAWN))]
        for replica in range(min(sizes.replicas, DRAWN))
    ]


def _ranks(ranks: range) -> str:
    return f"rank {ranks[0]:,}" if len(ranks) == 1 else f"ranks {ranks[0]:,}\N{EN DASH}{ranks[-1]:,}"


def _left_out(sizes: BatchSizes) -> str:
    beyond = [
        count(size - DRAWN, name)
        for size, name in ((sizes.replicas, "replica"), (sizes.stages, "stage"))
        if size > DRAWN
    ]
    return f"{' and '.join(beyond)} more, not drawn. " if beyond else ""


def _summary(sizes: BatchSizes) -> str:
    text = f"{count(sizes.examples_per_update, 'example')} per update, {sizes.examples_per_replica:,} on each replica"
    if sizes.tokens_per_update is not None:
        text += f"; at most {count(sizes.tokens_per_update, 'token')}"
    return f"{text}. World size {sizes.world_size:,}: {count(sizes.replicas, 'replica')} of " + (
        f"{count(sizes.ranks_per_replica, 'rank')}."
    )


VIEW = View(
    name="batch",
    title="Batch",
    lead=f"Examples per update are m {TIMES} A {TIMES} D: a microbatch, accumulated, on every replica. Stages and "
    "tensor slices multiply the ranks, and not the batch.",
    summary="How m, A and D multiply to the examples of one update; which ranks are replicas, and which are not.",
    fields=(
        _size("m", "m, examples per microbatch", "2"),
        _size("accumulate", "A, microbatches per replica", "8", 32),
        _size("replicas", "D, replicas", "2"),
        _size("stages", "P, stages", "2", 8),
        _size("slices", "T, tensor slices", "1", 8),
        Whole("context", "Context length", "", "Tokens of one example, at most.", least=1, most=10**9,
              slider=Slider(128, 8192, 128), optional=True),
        Whole("examples", "Examples of the data set", "", "For the updates of one epoch.", least=1, most=10**12,
              slider=Slider(100, 20000, 100), optional=True),
        Choice("last", "A last group that is not full", "keep", options=(("keep", "keep it"), ("drop", "drop it"))),
    ),
    answer=answer,
    presets=(
        ("32 examples per update", "?m=2&accumulate=8&replicas=2&stages=2&slices=1"),
        ("Tokens, and an epoch", "?m=2&accumulate=8&replicas=2&stages=1&slices=1&context=2048&examples=10000"),
        ("Stages and slices", "?m=1&accumulate=4&replicas=4&stages=4&slices=2"),
    ),
)  # fmt: skip
