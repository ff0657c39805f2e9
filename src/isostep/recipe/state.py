"""The state of a run as tensors by name, and a small document: what a checkpoint holds.

Names are those of the model's parameters, so nothing depends on the order in which an optimizer met them, or on the
number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import InputError
from ..updater import Updater

Tensors = dict[str, Tensor]


def capture(modules: Mapping[str, nn.Module], optimizers: Sequence[Optimizer], updater: Updater) -> tuple[Tensors, Any]:
    """Tensors by name, and the rest as a JSON document. modules: by prefix, the trained one as "model"."""
    tensors = {f"{prefix}.{k}": t.detach() for prefix, m in modules.items() for k, t in m.state_dict().items()}
    values: dict[str, Any] = {}
    for place, state in _optimizer_states(modules["model"], optimizers):
        for key, value in state.items():
            (tensors if isinstance(value, Tensor) else values)[f"{place}.{key}"] = value
    progress = {key: value for key, value in updater.state_dict().items() if key not in ("optimizers", "schedulers")}
    return tensors, {"optimizer_values": values, "progress": progress}


def restore(
    modules: Mapping[str, nn.Module], optimizers: Sequence[Optimizer], updater: Updater, tensors: Tensors, document: Any
) -> None:
    """Put back what `capture` took. Raises InputError where it belongs to another model or optimizer."""
    left = dict(tensors)
    for prefix, module in modules.items():
        own = {name: left.pop(f"{prefix}.{name}", None) for name in module.state_dict()}
        missing = [name for name, tensor in own.items() if tensor is None]
        if missing:
            raise _foreign(f"no {prefix}.{missing[0]}")
        try:
            module.load_state_dict(own)
        except RuntimeError as error:
            raise _foreign(" ".join(str(error).split())[:200]) from None
    state = updater.state_dict()
    names = _names(modules["model"])
    places: dict[str, dict[str, Any]] = {}
    for name, value in (left | document["optimizer_values"]).items():
        place, _, key = name.rpartition(".")
        places.setdefault(place, {})[key] = value
    for i, optimizer in enumerate(optimizers):
        found = [places.pop(f"optimizer.{i}.{names[id(parameter)]}", None) for parameter in _parameters(optimizer)]
        state["optimizers"][i]["state"] = {index: values for index, values in enumerate(found) if values}
    if places:
        raise _foreign(next(iter(places)))
    updater.load_state_dict(state | document["progress"])


def _optimizer_states(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, dict[str, Any]]]:
    """("optimizer.0.blocks.1.weight", its state) for every parameter that has one."""
    names = _names(model)
    for i, optimizer in enumerate(optimizers):
        for parameter in _parameters(optimizer):
            if state := optimizer.state.get(parameter):
                yield f"optimizer.{i}.{names[id(parameter)]}", state


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _foreign(got: str) -> InputError:
    return InputError.of("checkpoint", got, "the tensors of this model and optimizer", "resume with what wrote it")
