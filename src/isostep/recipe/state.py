"""The state of a run as tensors by name, and a small document: what a checkpoint holds.

Names are those of the whole model's parameters, so nothing depends on the order in which an optimizer met them, on the
number of workers, or on the stages that a model is cut into.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import InputError
from ..updater import Updater

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Held:
    """What this rank holds of a model's state, under the names of the whole model.

    tensors: the live ones: "model.blocks.0.attention.query.weight". names: of each parameter here, by its id.
    everywhere: the names of such tensors on all ranks.
    """

    tensors: Tensors
    names: Mapping[int, str]
    everywhere: frozenset[str]

    @classmethod
    def whole(cls, modules: Mapping[str, nn.Module]) -> Held:
        """All of it. modules: by prefix, the trained one as "model"."""
        tensors = {f"{prefix}.{k}": t.detach() for prefix, m in modules.items() for k, t in m.state_dict().items()}
        names = {id(parameter): name for name, parameter in modules["model"].named_parameters()}
        return cls(tensors, names, frozenset(tensors))

    def wants(self, name: str) -> bool:
        """Whether something of a checkpoint belongs here, or on no rank of this model."""
        if name.startswith("optimizer."):  # optimizer.0.blocks.1.weight.exp_avg
            name = f"model.{name.split('.', 2)[2].rpartition('.')[0]}"
        return name in self.tensors or name not in self.everywhere


def capture(held: Held, optimizers: Sequence[Optimizer], updater: Updater) -> tuple[Tensors, Any]:
    """Tensors by name, and the rest as a JSON document."""
    tensors, values = dict(held.tensors), {}
    for place, state in _optimizer_states(held, optimizers):
        for key, value in state.items():
            (tensors if isinstance(value, Tensor) else values)[f"{place}.{key}"] = value
    progress = {key: value for key, value in updater.state_dict().items() if key not in ("optimizers", "schedulers")}
    return tensors, {"optimizer_values": values, "progress": progress}


def restore(held: Held, optimizers: Sequence[Optimizer], updater: Updater, tensors: Tensors, document: Any) -> None:
    """Put back what `capture` took on whichever ranks. Raises InputError where it is another model's or optimizer's."""
    left = {name: tensor for name, tensor in tensors.items() if held.wants(name)}
    for name, own in held.tensors.items():
        saved = left.pop(name, None)
        if saved is None:
            raise _foreign(f"no {name}")
        if saved.shape != own.shape:
            raise _foreign(f"{name} of shape {tuple(saved.shape)} for {tuple(own.shape)}")
        with torch.no_grad():
            own.copy_(saved)
    state = updater.state_dict()
    places: dict[str, dict[str, Any]] = {}
    values = {name: value for name, value in document["optimizer_values"].items() if held.wants(name)}
    for name, value in (left | values).items():
        place, _, key = name.rpartition(".")
        places.setdefault(place, {})[key] = value
    for i, optimizer in enumerate(optimizers):
        found = [places.pop(f"optimizer.{i}.{held.names[id(p)]}", None) for p in _parameters(optimizer)]
        state["optimizers"][i]["state"] = {index: values for index, values in enumerate(found) if values}
    if places:
        raise _foreign(next(iter(places)))
    updater.load_state_dict(state | document["progress"])


def _optimizer_states(held: Held, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, dict[str, Any]]]:
    """("optimizer.0.blocks.1.weight", its state) for every parameter here that has one."""
    for i, optimizer in enumerate(optimizers):
        for parameter in _parameters(optimizer):
            if state := optimizer.state.get(parameter):
                yield f"optimizer.{i}.{held.names[id(parameter)]}", state


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _foreign(got: str) -> InputError:
    return InputError.of("checkpoint", got, "the tensors of this model and optimizer", "resume with what wrote it")
