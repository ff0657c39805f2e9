"""Run a training script as it is, and keep what every optimizer update saw.

python record.py FOLDER SCRIPT ARGUMENTS...

Each rank writes FOLDER/rank{rank}.pt: for every update the parameters before it, the gradient that the optimizer used
(read after a closure, if there is one), the norm that clipping found, and the input of every forward pass since the
update before.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

MODELS = {"GPT2LMHeadModel", "LlamaForCausalLM", "Decoder"}
"""The classes whose input counts as a microbatch."""


def is_model(module: nn.Module) -> bool:
    return any(base.__name__ in MODELS for base in type(module).__mro__)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU; of a sharded tensor, all of it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).float().cpu().clone()


class Recorder:
    def __init__(self) -> None:
        self.updates: list[dict[str, Any]] = []
        self._inputs: list[torch.Tensor] = []
        self._kept: dict[int, nn.Module] = {}
        """Every module seen. A process group that goes away with its model right after a collective can hang."""
        self._model: nn.Module | None = None
        self._clipped: tuple[float, float] | None = None
        self._clip = torch.nn.utils.clip_grad_norm_

    def install(self) -> None:
        nn.modules.module.register_module_forward_hook(self._forward, with_kwargs=True)
        register_optimizer_step_pre_hook(self._step)
        torch.nn.utils.clip_grad_norm_ = self._clip_grad_norm

    def _clip_grad_norm(self, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        norm = self._clip(parameters, max_norm, *args, **kwargs)
        self._clipped = (float(max_norm), float(norm))
        return norm

    def _forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        self._kept[id(module)] = module
        in_backward = torch._C._current_graph_task_id() != -1  # a checkpointed part that is run again
        if is_model(module) and module.training and torch.is_grad_enabled() and not in_backward:
            self._model = module
            self._inputs.append(kwargs.get("input_ids", args[0] if args else None).cpu().clone())

    def _step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._keep()
            return None

        def then_keep() -> Any:
            result = closure()
            self._keep()
            return result

        return args[:1], {**kwargs, "closure": then_keep}

    def _keep(self) -> None:
        assert self._model is not None
        named = dict(self._model.named_parameters())
        self.updates.append(
            {
                "parameters": {name: whole(parameter) for name, parameter in named.items()},
                "gradients": {
                    name: whole(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
                    for name, parameter in named.items()
                },
                "clipped": self._clipped,
                "inputs": self._inputs,
            }
        )
        self._inputs, self._clipped = [], None


def main() -> None:
    folder, script = Path(sys.argv[1]), Path(sys.argv[2])
    sys.argv = sys.argv[2:]
    sys.path[0] = str(script.parent)
    recorder = Recorder()
    recorder.install()
    runpy.run_path(str(script), run_name="__main__")
    time.sleep(0.1)
    torch.save(
        {"updates": recorder.updates, "unused": recorder._inputs}, folder / f"rank{os.environ.get('RANK', '0')}.pt"
    )


if __name__ == "__main__":
    main()
