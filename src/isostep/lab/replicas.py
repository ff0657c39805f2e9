"""The view *Replicas*: one parameter, one update over several replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from ..errors import InputError
from ..explain.replicas import Replica, ReplicaUpdate, replica_update
from ..units import count
from .axis import Axis
from .fields import Field, Real, Reals, Slider, Switch, Whole
from .view import MINUS, Values, View, machine, number, short

MAX_REPLICAS = 8
TARGETS = ("0", "2", "4", "1", "3", "5", "2", "0")
PORTIONS = ("1", "1", "4", "1", "1", "1", "1", "1")
COLUMN, LEFT = 160, 92
"""Width of a replica's column in the picture, and of the labels left of them."""
FITS = 18
"""Letters in the width of a box."""
COINCIDE = 16
"""Dots that are nearer to each other would hide one another: they are drawn as one, in their middle."""


def _fields() -> tuple[Field, ...]:
    targets = (
        Reals(f"y{i}", "Target", TARGETS[i], longest=8, least=-1e6, most=1e6, slider=Slider(-5, 10, 0.5))
        for i in range(MAX_REPLICAS)
    )
    portions = (
        Whole(f"n{i}", "Examples", PORTIONS[i], least=0, most=64, slider=Slider(0, 8)) for i in range(MAX_REPLICAS)
    )
    return (
        Whole("replicas", "Replicas", "3", least=1, most=MAX_REPLICAS, slider=Slider(1, MAX_REPLICAS)),
        Real("w", "w before the update", "1", least=-1e6, most=1e6, slider=Slider(-5, 10, 0.1)),
        Real("lr", "Learning rate", "0.1", least=0, most=1e3, slider=Slider(0.01, 1, 0.01)),
        Switch("unequal", "Unequal portions", hint="A replica's last target is repeated."),
        *targets,
        *portions,
    )


def answer(values: Values, texts: Mapping[str, str]) -> dict[str, Any]:
    """The update, its two pictures and what to say about it."""
    update = _update(values)
    same = update.exact.example_weights == update.mean_of_means.example_weights
    return {
        "update": update,
        "same": same,
        "summary": _summary(update, same),
        "brief": _brief(update, same),
        "picture": _picture(update),
        "line": _line(update),
        "notes": _notes(update, same),
    }


def _update(values: Values) -> ReplicaUpdate:
    replicas = range(values["replicas"])
    portions = [values[f"n{i}"] for i in replicas] if values["unequal"] else None
    try:
        return replica_update([values[f"y{i}"] for i in replicas], portions, values["w"], values["lr"])
    except InputError as error:
        if portions is not None and not any(portions):
            raise InputError.of("portions", "no example at all", "1 or more", "give a replica some") from error
        raise


def _summary(update: ReplicaUpdate, same: bool) -> str:
    gradient, after = number(update.exact.gradient), number(update.exact.w_after)
    text = f"The true mean of {count(update.examples, 'gradient')} is {gradient}; every replica moves to w = {after}. "
    if same:
        return text + "With equally many examples everywhere, the mean of means is the same."
    wrong = update.mean_of_means
    return text + f"The mean of means is {number(wrong.gradient)} and goes to w = {number(wrong.w_after)}."


def _brief(update: ReplicaUpdate, same: bool) -> str:
    """One line of a small screen."""
    text = f"next w = {short(update.exact.w_after)}"
    return text if same else f"{text}; mean of means {short(update.mean_of_means.w_after)}"


def _notes(update: ReplicaUpdate, same: bool) -> list[str]:
    notes = [] if same else ["The mean of means is wrong here: an example counts for more where there are few."]
    if any(not replica.targets for replica in update.replicas):
        notes.append("A replica without examples is counted too, and its mean loss is NaN in torch.")
    return notes


def targets_text(replica: Replica) -> str:
    """The targets of a replica in the width of its box: y = 0, 2 or y = 4 (3 times)."""
    if not replica.targets:
        return "no example"
    runs = [(short(y), len(list(same))) for y, same in groupby(replica.targets)]
    parts = [y if times == 1 else f"{y} ({times} times)" for y, times in runs]
    text = f"y = {', '.join(parts)}"
    while len(text) > FITS and parts:
        parts.pop()
        text = f"y = {', '.join([*parts, '…'])}"
    return text if parts else f"y: {len(replica.targets)} targets"


