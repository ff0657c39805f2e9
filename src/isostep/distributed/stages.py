"""A model cut into stages: this rank's chunks of it, the ranks that it talks to, and its gradients summed over all.

Ranks are counted with the replica outermost: rank = replica * P + stage rank, as in `explain.batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError
from ..gradients import GradientSums
from ..inspection import inspect
from ..objective import Batch
from ..schedule.generate import generate
from ..schedule.ir import Schedule, W
from ..schedule.partition import partition
from ..schedule.simulate import held_at_most
from .chunks import Chunk, Shapes
from .comm import ProcessGroupComm, check_plain, new_group
from .pipeline import Peers, Runtime, Stage
from .reduce import GradientReducer
from .timeline import Recorder

_FILLER = object()
"""Stands for the batch of a microbatch that adds nothing, where a schedule needs more of them than there are."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model: its name, and the stage indices of the chunks that use it."""

    name: str
    holders: tuple[int, ...]


class StagedModel(nn.Module):
    """The chunks of a model that this rank holds, for an `Updater`; the others are dropped.

    layers: the whole model, the same on every rank, as modules that each take what the one before returns: one
        tensor. stages: P. schedule: a name of `isostep simulate`. chunks: a rank, where the schedule leaves a choice.
    costs: of each layer, in any unit; the stages are cut so that the most expensive one costs least. None: the
        parameters that each multiplies with.
    inputs(batch): what enters the first layer; by default `input_ids` of a mapping, or the first element.
    activation_checkpointing: keep only what enters each layer and recompute the rest in backward (Chen et al. 2016,
        arXiv 1604.06174); for each stage rank, or for all.

    Every rank of the default process group builds it: D x P of them, rank = replica * P + stage rank. An `Updater`
    over it counts, votes, sums and clips over all of them, so that the update is that of one process. Tied parameters
    are those that are one object in `layers`. Microbatches may differ in size and length.
    Raises InputError where the layers, the ranks and the schedule do not go together.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        stages: int,
        schedule: str = "1f1b",
        chunks: int | None = None,
        costs: Sequence[float] | None = None,
        inputs: Callable[[Batch], Tensor] | None = None,
        activation_checkpointing: bool | Sequence[bool] = False,
    ) -> None:
        super().__init__()
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is None:
            raise InputError.of("process group", "none", "an initialised one", "call init_process_group() first")
        size = dist.get_world_size(group)
        if stages < 1 or size % stages:
            raise InputError.of("stages", stages, f"a divisor of the {size} ranks", "start D x P ranks")
        whole = nn.Sequential(*layers)
        check_plain(whole)
        inspect(whole).raise_if_refused(())
        self.recomputes = _for_each(activation_checkpointing, stages)
        self.schedule_name, self.stages, self.chunks = schedule, stages, chunks
        order = generate(schedule, stages, 2 * stages, chunks)
        _check_compiled(layers, order)
        self.rank_of = order.rank_of
        self.bounds = _cut(layers, len(self.rank_of), costs)
        self.inputs = inputs or _first_input
        if not callable(self.inputs):
            raise InputError.of("inputs", inputs, "a function of a batch", "let it return what enters the first layer")
        self.world = group
        self.replica, self.stage_rank = divmod(dist.get_rank(group), stages)
        self.table, everything = _table(layers, self.bounds)
        self._check_parameters()
        self._shapes = Shapes(layers, self.bounds)
        own = [index for index, rank in enumerate(self.rank_of) if rank == self.stage_rank]
        self.layers = nn.ModuleDict(
            {str(layer): layers[layer] for index in own for layer in range(*self.bounds[index : index + 2])}
        )
        self._chunks = {
            index: Chunk(
                {k: layers[k] for k in range(*self.bounds[index : index + 2])},
                self.recomputes[self.stage_rank],
                is_last=index == len(self.rank_of) - 1,
            )
            for index in own
        }
        self.row, self.column, self.tied = self._groups(dist.get_process_group_ranks(group))
        self.peers: Peers = lambda _: nullcontext()
        self.recorder: Recorder | None = None
        """Takes down what this rank does when, in `run`."""
        own_parameters = {id(p) for p in self.parameters()}
        self.all_parameters = tuple(p if id(p) in own_parameters else _placeholder(p) for p in everything)
        """Every parameter of the whole model, each once, in order; those of other ranks on the meta device."""
        self._stages: list[Stage] | None = None
        self._runtimes: dict[tuple[int, bool], Runtime] = {}

    @property
    def replicas(self) -> int:
        """D."""
        return dist.get_world_size(self.world) // self.stages

    @property
    def has_last(self) -> bool:
        """Whether this rank holds the last layers, and so the loss."""
        return len(self.rank_of) - 1 in self._chunks

    def schedule(self, num_microbatches: int) -> Schedule:
        """The order for so many microbatches, or for the few more that the schedule needs; the latter are filler."""
        for filler in range(2 * self.stages):
            with suppress(InputError):
                return generate(self.schedule_name, self.stages, num_microbatches + filler, self.chunks)
        return generate(self.schedule_name, self.stages, num_microbatches, self.chunks)

    def run(
        self,
        batches: Sequence[Batch],
        before_layer: Callable[[int, int], None],
        precision: Callable[[], AbstractContextManager[Any]],
        loss: Callable[[Any, Batch], Tensor],
        after_backward: Callable[[], None],
    ) -> None:
        """See `engine.Stages.run`."""
        if not batches:
            return
        inputs, stages, schedule = self._begin(batches, before_layer, precision, trains=True)
        runtime = self._runtime(schedule, trains=True)

        def loss_of(outputs: Any, batch: Batch) -> Tensor:
            return outputs.sum() * 0.0 if batch is _FILLER else loss(outputs, batch)

        for stage in stages:
            stage.after_backward = after_backward
        targets = [*batches, *[_FILLER] * (len(inputs) - len(batches))]
        runtime.run(inputs, self.peers, loss_of, targets, self.recorder)
        for stage in stages:
            stage.clear_runtime_states()

    def evaluated(self, batches: Sequence[Batch], precision: Callable[[], AbstractContextManager[Any]]) -> list[Any]:
        """See `engine.Stages.evaluated`."""
        inputs, stages, schedule = self._begin(batches, lambda *_: None, precision, trains=False)
        outputs = self._runtime(schedule, trains=False).run(inputs, self.peers)
        for stage in stages:
            stage.clear_runtime_states()
        return outputs[: len(batches)] if self.has_last else [None] * len(batches)

    def alone(
        self,
        batches: Sequence[Batch],
        precision: Callable[[], AbstractContextManager[Any]],
        loss: Callable[[Any, Batch], Tensor],
        after_backward: Callable[[], None],
    ) -> None:
        """See `engine.Stages.alone`."""
        inputs, stages, schedule = self._begin(batches, lambda *_: None, precision, trains=True)
        runs = ((index, k) for k in range(len(inputs)) for index in self._chunks)
        held = []
        for index, k in islice(runs, held_at_most(schedule, self.stage_rank)):
            shape, dtype = self._shapes.of(inputs[k], precision)[index]
            blank = torch.zeros(shape, dtype=dtype, device=inputs[k].device, requires_grad=dtype.is_floating_point)
            outputs = self._chunks[index](inputs[k] if index == 0 else blank)
            if index == len(self.rank_of) - 1:
                outputs = loss(outputs, batches[k]) if k < len(batches) else outputs.sum()
            held.append(outputs)
        for outputs in held:
            outputs.backward(torch.ones_like(outputs))
            after_backward()
        for stage in stages:
            stage.clear_runtime_states()

    def _check_parameters(self) -> None:
        """Raise InputError where a rank would have nothing to train: no optimizer could be built there."""
        holding = {self.rank_of[chunk] for parameter in self.table for chunk in parameter.holders}
        for rank in range(self.stages):
            if rank not in holding:
                parts = [self.bounds[k : k + 2] for k, owner in enumerate(self.rank_of) if owner == rank]
                layers = ", ".join(f"{start} to {end - 1}" for start, end in parts)
                raise InputError.of(
                    f"stage rank {rank}", f"layers {layers} without a parameter", "one or more on every rank",
                    "take fewer stages, or give costs that cut elsewhere",
                )  # fmt: skip

    def _runtime(self, schedule: Schedule, *, trains: bool) -> Runtime:
        """One for each number of microbatches: to work out who sends what when takes longer the more there are."""
        key = (schedule.num_microbatches, trains)
        if key not in self._runtimes:
            assert self._stages is not None
            self._runtimes[key] = Runtime(self._stages, schedule, trains=trains)
        return self._runtimes[key]

    def _begin(
        self,
        batches: Sequence[Batch],
        before_layer: Callable[[int, int], None],
        precision: Callable[[], AbstractContextManager[Any]],
        *,
        trains: bool,
    ) -> tuple[list[Tensor], list[Stage], Schedule]:
        """What enters the first chunk, filler included; this rank's stages, with room for transfers; the order."""
        schedule = self.schedule(len(batches))
        filler = schedule.num_microbatches - len(batches)
        inputs = [self.inputs(batch) for batch in (*batches, *[batches[-1]] * filler)]
        for each in inputs:
            if not isinstance(each, Tensor):
                raise InputError.of("inputs", type(each).__name__, "one tensor", "return what enters the first layer")
        shapes = [self._shapes.of(each, precision) for each in inputs]

        def before(index: int, layer: int) -> None:
            if index < len(batches):
                before_layer(index, layer)

        for index, chunk in self._chunks.items():
            chunk.begin(before, precision, [each[index + 1][1] for each in shapes])
        device = next(self.parameters()).device
        if self._stages is None:
            self._stages = [
                Stage(chunk, index, self.rank_of, self.row, device) for index, chunk in self._chunks.items()
            ]
        for stage in self._stages:
            k = stage.stage_index
            stage.prepare([each[k] for each in shapes], [each[k + 1] for each in shapes], trains)
        return inputs, self._stages, schedule

    def _groups(
        self, ranks: Sequence[int]
    ) -> tuple[dist.ProcessGroup, dist.ProcessGroup, list[tuple[int, dist.ProcessGroup]]]:
        """The ranks of this replica; those of this stage rank in all replicas; and for each parameter that this rank
        shares with others of its replica, its index and those. Every rank makes every group, in one order.
        """
        rows = [ranks[start : start + self.stages] for start in range(0, len(ranks), self.stages)]
        own_rows = [new_group(row) for row in rows]
        columns = [new_group(ranks[rank :: self.stages]) for rank in range(self.stages)]
        shared = {index: sorted({self.rank_of[h] for h in p.holders}) for index, p in enumerate(self.table)}
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for row in rows:
            for holders in shared.values():
                if len(holders) > 1 and (key := tuple(row[rank] for rank in holders)) not in groups:
                    groups[key] = new_group(key)
        own = rows[self.replica]
        tied = [
            (index, group)
            for index, holders in shared.items()
            if self.stage_rank in holders and (group := groups.get(tuple(own[rank] for rank in holders))) is not None
        ]
        row, column = own_rows[self.replica], columns[self.stage_rank]
        assert row is not None
        assert column is not None
        return row, column, tied


