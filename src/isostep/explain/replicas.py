"""One update of one parameter over several replicas: the true mean, and the mean of replica means.

The model is a single parameter w; an example is its target y, with loss (w - y)^2 / 2 and gradient w - y.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..errors import InputError
from .batch import check_count

MAX_NUMBER = 1e9
MAX_EXAMPLES = 10_000


@dataclass(frozen=True)
class Replica:
    """The examples of one replica, and what it computes by itself."""

    targets: tuple[float, ...]
    gradient_sum: float
    gradient_mean: float | None
    """None without examples: a mean over none does not exist."""
    w_alone: float
    """The parameter after an update from this replica's mean only; w itself without examples."""


@dataclass(frozen=True)
class Join:
    """One way to join the replicas' gradients, and the update that it gives."""

    gradient: float
    w_after: float
    example_weights: tuple[Fraction | None, ...]
    """The weight of one example of each replica in `gradient`; None for a replica without examples."""


@dataclass(frozen=True)
class ReplicaUpdate:
    """One update over all replicas, joined rightly (`exact`) and by the common fault (`mean_of_means`)."""

    w: float
    lr: float
    replicas: tuple[Replica, ...]
    exact: Join
    """Sums of gradients / examples of the whole group."""
    mean_of_means: Join
    """Sum of the replicas' means / replicas; a replica without examples adds nothing, but is counted."""

    @property
    def examples(self) -> int:
        """Examples of the group."""
        return sum(len(replica.targets) for replica in self.replicas)

    @property
    def gradient_sum(self) -> float:
        """Sum of the gradients of all examples of the group."""
        return math.fsum(replica.gradient_sum for replica in self.replicas)


@dataclass(frozen=True)
class VectorUpdate:
    """One update of several parameters from one gradient per replica, each over equally many examples."""

    weights: tuple[float, ...]
    lr: float
    gradients: tuple[tuple[float, ...], ...]
    """One per replica, in rank order."""
    weights_alone: tuple[tuple[float, ...], ...]
    """What each replica would reach by itself."""
    gradient: tuple[float, ...]
    weights_after: tuple[float, ...]


def replica_update(
    targets: Sequence[Sequence[float]],
    portions: Sequence[int] | None = None,
    w: float = 1.0,
    lr: float = 0.1,
) -> ReplicaUpdate:
    """One update from the targets of each replica.

    portions: examples per replica; a replica's last target is repeated up to its portion, and 0 leaves it
    without examples. None takes the targets as they are.
    Raises InputError where the group is empty or too large, the portions do not fit the targets, or a number
    is not finite or out of range.
    """
    _check_lr(lr)
    check_number("w", w)
    for target in (y for replica in targets for y in replica):
        check_number("targets", target)
    expanded = [tuple(replica) for replica in targets]
    if portions is not None:
        expanded = _with_portions(expanded, portions)
    examples = sum(len(replica) for replica in expanded)
    if not 1 <= examples <= MAX_EXAMPLES:
        raise InputError.of(
            "targets", f"{examples} examples", f"1 to {MAX_EXAMPLES}", "give each replica a few targets"
        )
    replicas = tuple(_replica(replica, w, lr) for replica in expanded)
    return ReplicaUpdate(w, lr, replicas, _exact(replicas, w, lr), _mean_of_means(replicas, w, lr))


def vector_update(weights: Sequence[float], gradients: Sequence[Sequence[float]], lr: float = 0.1) -> VectorUpdate:
    """One update from the mean gradient of each replica. Raises as `average_step` does."""
    after = average_step(weights, gradients, lr)
    return VectorUpdate(
        weights=tuple(weights),
        lr=lr,
        gradients=tuple(tuple(gradient) for gradient in gradients),
        weights_alone=tuple(average_step(weights, [gradient], lr) for gradient in gradients),
        gradient=_average(gradients),
        weights_after=after,
    )


def average_step(weights: Sequence[float], gradients: Sequence[Sequence[float]], lr: float) -> tuple[float, ...]:
    """The weights after one update by the average of the replicas' gradients.

    gradients: one per replica, each as long as `weights` and over equally many examples.
    Raises InputError where lengths differ, nothing is given, or a number is not finite or out of range.
    """
    _check_lr(lr)
    if not weights or not gradients:
        raise InputError.of("gradients", list(gradients), "one or more, and one or more weights", "give both")
    for weight in weights:
        check_number("weights", weight)
    for gradient in gradients:
        if len(gradient) != len(weights):
            raise InputError.of(
                "gradients",
                len(gradient),
                f"{len(weights)} numbers in each, one per weight",
                "make them equally long",
            )
        for number in gradient:
            check_number("gradients", number)
    return tuple(weight - lr * slope for weight, slope in zip(weights, _average(gradients), strict=True))


def check_number(name: str, number: float) -> None:
    """Raises InputError if `number` is not finite, or beyond 1e9 in size."""
    if not abs(number) <= MAX_NUMBER:
        raise InputError.of(name, number, f"a number from {-MAX_NUMBER:g} to {MAX_NUMBER:g}", "choose another")


def _check_lr(lr: float) -> None:
    check_number("lr", lr)
    if lr <= 0:
        raise InputError.of("lr", lr, "a learning rate above 0", "choose one such as 0.1")


def _with_portions(targets: list[tuple[float, ...]], portions: Sequence[int]) -> list[tuple[float, ...]]:
    if len(portions) != len(targets):
        raise InputError.of(
            "portions",
            len(portions),
            f"{len(targets)} portions, one per replica of the targets",
            "give as many portions as replicas",
        )
    for index, (portion, replica) in enumerate(zip(portions, targets, strict=True)):
        check_count("portions", portion, least=0)
        if portion and not replica:
            raise InputError.of("targets", replica, f"a target for replica {index}", "add one")
        if 0 < portion < len(replica):
            raise InputError.of(
                "portions",
                portion,
                f"0, or at least the {len(replica)} targets of replica {index}",
                "raise it, or remove targets",
            )
    if sum(portions) > MAX_EXAMPLES:
        raise InputError.of("portions", sum(portions), f"at most {MAX_EXAMPLES} examples", "choose smaller portions")
    return [
        replica + replica[-1:] * (portion - len(replica)) if portion else ()
        for portion, replica in zip(portions, targets, strict=True)
    ]


def _replica(targets: tuple[float, ...], w: float, lr: float) -> Replica:
    gradient_sum = math.fsum(w - y for y in targets)
    if not targets:
        return Replica(targets, gradient_sum, None, w)
    mean = gradient_sum / len(targets)
    return Replica(targets, gradient_sum, mean, w - lr * mean)


def _exact(replicas: Sequence[Replica], w: float, lr: float) -> Join:
    examples = sum(len(replica.targets) for replica in replicas)
    gradient = math.fsum(replica.gradient_sum for replica in replicas) / examples
    weights = tuple(Fraction(1, examples) if replica.targets else None for replica in replicas)
    return Join(gradient, w - lr * gradient, weights)


def _mean_of_means(replicas: Sequence[Replica], w: float, lr: float) -> Join:
    gradient = math.fsum(replica.gradient_mean or 0.0 for replica in replicas) / len(replicas)
    weights = tuple(
        Fraction(1, len(replicas) * len(replica.targets)) if replica.targets else None for replica in replicas
    )
    return Join(gradient, w - lr * gradient, weights)


def _average(gradients: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(math.fsum(column) / len(gradients) for column in zip(*gradients, strict=True))