def _picture(update: ReplicaUpdate) -> dict[str, Any]:
    columns = [
        {
            "x": LEFT + COLUMN * index + COLUMN // 2,
            "examples": len(replica.targets),
            "targets": targets_text(replica),
            "gradient": "no gradient" if replica.gradient_mean is None else f"gradient {short(replica.gradient_mean)}",
            "alone": "does not move" if replica.gradient_mean is None else f"alone w = {short(replica.w_alone)}",
            "exact": _exact(replica),
        }
        for index, replica in enumerate(update.replicas)
    ]
    span = COLUMN * len(columns) - 16
    gradient, after = short(update.exact.gradient), short(update.exact.w_after)
    examples = count(update.examples, "example")
    return {
        "columns": columns,
        "left": LEFT + 8,
        "span": span,
        "middle": LEFT + 8 + span // 2,
        "width": LEFT + COLUMN * len(columns),
        "group": examples if len(columns) == 1 else f"a group of {examples}",
        "sum": f"sum {short(update.gradient_sum)} / {update.examples if len(columns) == 1 else examples}",
        "mean": f"= {gradient}",
        "after": f"w = {after}",
        "exact": f"gradient {machine(update.exact.gradient)}, next w = {machine(update.exact.w_after)}",
        "desc": f"Examples are scattered to the replicas, each runs backward, the all-reduce gives {gradient} to all, "
        f"and each makes the same update to w = {after}.",
    }


def _exact(replica: Replica) -> str:
    """All targets, and all digits of what is drawn short."""
    targets = f"targets {', '.join(map(machine, replica.targets)) or 'none'}"
    if replica.gradient_mean is None:
        return targets
    return f"{targets}; mean gradient {machine(replica.gradient_mean)}; alone w = {machine(replica.w_alone)}"


def _line(update: ReplicaUpdate) -> dict[str, Any]:
    alone = [(i, r.w_alone) for i, r in enumerate(update.replicas) if r.targets]
    exact, means = update.exact.w_after, update.mean_of_means.w_after
    axis = Axis.over([update.w, exact, means, *(w for _, w in alone)], 136, 608)
    rows = [
        ("before", "start", [_dot(axis, update.w)]),
        ("each alone", "alone", _dots(axis, alone)),
        ("true mean", "right", [_dot(axis, exact)]),
        ("mean of means", "right" if means == exact else "wrong", [_dot(axis, means)]),
    ]
    return {
        "start": axis.place(update.w),
        "height": 36 * len(rows) + 32,
        "ticks": [(axis.place(tick), number(tick)) for tick in axis.ticks()],
        "rows": [
            {"label": label, "tone": tone, "y": 24 + 36 * index, "dots": dots}
            for index, (label, tone, dots) in enumerate(rows)
        ],
        "desc": f"Before {number(update.w)}; alone " + ", ".join(number(w) for _, w in alone)
        + f"; by the true mean {number(exact)}; by the mean of means {number(means)}.",
    }  # fmt: skip


def _dots(axis: Axis, alone: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """A dot for each replica; those that would hide one another share it."""
    shared: list[list[tuple[int, float]]] = []
    for replica, w in sorted(alone, key=lambda each: each[1]):
        if shared and axis.place(w) - axis.place(shared[-1][0][1]) < COINCIDE:
            shared[-1].append((replica, w))
        else:
            shared.append([(replica, w)])
    return [
        {
            **_dot(axis, fmean(w for _, w in ws), ", ".join(_runs(sorted(replica for replica, _ in ws)))),
            "title": ", ".join(f"replica {replica}: w = {number(w)}" for replica, w in sorted(ws)),
        }
        for ws in shared
    ]


def _runs(indices: Sequence[int]) -> list[str]:
    """Texts of 0, 2, 3, 4: 0, and one for 2 to 4."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [part for run in runs for part in ([f"{run[0]}\N{EN DASH}{run[-1]}"] if len(run) > 2 else map(str, run))]


def _dot(axis: Axis, value: float, text: str = "") -> dict[str, Any]:
    half = 9 + 3.25 * (len(text) - 1) if text else 6
    return {"x": axis.place(value), "text": text, "half": half, "title": f"w = {number(value)}"}


def _form(texts: Mapping[str, str]) -> dict[str, Any]:
    text = texts.get("replicas", "3")
    return {"shown_rows": int(text) if text in map(str, range(1, MAX_REPLICAS + 1)) else 3}


VIEW = View(
    name="replicas",
    title="Replicas",
    lead=f"One parameter w; an example is its target y, its loss (w {MINUS} y)² / 2, its gradient w {MINUS} y. Each "
    "replica computes the gradient of its own examples; the all-reduce makes one of them, and all "
    "replicas make the same update.",
    summary="One parameter, one update: scatter, backward, all-reduce. The true mean beside the mean of means.",
    fields=_fields(),
    answer=answer,
    presets=(
        ("Three replicas, one example each", "?replicas=3&y0=0&y1=2&y2=4"),
        ("Unequal portions: 1, 1 and 4", "?replicas=3&unequal=1&y0=0&y1=2&y2=4&n0=1&n1=1&n2=4"),
        ("A replica without examples", "?replicas=3&unequal=1&y0=0&y1=2&y2=4&n0=2&n1=0&n2=2"),
        ("Several targets on a replica", "?replicas=2&y0=0,1&y1=2,4,6"),
    ),
    form=_form,
)