class StagedComm(ProcessGroupComm):
    """All ranks of all replicas of a staged model."""

    def __init__(self, model: StagedModel, device: torch.device) -> None:
        super().__init__(model.world, device, len(model.table))
        self.replica, self.replicas = model.replica, model.replicas
        self.counts, self.scores = model.stage_rank == 0, model.has_last
        self._model = model
        model.peers = self._peers
        self._column_reducer = GradientReducer()
        self._summed = False

    def name(self, rank: int) -> str:
        replica, stage = divmod(rank, self._model.stages)
        return f"stage rank {stage} of replica {replica}"

    def reduce_early(self, gradients: GradientSums) -> None:
        """Start with the sum over replicas, as soon as this rank has run its last backward; `reduce` does the rest."""
        self._sum_over_replicas(gradients, lambda: None, [False] * len(gradients))
        self._summed = True

    def _sum_over_replicas(
        self, gradients: GradientSums, backward: Callable[[], None] | None, present: Sequence[bool]
    ) -> None:
        if self.replicas > 1:
            wait = self._wait_for("reduce", self._device)
            self._column_reducer.reduce(self._model.column, gradients, backward, present, wait)

    def reduce(self, gradients: GradientSums, backward: Callable[[], None] | None, present: Sequence[bool]) -> None:
        if not self._summed:
            self._sum_over_replicas(gradients, None, present)
        self._summed = False
        wait = self._wait_for("reduce", self._device)
        for index, group in self._model.tied:
            if present[index]:
                gradient = gradients[index]
                if gradient is None:
                    gradient = torch.zeros_like(gradients.parameters[index], dtype=gradients.dtype(index))
                gradient = gradient.detach().contiguous()
                work = dist.all_reduce(gradient, group=group, async_op=True)
                assert work is not None
                wait(work)
                gradients[index] = gradient

    def equalise(self, model: nn.Module) -> None:
        """Check that all ranks cut the same model alike, then copy replica 0's tensors, and tied ones, to all."""
        staged = self._model
        described = [
            (p.name, p.holders, tuple(q.shape), str(q.dtype))
            for p, q in zip(staged.table, staged.all_parameters, strict=True)
        ]
        reports = self.gather((described, staged.bounds, staged.schedule_name, uuid4().hex))
        self._lost = f"isostep/lost/{reports[0][-1]}"
        for rank, (other, *rest) in enumerate(reports):
            own: list[Any] = [*described, staged.bounds, staged.schedule_name]
            theirs = [*other, *rest[:2]]
            if odd := [pair for pair in zip(theirs, own, strict=False) if pair[0] != pair[1]]:
                raise InputError.of(
                    f"model of {self.name(rank)} beside {self.name(self.rank)}", " for ".join(map(str, odd[0])),
                    "the same layers, cuts and schedule on every rank", "build the same model everywhere",
                )  # fmt: skip
        tensors = [*staged.parameters(), *staged.buffers()]
        self._broadcast(tensors, staged.column)
        for index, group in staged.tied:
            self._broadcast([staged.all_parameters[index]], group)

    def _broadcast(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        with self._peers("start"), torch.no_grad():
            for tensor in tensors:
                if 0 in tensor.stride():  # an expanded tensor is a constant
                    continue
                raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                dist.broadcast(raw, dist.get_global_rank(group, 0), group=group)
                tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))

    def everywhere(self, squares: Sequence[float | None]) -> list[float]:
        """Adding zeros changes no bit, so the norm is that of one process."""
        table, rank_of = self._model.table, self._model.rank_of
        own = [
            square if square is not None and rank_of[parameter.holders[0]] == self._model.stage_rank else 0.0
            for square, parameter in zip(squares, table, strict=True)
        ]
        return self._row_sum(own)

    def agreed(self, fine: bool) -> bool:
        return self._row_sum([0.0 if fine else 1.0])[0] == 0

    def _row_sum(self, values: Sequence[float]) -> list[float]:
        vector = torch.tensor(values, dtype=torch.float64, device=self._vector_device)
        with self._peers("apply"):
            work = dist.all_reduce(vector, group=self._model.row, async_op=True)
        assert work is not None
        self._wait_for("apply", self._vector_device)(work)
        return vector.tolist()


