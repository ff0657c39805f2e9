"""Faults that people met in pipelines: each as a small update through real stages, beside the value that they saw.

The numbers are those of the public issues that each test names (repository, number).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from isostep import InputError, Term, Updater
from isostep.distributed.pipeline import Runtime, Stage
from isostep.distributed.stages import StagedComm, StagedModel
from isostep.models.decoder import Decoder, DecoderConfig
from isostep.schedule import validate
from isostep.schedule.generate import generate
from isostep.schedule.ir import Schedule
from pool import Pool, WorkerError

Patch = Callable[[pytest.MonkeyPatch], None]


class Probe(nn.Module):
    """w[i] for token i: where a loss is the sum of these, the gradient of w is the weight of each token."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(tokens, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        """ids: int64 [rows, length]. Returns float64 of the same shape."""
        return self.w[ids]


class Gain(nn.Module):
    """Multiplies by a parameter that is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.gain


class Slope(nn.Module):
    """Adds `slope` times a parameter that is 0: behind it, a mean over one element has that gradient."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.slope = slope

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.slope * self.w


MEAN = Term("mean", lambda outputs, _: outputs.sum(), lambda batch: batch.numel())
ONE = torch.zeros(1, 1, dtype=torch.float64)


def updated(
    layers: Sequence[nn.Module],
    batches: Sequence[Any],
    term: Term = MEAN,
    clip_norm: float | None = None,
    mutate: Patch = lambda _: None,
) -> tuple[dict[str, Any], float | None]:
    """In a worker: one update over two stages. What its optimizer gets, by name, and the norm."""
    given: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        staged = StagedModel(layers, stages=2, costs=[1.0] * len(layers))
        names = [p.name for p in staged.table]
        own = {name: p for name, p in zip(names, staged.all_parameters, strict=True) if not p.is_meta}
        optimizer = torch.optim.SGD(staged.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(
            lambda *_: given.update({name: p.grad.tolist() for name, p in own.items() if p.grad is not None})
        )
        result = Updater(staged, optimizer, term, clip_norm=clip_norm).update(batches)
        let_go(staged)
    return given, result.grad_norm


def let_go(staged: StagedModel) -> None:
    del staged._stages, staged._runtimes
    for group in (staged.row, staged.column, *{group for _, group in staged.tied}):
        dist.destroy_process_group(group)


def merged(results: Sequence[tuple[dict[str, Any], float | None]]) -> dict[str, Any]:
    """The gradients of all ranks."""
    return {name: gradient for gradients, _ in results for name, gradient in gradients.items()}


# ------------------------------------------------------- rescaled-earlier: pytorch/torchtitan 1733


def _eight_microbatches(_: Any) -> tuple[dict[str, Any], float | None]:
    return updated([Probe(8), Gain()], [torch.tensor([[i]]) for i in range(8)])


def _torch_steps_twice(group: Any) -> list[float] | None:
    """Two steps of four microbatches by torch's defaults: each divides all gradients that it finds by four."""
    rank = dist.get_rank(group)
    layer = [Probe(8), Gain()][rank]
    schedule = ScheduleGPipe(
        PipelineStage(layer, rank, 2, torch.device("cpu"), group=group), 4, lambda out, _: out.sum()
    )
    for ids in (torch.arange(4), torch.arange(4, 8)):
        schedule.step(*([ids[:, None]] if rank == 0 else []), target=ids)
    return layer.w.grad.tolist() if isinstance(layer, Probe) and layer.w.grad is not None else None


def test_earlier_microbatches_are_not_scaled_again(pair: Pool) -> None:
    assert merged(pair.run(2, _eight_microbatches))["layers.0.w"] == pytest.approx([1 / 8] * 8, abs=1e-15)
    seen = pair.run(2, _torch_steps_twice)[0]
    assert seen == pytest.approx([1 / 16] * 4 + [1 / 4] * 4, abs=1e-15)


# ---------------------------------------------------------- norm-per-stage: pytorch/torchtitan 596


