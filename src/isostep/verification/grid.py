"""One update in every layout of a grid, in real processes, each compared with the reference."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.groups import groups
from ..distributed.comm import first_ranks, gathered, wrapped
from ..distributed.traffic import watched
from ..errors import PeerLostError
from ..layout import Layout
from ..ledger import format_hash
from ..units import Coverage
from ..updater import Updater
from .problem import CLIP_NORM, COEFFICIENT, build_examples, build_model, objective
from .reference import Reference, dtype_tolerance, gradient_error, mean_of_means, reference_update

LEARNING_RATE = 0.1
CONTROL_FACTOR = 1000.0
SMALL_COLLECTIVES = {2, 3}
"""Counts and vote; a third only where an overlapped backward is the first to touch some parameter."""


@dataclass(frozen=True)
class Options:
    """What to verify: layouts are pairs of examples per microbatch and replicas.

    ddp: wrap the model in DistributedDataParallel first. setup: called in every worker first; tests break the engine
    with it.
    """

    layouts: tuple[tuple[int, int], ...]
    num_examples: int = 13
    examples_per_update: int = 16
    seed: int = 0
    dtype: torch.dtype = torch.float64
    overlap: bool = False
    ddp: bool = False
    setup: Callable[[], None] | None = None


@dataclass(frozen=True)
class Observed:
    """What one replica's process saw, by its own hooks and not by the engine's word."""

    ids: tuple[int, ...]
    error: tuple[float, str]
    applied: int
    attempted: int
    loss: float | None
    num_supervised_tokens: int
    large_bytes_ratio: float
    small_collectives: int
    weights_hash: str
    left_over: int
    raised: str | None = None


def verify_worker(options: Options) -> dict[str, Any]:
    """In every worker: all layouts in order. Returns the document of `isostep verify`; rank 0's is the whole one."""
    if options.setup is not None:
        options.setup()
    examples = build_examples(options.num_examples, options.seed)
    model = build_model(options.dtype).double()
    reference = reference_update(model, examples, COEFFICIENT, CLIP_NORM)
    tolerance = dtype_tolerance(options.dtype, reference.num_tokens)
    most = max(replicas for _, replicas in options.layouts)
    process_groups = {replicas: first_ranks(replicas) for replicas in range(1, most + 1)}
    reports = []
    for examples_per_microbatch, replicas in options.layouts:
        group = process_groups[replicas]
        if group is None:
            continue
        mine = observe(options, examples, reference, examples_per_microbatch, group)
        reports.append(_report(examples_per_microbatch, replicas, gathered(mine, group), reference, tolerance))
    control, _ = gradient_error(mean_of_means(model, examples, COEFFICIENT, CLIP_NORM), reference.gradients)
    return _document(reports, reference, examples, tolerance, control)