def connect_stages(model: StagedModel) -> StagedComm:
    """The ranks of a staged model, which then all hold the same weights."""
    comm = StagedComm(model, next(model.parameters()).device)
    comm.equalise(model)
    return comm


def _check_compiled(layers: Sequence[nn.Module], schedule: Schedule) -> None:
    """Raise InputError for a compiled layer whose backward would be split: its graph has no part for its inputs."""
    splits = any((schedule.split(order)[0] == W).any() for order in schedule.orders)
    for index, layer in enumerate(layers):
        if splits and any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in layer.modules()):
            raise InputError.of(
                f"layer {index}", "torch.compile", f"none under {schedule.name}, which splits the backward",
                "leave it out, or take a schedule that does not, such as 1f1b",
            )  # fmt: skip


def _cut(layers: Sequence[nn.Module], chunks: int, costs: Sequence[float] | None) -> tuple[int, ...]:
    """Where each chunk begins, and the end: chunks + 1 indices of layers."""
    if costs is None:
        costs = [_weight(layer) for layer in layers]
    if len(costs) != len(layers):
        raise InputError.of("costs", len(costs), f"{len(layers)}, one per layer", "give as many")
    if len(layers) < chunks:
        raise InputError.of("layers", len(layers), f"{chunks} or more, one per chunk", "take fewer stages or chunks")
    return partition(costs, chunks).boundaries


