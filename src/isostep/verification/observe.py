"""One update in one layout, as this process sees it: by hooks of its own, and not by the engine's word."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data.groups import groups
from ..distributed.comm import wrapped
from ..distributed.stages import StagedModel
from ..distributed.traffic import watched
from ..errors import CoverageError, NonFiniteError, PeerLostError
from ..grouping import hosted
from ..models.decoder import Decoder
from ..result import UpdateResult
from ..schedule.generate import SCHEDULES
from ..updater import Updater
from .problem import CLIP_NORM, build_model, objective, smallest_gradient
from .reference import Reference, gradient_error

LEARNING_RATE = 0.1
SHARED_ERRORS = (CoverageError, NonFiniteError)
"""Raised on every rank, after which all of them go on."""


class Row(NamedTuple):
    """A layout of the grid: m, D, P and the schedule of the stages; None where the model is in one piece."""

    examples_per_microbatch: int
    replicas: int
    stages: int = 1
    schedule: str | None = None

    @property
    def ranks(self) -> int:
        """D x P."""
        return self.replicas * self.stages

    @property
    def chunks(self) -> int:
        """Of the whole model: P x v."""
        return 1 if self.schedule is None else self.stages * SCHEDULES[self.schedule].chunks


@dataclass(frozen=True)
class Options:
    """What to verify.

    tied: the head is the embedding's matrix. ddp: wrap the model in DistributedDataParallel first; not with stages.
    setup: called in every worker first; tests break the engine with it.
    """

    layouts: Sequence[Row | tuple[int, int]]
    num_examples: int = 13
    examples_per_update: int = 16
    seed: int = 0
    dtype: torch.dtype = torch.float64
    overlap: bool = False
    ddp: bool = False
    tied: bool = False
    setup: Callable[[], None] | None = None

    @property
    def rows(self) -> list[Row]:
        """The layouts; a pair is one in one piece."""
        return [layout if isinstance(layout, Row) else Row(*layout) for layout in self.layouts]

    def model(self) -> Decoder:
        """The same in every layout, with a layer for each chunk of the layout that has most."""
        return build_model(self.dtype, max(row.chunks for row in self.rows), self.tied)


@dataclass(frozen=True)
class Observed:
    """What one rank's process saw.

    parameters: by name, of each that it holds, a hash of the weights and the bytes of the gradient.
    """

    ids: tuple[int, ...]
    error: tuple[float, str]
    applied: int
    attempted: int
    loss: float | None
    norm: float | None
    num_supervised_tokens: int
    large_bytes: int
    small_collectives: int
    parameters: dict[str, tuple[str, int]]
    left_over: int
    raised: str | None


def observe(
    options: Options, row: Row, examples: Sequence[dict[str, Tensor]], reference: Reference, group: Any
) -> Observed:
    """One update on this rank of `group`. Errors that all ranks share are noted; others are raised."""
    whole = options.model()
    names = {id(p): name for name, p in whole.named_parameters()}
    model = whole
    if row.schedule is not None:
        model = StagedModel(whole.as_layers(), stages=row.stages, schedule=row.schedule)
    named = {names[id(p)]: p for p in model.parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    updater = Updater(
        wrapped(model, group) if options.ddp else model,
        optimizer,
        objective(),
        clip_norm=CLIP_NORM,
        overlap=options.overlap,
        process_group=group,
    )
    seen: list[list[int]] = []
    handed_over: list[dict[str, Tensor]] = []
    whole.embedding.register_forward_pre_hook(lambda _, inputs: seen.append(_recognised(inputs[0], examples)))
    optimizer.register_step_pre_hook(lambda *_: handed_over.append(_gradients(named)))
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)  # left behind by somebody: no update may take it in
    result, raised, calls = _updated(updater, options, row, examples)
    expected = {name: reference.gradients[name] for name in named}
    smallest = smallest_gradient(options.dtype)
    return Observed(
        ids=tuple(i for forward in seen[: len(seen) - _filler(model, row, options, updater.replica)] for i in forward),
        error=gradient_error(handed_over[0], expected) if handed_over else (math.inf, ""),
        applied=len(handed_over),
        attempted=updater.totals.attempted,
        loss=None if result is None else result.loss,
        norm=None if result is None else result.grad_norm,
        num_supervised_tokens=0 if result is None else result.counts.supervised_tokens,
        large_bytes=sum(nbytes for nbytes in calls if nbytes >= smallest),
        small_collectives=sum(nbytes < smallest for nbytes in calls),
        parameters={name: (_hash(p), p.numel() * p.element_size()) for name, p in named.items()},
        left_over=sum(p.grad is not None and bool(p.grad.any()) for p in named.values()),
        raised=raised,
    )


def _updated(
    updater: Updater, options: Options, row: Row, examples: Sequence[dict[str, Tensor]]
) -> tuple[UpdateResult | None, str | None, list[int]]:
    """The result of the update, or the error that was noted instead; and the bytes of each collective on the way."""
    result, raised = None, None
    with watched() as traffic:
        for data_group in groups(
            examples,
            examples_per_update=options.examples_per_update,
            examples_per_microbatch=row.examples_per_microbatch,
            seed=options.seed,
        ):
            try:
                result = updater.update(data_group)
            except PeerLostError:
                raise
            except Exception as error:
                if row.schedule is not None and not isinstance(error, SHARED_ERRORS):
                    raise
                raised = f"{type(error).__name__}: {error}"
    return result, raised, traffic.calls


def _filler(model: nn.Module, row: Row, options: Options, replica: int) -> int:
    """Microbatches that the schedule has beyond this replica's own; they run last, and add nothing."""
    if not isinstance(model, StagedModel):
        return 0
    own = len(hosted(-(-options.num_examples // row.examples_per_microbatch), replica, row.replicas))
    return model.schedule(own).num_microbatches - own if own else 0


def _recognised(input_ids: Tensor, examples: Sequence[dict[str, Tensor]]) -> list[int]:
    """Ids of the examples in a padded batch, by their tokens alone; -1 for one that is none of them."""
    found = []
    for tokens in input_ids:
        matches = (
            i for i, e in enumerate(examples)
            if torch.equal(tokens[: len(e["input_ids"])], e["input_ids"]) and not tokens[len(e["input_ids"]) :].any()
        )  # fmt: skip
        found.append(next(matches, -1))
    return found


def _gradients(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


def _hash(parameter: Tensor) -> str:
    return hashlib.sha256(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