def observe(
    options: Options,
    examples: Sequence[dict[str, Tensor]],
    reference: Reference,
    examples_per_microbatch: int,
    group: Any,
) -> Observed:
    """One update in one layout, on this replica. Errors that all replicas share are noted; a lost peer is raised."""
    model = build_model(options.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    updater = Updater(
        wrapped(model, group) if options.ddp else model,
        optimizer,
        objective(),
        clip_norm=CLIP_NORM,
        overlap=options.overlap,
        process_group=group,
    )
    seen: list[int] = []
    handed_over: list[dict[str, Tensor]] = []
    model.register_forward_pre_hook(
        lambda _, inputs, named: seen.extend(_recognised([*inputs, *named.values()][0], examples)),
        with_kwargs=True,
    )
    optimizer.register_step_pre_hook(lambda *_: handed_over.append(_gradients(model)))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # left behind by somebody: no update may take it in
    result, raised = None, None
    with watched() as traffic:
        for data_group in groups(
            examples,
            examples_per_update=options.examples_per_update,
            examples_per_microbatch=examples_per_microbatch,
            seed=options.seed,
        ):
            try:
                result = updater.update(data_group)
            except PeerLostError:
                raise
            except Exception as error:
                raised = f"{type(error).__name__}: {error}"
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return Observed(
        ids=tuple(seen),
        error=gradient_error(handed_over[0], reference.gradients) if handed_over else (math.inf, ""),
        applied=len(handed_over),
        attempted=updater.totals.attempted,
        loss=None if result is None else result.loss,
        num_supervised_tokens=0 if result is None else result.counts.supervised_tokens,
        large_bytes_ratio=traffic.large_bytes / gradient_bytes,
        small_collectives=traffic.small_calls,
        weights_hash=_weights_hash(model),
        left_over=sum(p.grad is not None and bool(p.grad.any()) for p in model.parameters()),
        raised=raised,
    )


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


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _weights_hash(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _report(
    examples_per_microbatch: int,
    replicas: int,
    observed: Sequence[Observed],
    reference: Reference,
    tolerance: float,
) -> dict[str, Any]:
    """One entry of `layouts`, from what all replicas saw; `problems` says why it is not ok."""
    first = observed[0]
    num_examples = reference.num_examples
    accumulate = Layout(examples_per_microbatch, replicas).accumulate(num_examples)
    ids = [example_id for replica in observed for example_id in replica.ids]
    worst = max((o.error for o in observed), key=lambda error: error[0])
    loss_error = math.inf if first.loss is None else abs(first.loss - reference.loss) / abs(reference.loss)
    wanted_ratio, wanted_small = (1.0, SMALL_COLLECTIVES) if replicas > 1 else (0.0, {0})
    problems = [f"raised: {o.raised}" for o in observed[:1] if o.raised]
    checks = {
        f"gradient error {worst[0]:.1e} of {worst[1]} above {tolerance:.1e}": worst[0] <= tolerance,
        f"loss off by {loss_error:.1e}": loss_error <= tolerance,
        "other examples went into forward": sorted(ids) == list(range(num_examples)),
        f"supervised tokens {first.num_supervised_tokens}, not {reference.num_supervised_tokens}":
            first.num_supervised_tokens == reference.num_supervised_tokens,
        f"optimizer ran {[o.applied for o in observed]} times, not once": all(o.applied == 1 for o in observed),
        f"attempted {first.attempted}, not 1": all(o.attempted == 1 for o in observed),
        "replicas hold different weights": len({o.weights_hash for o in observed}) == 1,
        "gradients left over after the update": not any(o.left_over for o in observed),
        f"gradient bytes reduced {[o.large_bytes_ratio for o in observed]} times":
            all(abs(o.large_bytes_ratio - wanted_ratio) <= 1e-9 for o in observed),
        f"{[o.small_collectives for o in observed]} small collectives, not {sorted(wanted_small)}":
            all(o.small_collectives in wanted_small for o in observed),
    }  # fmt: skip
    problems += [problem for problem, fine in checks.items() if not fine]
    return {
        "layout": {
            "examples_per_microbatch": examples_per_microbatch,
            "accumulate": accumulate,
            "replicas": replicas,
        },
        "gradient_error": {"max": worst[0], "parameter": worst[1]},
        "loss": first.loss,
        "ids_hash": format_hash(Coverage.of(ids)),
        "num_examples": len(ids),
        "num_supervised_tokens": first.num_supervised_tokens,
        "reduced_bytes_ratio": max(o.large_bytes_ratio for o in observed),
        "attempted": first.attempted,
        "applied": max(o.applied for o in observed),
        "ok": not problems,
        "problems": problems,
    }


def _document(
    reports: list[dict[str, Any]],
    reference: Reference,
    examples: Sequence[Any],
    tolerance: float,
    control: float,
) -> dict[str, Any]:
    factor = control / tolerance
    return {
        "schema": 1,
        "passed": all(report["ok"] for report in reports) and factor >= CONTROL_FACTOR,
        "tolerance": tolerance,
        "reference": {
            "ids_hash": format_hash(Coverage.of(range(len(examples)))),
            "loss": reference.loss,
            "num_supervised_tokens": reference.num_supervised_tokens,
        },
        "layouts": reports,
        "control": {"gradient_error": {"max": control}, "factor": factor},
    }