def _three_and_four(_: Any, per_stage: bool) -> tuple[dict[str, Any], float | None]:
    def own(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(StagedComm, "everywhere", lambda self, squares: [square or 0.0 for square in squares])

    mutate = own if per_stage else lambda _: None
    return updated([Slope(3.0), Slope(4.0)], [ONE], clip_norm=1.0, mutate=mutate)


def test_stages_are_clipped_by_one_norm(pair: Pool) -> None:
    results = pair.run(2, _three_and_four, False)
    assert merged(results) == pytest.approx({"layers.0.w": 3 * 0.2, "layers.1.w": 4 * 0.2}, rel=1e-5)
    assert [norm for _, norm in results] == [5.0, 5.0]
    seen = merged(pair.run(2, _three_and_four, True))
    assert seen == pytest.approx({"layers.0.w": 3 * (1 / 3), "layers.1.w": 4 * (1 / 4)}, rel=1e-5)


# ------------------------------------- tied-weights: NVIDIA/Megatron-LM 7227, and piper 13


def _tied_one_and_two(_: Any, mutant: str) -> tuple[dict[str, Any], float | None]:
    first, last = Slope(1.0), Slope(2.0)
    last.w = first.w

    def mutate(patch: pytest.MonkeyPatch) -> None:
        if mutant == "not summed":
            original = StagedModel._groups
            patch.setattr(StagedModel, "_groups", lambda self, ranks: (*original(self, ranks)[:2], []))
        elif mutant == "counted twice":
            squares_of = lambda self, squares: self._row_sum([square or 0.0 for square in squares])  # noqa: E731
            patch.setattr(StagedComm, "everywhere", squares_of)

    return updated([first, last], [ONE], mutate=mutate)


def test_holders_of_a_tied_parameter_get_the_sum_and_it_counts_once(pair: Pool) -> None:
    assert pair.run(2, _tied_one_and_two, "") == [({"layers.0.w": 3.0}, 3.0)] * 2
    assert [gradients["layers.0.w"] for gradients, _ in pair.run(2, _tied_one_and_two, "not summed")] == [1.0, 2.0]
    seen = [norm for _, norm in pair.run(2, _tied_one_and_two, "counted twice")]
    assert seen == pytest.approx([3 * math.sqrt(2)] * 2)


# ------------------------------------------------------------- layers-lost: pytorch/torchtitan 963


def _seven_layers(_: Any, kept: int) -> tuple[dict[str, Any], float | None]:
    return updated([Slope(float(k)) for k in range(1, kept + 1)], [ONE])


def test_seven_layers_on_two_stages_are_three_and_four(pair: Pool) -> None:
    results = pair.run(2, _seven_layers, 7)
    assert [len(gradients) for gradients, _ in results] == [3, 4]
    assert merged(results) == {f"layers.{k}.w": k + 1.0 for k in range(7)}
    whole = math.sqrt(sum(k * k for k in range(1, 8)))
    assert results[0][1] == pytest.approx(whole)
    lost = pair.run(2, _seven_layers, 2 * (7 // 2))  # as many layers on each stage as divide evenly
    assert len(merged(lost)) == 6
    assert lost[0][1] != pytest.approx(whole)


# ---------------------------------------------------------------- stale-rows: torch 2.13, found by running it


SHIFTED = Term("shifted", lambda outputs, _: (outputs + 1).sum(), lambda batch: batch.numel())


def _fewer_rows(_: Any, frozen: bool) -> float:
    """The loss of microbatches of three rows and of one. frozen: all have room for what the first one needs."""
    staged = StagedModel([Probe(4), Gain()], stages=2, costs=[1.0, 1.0])
    updater = Updater(staged, torch.optim.SGD(staged.parameters(), lr=0.1), SHIFTED)
    original = Stage.prepare
    with pytest.MonkeyPatch.context() as patch:
        if frozen:
            first = lambda shapes: [shapes[0]] * len(shapes)  # noqa: E731
            patch.setattr(Stage, "prepare", lambda self, i, o, trains: original(self, first(i), first(o), trains))
        loss = updater.evaluate(iter([torch.tensor([[0], [1], [2]]), torch.tensor([[3]])])).loss
    let_go(staged)
    assert loss is not None
    return loss


def _rows_of_each(_: Any) -> tuple[dict[str, Any], float | None]:
    return updated([Probe(4), Gain()], [torch.tensor([[0], [1], [2]]), torch.tensor([[3]])])


def test_a_later_microbatch_with_fewer_rows_is_right(pair: Pool) -> None:
    assert merged(pair.run(2, _rows_of_each))["layers.0.w"] == [1 / 4] * 4
    assert pair.run(2, _fewer_rows, False) == [1.0, 1.0]
    assert 1.0 not in pair.run(2, _fewer_rows, True)


# ---------------------------------------------------------- labels-shifted: deepspeedai/DeepSpeed 5729


def _labels(_: Any, shifted: bool) -> tuple[dict[str, Any], float | None]:
    """Four microbatches of one token each, whose labels weigh the outputs."""
    original = Runtime.run

    def off_by_one(self: Any, inputs: Any, peers: Any, loss: Any, targets: Any, *args: Any) -> Any:
        return original(self, inputs, peers, loss, targets[1:] + targets[:1], *args)

    def mutate(patch: pytest.MonkeyPatch) -> None:
        if shifted:
            patch.setattr(Runtime, "run", off_by_one)

    term = Term("labelled", lambda outputs, batch: (outputs * batch[1]).sum(), lambda batch: batch[0].numel())
    batches = [(torch.tensor([[i]]), torch.tensor([[4.0 * (i + 1)]])) for i in range(4)]
    return updated([Probe(4), Gain()], batches, term, mutate=mutate)


def test_outputs_meet_the_labels_of_their_own_microbatch(pair: Pool) -> None:
    assert merged(pair.run(2, _labels, False))["layers.0.w"] == [1.0, 2.0, 3.0, 4.0]
    assert merged(pair.run(2, _labels, True))["layers.0.w"] == [2.0, 3.0, 4.0, 1.0]


# ------------------------------------- an order of forwards that is not that of the microbatches: torch 2.13


def swapped() -> Schedule:
    """gpipe, but the second microbatch goes first on the last stage."""
    schedule = generate("gpipe", 2, 2)
    last = schedule.orders[1].copy()
    last[:2] = last[[1, 0]]
    return replace(schedule, orders=(schedule.orders[0], last))


def _swapped(_: Any) -> tuple[dict[str, Any], float | None]:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(StagedModel, "schedule", lambda *_: swapped())

    return updated([Probe(2), Gain()], [torch.tensor([[i]]) for i in range(2)], mutate=mutate)


def test_an_order_whose_losses_torch_would_mix_up_is_refused(pair: Pool) -> None:
    validate.check(generate("gpipe", 2, 2))
    with pytest.raises(InputError, match="forwards of stage 1 in microbatch order, here 1F0"):
        validate.check(swapped())
    try:
        seen = merged(pair.run(2, _swapped))["layers.0.w"]
    except WorkerError:  # torch 2.11 notices that there is no gradient to send
        return
    assert seen != [1 / 2] * 2


# --------------------------------------------------------------------- deadlock: pytorch/torchtitan 775

MEGABYTE = 1 << 17
"""In float64 elements; no socket holds as much."""


def _both_send(_: Any) -> tuple[dict[str, Any], float | None]:
    """1f1b, where the first stage sends activations while the second one sends gradients back."""
    batches = [torch.full((1, MEGABYTE), float(i), dtype=torch.float64) for i in range(6)]
    return updated([Gain(), Gain()], batches)


def _both_send_and_wait(group: Any) -> str:
    """The same with sends that wait until they are received."""
    own = dist.new_group(dist.get_process_group_ranks(group), timeout=timedelta(seconds=1))
    assert isinstance(own, dist.ProcessGroup)
    try:
        dist.send(torch.zeros(MEGABYTE), 1 - dist.get_rank(group), group=own)
    except RuntimeError as error:
        return str(error)
    finally:
        dist.destroy_process_group(own)
    return ""


def test_two_stages_that_send_at_once_do_not_wait_for_each_other(pair: Pool) -> None:
    started = time.monotonic()
    assert merged(pair.run(2, _both_send)) == pytest.approx({"layers.0.gain": 2.5, "layers.1.gain": 2.5})
    assert time.monotonic() - started < 20
    assert any("Timed out" in error for error in pair.run(2, _both_send_and_wait))


# ------------------------------------------------------------ edge-memory: deepspeedai/DeepSpeed 1378


def _bounds(_: Any, equal: bool) -> tuple[tuple[int, ...], list[float]]:
    """Where twelve blocks with a large head are cut, and what each stage multiplies with."""
    layers = Decoder(DecoderConfig(2000, 8, width=16, depth=12, heads=2)).as_layers()
    staged = StagedModel(layers, stages=2, costs=[1.0] * len(layers) if equal else None)
    let_go(staged)
    weights = [0, *(sum(p.numel() for p in layer.parameters()) for layer in layers[1:])]
    return staged.bounds, [sum(weights[a:b]) for a, b in zip(staged.bounds, staged.bounds[1:], strict=False)]


def test_the_stage_of_the_logits_gets_fewer_layers(pair: Pool) -> None:
    bounds, work = pair.run(2, _bounds, False)[0]
    assert bounds == (0, 12, 14)
    assert max(work) / (sum(work) / 2) < 1.05
    bounds, work = pair.run(2, _bounds, True)[0]
    assert bounds == (0, 7, 14)
    assert max(work) / (sum(work) / 2) > 1.25


# ------------------------------------------------- layers that reduce gradients by themselves: torch 2.13


def _wrapped(group: Any) -> str:
    layers = [DistributedDataParallel(Gain(), process_group=group), Gain()]
    with pytest.raises(InputError) as refused:
        StagedModel(layers, stages=2, costs=[1.0, 1.0])
    return str(refused.value)


def test_a_layer_in_distributed_data_parallel_is_refused(pair: Pool) -> None:
    """With a split backward it leaves replicas out of step, and says nothing."""
    for error in pair.run(2, _wrapped):
        assert error.startswith("module '0': got 'DistributedDataParallel', expected a plain module inside")
