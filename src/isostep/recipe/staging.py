"""A decoder in stages: measured, cut by what was measured, and named as the decoder names its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ..config import Config
from ..data.collate import pad_batch
from ..data.groups import Groups
from ..distributed.comm import on_first_rank
from ..distributed.stages import StagedModel
from ..grouping import Cursor
from ..layer_costs import MeasuredLayers, measure
from ..ledger.words import mebibytes
from ..models.decoder import Decoder
from ..objective import Batch, causal_lm, to_device
from ..schedule.drawing import percent
from ..units import count
from ..updater import AUTOCAST
from .state import Held
from .timeline import start_of


@dataclass(frozen=True)
class Staging:
    """One rank's part of the decoder, and what all ranks know of the whole.

    names: of each parameter of the decoder by its id, several where it is tied.
    """

    model: StagedModel
    measured: MeasuredLayers
    names: Mapping[int, list[str]]

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether this rank has a parameter of the decoder."""
        return any(parameter is own for own in self.model.parameters())

    def held(self, average: AveragedModel | None) -> Held:
        """The state on this rank. average: of the weights here, if one is kept."""
        tensors, everywhere = {}, set()
        modules: dict[str, nn.Module] = {"model": self.model.layers}
        if average is not None:
            modules["average.module"] = average.module
            tensors["average.n_averaged"] = average.n_averaged
        own = [self.names[id(p)] for p in self.model.layers.parameters()]
        for prefix, module in modules.items():
            everywhere |= {f"{prefix}.{name}" for names in self.names.values() for name in names}
            for names, parameter in zip(own, module.parameters(), strict=True):
                tensors |= {f"{prefix}.{name}": parameter.detach() for name in names}
        names = {id(p): self.names[id(p)][0] for p in self.model.layers.parameters()}
        return Held(tensors, names, frozenset(everywhere | tensors.keys()))

    def cut(self) -> dict[str, Any]:
        """Where the layers were cut and what each stage costs, as a document; seconds of one microbatch."""
        layers = self.measured.model.layers
        return {
            "schedule": self.model.schedule_name,
            "boundaries": list(self.model.bounds),
            "rank_of": list(self.model.rank_of),
            "layers": [layer.name for layer in layers],
            "seconds": [layer.cost for layer in layers],
        }

    def text(self, num_microbatches: int) -> list[str]:
        """The cut and what it promises for so many microbatches a replica: a line per stage rank, and one for all."""
        layers, parts = self.measured.model.layers, [[] for _ in range(self.model.stages)]
        for rank, (start, end) in zip(self.model.rank_of, pairwise(self.model.bounds), strict=True):
            last = f" to {layers[end - 1].name}" if end - start > 1 else ""
            parts[rank].append(f"{layers[start].name}{last}")
        order = self.model.schedule(max(1, num_microbatches))
        predicted = start_of(self.model, self.measured).predicted(order.num_microbatches, self.measured.tokens)
        slowest = max(predicted.busy) / (sum(predicted.busy) / self.model.stages)
        each = zip(parts, predicted.busy, predicted.peak_memory, strict=True)
        return [
            f"{self.model.stages} stages, cut by measured cost: the slowest is {percent(slowest - 1)} above the mean",
            *(
                f"  stage {rank}: {', '.join(part)}; {busy / order.num_microbatches:.1f} ms a microbatch, at most "
                f"{mebibytes(round(memory))} of activations"
                for rank, (part, busy, memory) in enumerate(each)
            ),
            f"{self.model.schedule_name} of {count(order.num_microbatches, 'microbatch')}, without transfers: "
            f"{predicted.makespan:.0f} ms an update, stages busy {percent(predicted.busy_share)}",
        ]


def sample(plan: Groups, train: Any) -> Batch:
    """A microbatch of the first update to measure with: the one in the middle, of those by length."""
    first, _ = next(plan.plan.walk(Cursor(), 1))
    ids = first.microbatches[len(first.microbatches) // 2]
    return pad_batch([train[i] for i in ids])


def stage(config: Config, decoder: Decoder, batch: Batch) -> Staging:
    """This rank's part of a decoder. Rank 0 measures, while the others wait; so all cut alike.

    Raises InputError where the decoder has fewer layers than there are chunks.
    """
    layers, layout = decoder.as_layers(), config.layout
    names: dict[int, list[str]] = {}
    for name, parameter in decoder.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    measured = on_first_rank(partial(_measured, layers, config, batch))
    model = StagedModel(
        layers,
        stages=layout.stages,
        schedule=layout.schedule,
        chunks=layout.chunks,
        costs=[layer.cost for layer in measured.model.layers],
        activation_checkpointing=layout.activation_checkpointing,
    )
    return Staging(model, measured, names)


def _measured(layers: list[nn.Module], config: Config, batch: Batch) -> MeasuredLayers:
    blocks = [f"block {index}" for index in range(config.model.depth)]
    dtype = AUTOCAST[config.precision.dtype]
    device = next(layers[0].parameters()).device

    def precision() -> AbstractContextManager[Any]:
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype)

    return measure(
        layers,
        to_device(batch, device),
        names=["embedding", *blocks, "head"],
        inputs=lambda batch: batch["input_ids"],
        loss=causal_lm.sum_of,
        precision=precision,
    )
