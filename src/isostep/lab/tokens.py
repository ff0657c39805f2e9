"""The view *Tokens*: the weight of one token in six common training loops."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from ..errors import InputError
from ..explain.tokens import LOOPS, LoopResult, TokenWeights, token_weights
from ..units import count
from .fields import Grid, real, whole
from .view import TIMES, Values, View, short

LOSSES = "2,4"
"""Of the default counts; left out where these have another shape."""
OCTAVES = 4
"""A bar is full at 2^4 times the exact weight, or 1 / 2^4 of it."""
HALF = 36
"""Half the width of a bar's drawing."""


def answer(values: Values, texts: Mapping[str, str]) -> dict[str, Any]:
    """What each loop does with the group, with a bar for each microbatch."""
    if values["counts"] is None:
        raise InputError.of("counts", "", "one number or more", "write for example 512,1536")
    counts, losses = values["counts"], values["losses"]
    left_out = texts.get("losses", LOSSES) == LOSSES and losses is not None and _shape(losses) != _shape(counts)
    weights = token_weights(counts, None if left_out else losses)
    places = [(d, a) for d in range(weights.counts.replicas) for a in range(weights.counts.microbatches)]
    return {
        "weights": weights,
        "loops": list(zip(LOOPS, weights.loops, strict=True)),
        "rows": [_row(weights, d, a) for d, a in places],
        "half": HALF,
        "ranges": [_range(loop) for loop in weights.loops],
        "summary": _summary(weights),
        "brief": _brief(weights),
        "notes": [*_notes(weights), *([f"The mean losses {LOSSES} are left out: they have another shape."] * left_out)],
        "show_loss": weights.losses is not None or any(loop.loss_is_nan for loop in weights.loops),
    }


def _shape(rows: Sequence[Sequence[object]]) -> list[int]:
    return [len(row) for row in rows]


def _range(loop: LoopResult) -> tuple[Fraction, Fraction]:
    """The least and the most that a token weighs, as multiples of its exact weight."""
    ratios = [ratio for row in loop.ratios for ratio in row if ratio is not None]
    return min(ratios), max(ratios)


def _brief(weights: TokenWeights) -> str:
    """One line of a small screen."""
    low, high = _range(weights.loops[1])
    if low == high == 1:
        return "mean of means: exact here"
    return f"mean of means: {short(low)}{TIMES} to {short(high)}{TIMES}"


def _row(weights: TokenWeights, d: int, a: int) -> dict[str, Any]:
    cells = [
        {"weight": loop.token_weights[d][a], "ratio": ratio, "bar": None if ratio is None else _bar(ratio)}
        for loop in weights.loops
        for ratio in [loop.ratios[d][a]]
    ]
    return {"replica": d, "microbatch": a, "tokens": weights.counts.tokens[d][a], "cells": cells}


def _bar(ratio: Fraction) -> dict[str, Any]:
    """A bar from the middle: to the right where a token weighs too much, to the left where too little."""
    octaves = math.log2(ratio)
    length = round(min(1.0, abs(octaves) / OCTAVES) * HALF, 1)
    tone = "even" if ratio == 1 else "heavy" if ratio > 1 else "light"
    return {
        "x": HALF if octaves >= 0 else round(HALF - length, 1),
        "length": length,
        "tone": tone,
        "beyond": abs(octaves) > OCTAVES,
    }


def _summary(weights: TokenWeights) -> str:
    means = weights.loops[1]
    start = f"{count(weights.counts.total, 'token')}, each of weight 1/{weights.counts.total:,} in the exact loop. "
    if means.verdict == "exact":
        return start + "In the mean of means too, for this group."
    factor = short(means.heaviest_to_lightest)
    text = start + f"In the mean of means the heaviest token counts {factor} times as much as the lightest"
    exact = weights.loops[0]
    if exact.loss is None or means.loss is None:
        return text + "."
    return text + f", and the loss is {short(means.loss)} instead of {short(exact.loss)}."


def _notes(weights: TokenWeights) -> list[str]:
    notes = [
        "uneven: some tokens count for more than others; no learning rate repairs that.",
        "scaled: all tokens count alike; plain SGD sees another learning rate.",
    ]
    lucky = [loop.name for loop in weights.loops[1:] if loop.verdict == "exact"]
    if lucky:
        notes.append(f"Exact for this group but not for every group: {' and '.join(lucky)}.")
    if any(loop.loss_is_nan for loop in weights.loops):
        notes.append(
            "NaN: a mean over no token. The weights drawn are those of torch's ignore_index, where its gradient is 0; "
            "with a mask multiplied in, every gradient is NaN too."
        )
    return notes


VIEW = View(
    name="tokens",
    title="Tokens",
    lead="How much does one supervised token count in an update? Six loops that people write, over the same group of "
    "microbatches. Only dividing sums by the count of the whole group gives every token the same weight.",
    summary="What one token weighs in six common loops, against its exact weight.",
    fields=(
        Grid("counts", "Tokens of each microbatch", "512,1536", "Commas between microbatches, spaces between replicas.",
             number=whole, expected="whole numbers"),
        Grid("losses", "Mean loss of each microbatch", LOSSES, "In the same shape; leave it empty to do without.",
             number=real, expected="numbers"),
    ),
    answer=answer,
    presets=(
        ("One short, one long microbatch", "?counts=512,1536&losses=2,4"),
        ("Two replicas, uneven", "?counts=1,7+3,5&losses="),
        ("A microbatch without tokens", "?counts=0,8+4,4&losses="),
        ("All alike", "?counts=8,8+8,8&losses="),
    ),
)  # fmt: skip
