"""What one rank writes down while it is watched: a list of events, in the order in which they happened. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Sketch = np.ndarray
"""A gradient under a fixed linear map, float64, shape (sketch.SIZE,)."""


@dataclass(slots=True)
class Call:
    """One call of a loss function whose elements got a gradient in a backward pass.

    The loss was sum(elements) / denominator for a mean, sum(elements) for a sum, the elements themselves for "none".
    """

    site: str
    """file:line"""
    key: int
    """Identity of the call's place: a hash of its stack."""
    order: int
    """Counts the calls of loss functions."""
    forward: int
    """Index of the forward pass of a whole model before or around it."""
    function: str
    reduction: str
    denominator: float
    """What a mean divides by, over the supervised elements; for other reductions, what it would."""
    tokens: int
    """Supervised elements."""
    elements: int
    """All elements, the masked ones included."""
    total: float
    """Sum of the elements."""
    weight: float
    """Mean over the supervised elements of the gradient that arrived at each, and below its extremes."""
    min: float
    max: float
    examples: tuple[np.ndarray, np.ndarray] | None
    """Per example of the microbatch: supervised elements, and the sum of their weights."""
    scalars: tuple[float, ...] = ()
    """Numbers that the loss was multiplied by on its way to backward."""
    targets: int = 0
    """Hash of the targets."""

    @property
    def value(self) -> float:
        """What the call returned; for "none", the mean."""
        if self.reduction == "sum":
            return self.total
        return self.total / (self.denominator or 1)


@dataclass(slots=True)
class Forward:
    """A forward pass of a whole model with gradients on."""

    index: int
    rows: int | None
    """Examples, by the first axis of the first tensor."""
    hashes: np.ndarray | None
    """uint64, one per example; 0 where the content says nothing."""
    reduces: bool
    """A DistributedDataParallel that reduces in the backward pass of this forward."""


@dataclass(slots=True)
class Noise:
    """The state of the generator at the first dropout of a forward pass."""

    forward: int
    state: int


@dataclass(slots=True)
class BatchNorm:
    """Batch statistics were taken."""

    where: str


@dataclass(slots=True)
class Backward:
    """One backward pass."""

    index: int
    where: str
    idiom: str
    value: float
    """Of its root."""
    calls: list[Call] = field(default_factory=list)
    sketches: dict[int, Sketch] = field(default_factory=dict)
    """Per optimizer: the local gradient of its parameters, before any reduction."""
    unseen: bool = False
    """Part of the root comes from what a loss call comes from too, and met no known loss function."""
    bypassed: bool = False
    """Part of the root reached parameters and met no known loss function."""


@dataclass(slots=True)
class Step:
    """An optimizer was called, or a GradScaler chose not to call it."""

    optimizer: int
    name: str
    where: str
    applied: bool
    first_backward: int
    """The first backward pass that this gradient can come from; later than the last update for a repeated closure."""
    sketch: Sketch | None
    """The gradient before clipping."""
    final: Sketch | None
    """The gradient that was applied."""
    loss_scale: float | None
    """Of a GradScaler."""
    moved: bool | None
    learning_rate: float
    gradients: int
    """Parameters that had a gradient."""
    low_precision: bool
    in_parts: bool
    """The sketches are of this rank's part; those of all ranks add up."""
    checksum: Sketch | None
    """Sketch of the parameters after the update."""
    old_graphs: int
    """Graphs alive from two or more updates before."""
    broken: bool
    """A loss call since the last update gave a value that is not finite."""
    missing: tuple[str, ...] = ()
    """Parameters with a gradient that no optimizer holds."""


@dataclass(slots=True)
class Clip:
    """Gradients were clipped."""

    optimizers: tuple[int, ...]
    where: str
    by: str
    coefficient: float
    scaled: bool
    """They carried a loss scale."""


@dataclass(slots=True)
class ZeroGrad:
    """Gradients were cleared."""

    optimizers: tuple[int, ...]
    where: str


@dataclass(slots=True)
class SchedulerStep:
    """A scheduler went on by one."""

    scheduler: int
    name: str
    optimizer: int
    where: str


@dataclass(slots=True)
class Logged:
    """The value of a tensor was read."""

    where: str
    value: float


@dataclass(slots=True)
class Batch:
    """A DataLoader gave a batch."""

    loader: int
    """Counts iterators: a new epoch has a new one."""
    indices: tuple[int, ...]
    replacement: bool


Event = Forward | Noise | BatchNorm | Backward | Step | Clip | ZeroGrad | SchedulerStep | Logged | Batch


@dataclass(slots=True)
class Log:
    """Everything that one rank saw."""

    rank: int
    world: int
    events: list[Any] = field(default_factory=list)
    ended: bool = True
    """The script came to its own end, or was stopped after the updates asked for; False if it failed."""
    stopped: bool = False
    """It was stopped by the audit."""
    in_backward: bool = False
    """An optimizer ran inside a backward pass, where it cannot be followed."""
    notes: list[str] = field(default_factory=list)
    """Why something could not be seen."""
