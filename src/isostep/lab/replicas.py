"""The view *Replicas*: one parameter, one update over several replicas."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from ..errors import InputError
from ..explain.replicas import Replica, ReplicaUpdate, replica_update
from ..units import count
from .axis import Axis
from .fields import Field, Real, Reals, Slider, Switch, Whole
from .view import MINUS, TIMES, Values, View, number

MAX_REPLICAS = 8
TARGETS = ("0", "2", "4", "1", "3", "5", "2", "0")
PORTIONS = ("1", "1", "4", "1", "1", "1", "1", "1")
COLUMN, LEFT = 148, 92
"""Width of a replica's column in the picture, and of the labels left of them."""


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


def _notes(update: ReplicaUpdate, same: bool) -> list[str]:
    notes = [] if same else ["The mean of means is wrong here: an example counts for more where there are few."]
    if any(not replica.targets for replica in update.replicas):
        notes.append("A replica without examples is counted too, and its mean loss is NaN in torch.")
    return notes


def targets_text(replica: Replica) -> str:
    """The targets of a replica in the width of its box: y = 0, 2 or y = 4 (3 times)."""
    if not replica.targets:
        return "no example"
    runs = [(number(y), len(list(same))) for y, same in groupby(replica.targets)]
    text = "y = " + ", ".join(y if times == 1 else f"{y} {TIMES} {times}" for y, times in runs)
    return text if len(text) <= 17 else f"{text[:15]} …"


def _picture(update: ReplicaUpdate) -> dict[str, Any]:
    columns = [
        {
            "x": LEFT + COLUMN * index + COLUMN // 2,
            "examples": len(replica.targets),
            "targets": targets_text(replica),
            "gradient": "no gradient" if replica.gradient_mean is None else f"gradient {number(replica.gradient_mean)}",
            "alone": "does not move" if replica.gradient_mean is None else f"alone w = {number(replica.w_alone)}",
        }
        for index, replica in enumerate(update.replicas)
    ]
    span = COLUMN * len(columns) - 16
    gradient, after = number(update.exact.gradient), number(update.exact.w_after)
    examples = count(update.examples, "example")
    return {
        "columns": columns,
        "left": LEFT + 8,
        "span": span,
        "middle": LEFT + 8 + span // 2,
        "width": LEFT + COLUMN * len(columns),
        "group": examples if len(columns) == 1 else f"a group of {examples}",
        "sum": f"sum {number(update.gradient_sum)} / {examples}",
        "mean": f"= {gradient}",
        "after": f"w = {after}",
        "desc": f"Examples are scattered to the replicas, each runs backward, the all-reduce gives {gradient} to all, "
        f"and each makes the same update to w = {after}.",
    }


def _line(update: ReplicaUpdate) -> dict[str, Any]:
    alone = [(str(i), r.w_alone) for i, r in enumerate(update.replicas) if r.targets]
    exact, means = update.exact.w_after, update.mean_of_means.w_after
    axis = Axis.over([update.w, exact, means, *(w for _, w in alone)], 136, 608)
    rows = [
        ("before", "start", [("", update.w)]),
        ("each alone", "alone", alone),
        ("true mean", "right", [("", exact)]),
        ("mean of means", "right" if means == exact else "wrong", [("", means)]),
    ]
    return {
        "start": axis.place(update.w),
        "height": 36 * len(rows) + 32,
        "ticks": [(axis.place(tick), number(tick)) for tick in axis.ticks()],
        "rows": [
            {"label": label, "tone": tone, "y": 24 + 36 * index, "dots": [_dot(axis, *dot) for dot in dots]}
            for index, (label, tone, dots) in enumerate(rows)
        ],
        "desc": f"Before {number(update.w)}; alone " + ", ".join(number(w) for _, w in alone)
        + f"; by the true mean {number(exact)}; by the mean of means {number(means)}.",
    }  # fmt: skip


def _dot(axis: Axis, text: str, value: float) -> dict[str, Any]:
    return {"x": axis.place(value), "text": text, "title": f"{f'replica {text}: ' if text else ''}w = {number(value)}"}


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
