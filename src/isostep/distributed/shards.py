"""Parameters that FSDP2 (`fully_shard`) keeps in parts: where a part lies in its whole, and the whole itself.

The whole parameter has no public name in torch 2.13; this is the one file that knows the private one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard


def whole_of(tensor: Tensor) -> Tensor:
    """A scalar that ranks hold in parts, as a plain tensor; a collective, so every rank calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor) -> tuple[Tensor, int] | None:
    """This rank's part of a tensor that is cut along its first axis, and how many elements of the whole lie before it.

    None for a tensor that is cut in another way.
    """
    if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim != 1 or tensor.placements != (Shard(0),):
        return None
    ranks, rows = tensor.device_mesh.size(), tensor.shape[0]
    before = min(rows, math.ceil(rows / ranks) * tensor.device_mesh.get_local_rank())
    return tensor.to_local(), before * math.prod(tensor.shape[1:])


def wholes(modules: Iterable[torch.nn.Module]) -> dict[int, Tensor]:
    """By the identity of a parameter in parts: the whole that forward and backward use, once it has been built."""
    found: dict[int, Tensor] = {}
    for sharded in {below for module in modules for below in module.modules() if isinstance(below, FSDPModule)}:
        group = getattr(sharded._get_fsdp_state(), "_fsdp_param_group", None)
        for entry in getattr(group, "fsdp_params", ()):
            whole = getattr(entry, "_unsharded_param", None)
            if whole is not None:
                found[id(entry.sharded_param)] = whole
    return found