def _for_each(given: bool | Sequence[bool], stages: int) -> list[bool]:
    each = [given] * stages if isinstance(given, bool) else list(given)
    if len(each) != stages:
        expected = f"one, or {stages}: one for each stage rank"
        raise InputError.of("activation_checkpointing", f"{len(each)} values", expected, "give as many")
    return each


def _weight(layer: nn.Module) -> float:
    """Parameters that are multiplied with: an embedding is only looked up."""
    looked_up = {id(p) for m in layer.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return float(sum(p.numel() for p in layer.parameters() if id(p) not in looked_up))


def _table(layers: Sequence[nn.Module], bounds: Sequence[int]) -> tuple[list[Parameter], list[nn.Parameter]]:
    """Every parameter of the model once, in order, with the chunks that use it."""
    names: dict[int, str] = {}
    holders: dict[int, list[int]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for chunk in range(len(bounds) - 1):
        for layer in range(bounds[chunk], bounds[chunk + 1]):
            for name, parameter in layers[layer].named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), f"layers.{layer}.{name}")
                parameters[id(parameter)] = parameter
                chunks = holders.setdefault(id(parameter), [])
                if chunk not in chunks:
                    chunks.append(chunk)
    return [Parameter(names[key], tuple(holders[key])) for key in parameters], list(parameters.values())


def _placeholder(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)


def _first_input(batch: Batch) -> Tensor:
    if isinstance(batch, dict):
        return batch["input_ids"]
    return batch[0] if isinstance(batch, (tuple, list)) else batch
