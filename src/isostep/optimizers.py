"""The optimizers of a run, and which parameters each one updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from . import config
from .errors import InputError

Parameters = list[nn.Parameter]

EPS = 1e-8
"""Of AdamW: what is added to the square root of the second moment."""
_FUSED_DEVICES = frozenset({"cpu", "cuda"})


def build_optimizers(model: nn.Module, settings: config.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers of a model; each trainable parameter is in exactly one group of one of them.

    "adamw": AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), in one kernel where the device has it.
    "sgd": SGD with momentum. Its weight decay is torch's: added to the gradient, so that it goes through momentum.
    "muon": Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for the `block_matrices`, AdamW for
        the rest: embeddings, output head and gains. Updates of Muon are scaled to the size of AdamW's (Liu et al.
        2025, arXiv 2502.16982), so both share the learning rate and the weight decay.

    Weight decay is for parameters of two or more dimensions, embeddings among them; for others it is 0.
    Raises InputError for a model without trainable parameters, and for "muon" without block matrices.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise InputError.of("model", "no trainable parameter", "one or more", "set requires_grad on some")
    optimizers: list[torch.optim.Optimizer]
    if settings.name == "sgd":
        optimizers = [
            torch.optim.SGD(_groups(parameters, settings), lr=settings.learning_rate, momentum=settings.momentum)
        ]
    elif settings.name == "adamw":
        optimizers = [_adamw(parameters, settings)]
    else:
        optimizers = _muon(parameters, block_matrices(model), settings)
    return optimizers


def set_learning_rate(optimizers: Sequence[torch.optim.Optimizer], learning_rate: float) -> None:
    """Give every group of every optimizer this learning rate, which holds from the next update on."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate


def block_matrices(model: nn.Module) -> Parameters:
    """The trainable matrices inside blocks, in the model's order.

    A block is what lies in an nn.ModuleList, as repeated layers do; embeddings and the output head lie beside it.
    Its parameters of two dimensions are taken, except those that an nn.Embedding anywhere in the model owns, which
    also leaves out a matrix tied to one.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {id(parameter) for module in lists for parameter in module.parameters()}
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    inside -= {id(parameter) for module in embeddings for parameter in module.parameters()}
    return [p for p in model.parameters() if p.requires_grad and p.dim() == 2 and id(p) in inside]


def _muon(parameters: Parameters, matrices: Parameters, settings: config.Optimizer) -> list[torch.optim.Optimizer]:
    if not matrices:
        raise InputError.of(
            "optimizer.name", "muon", "a model with matrices in the blocks of an nn.ModuleList",
            'use "adamw", or keep the blocks in an nn.ModuleList',
        )  # fmt: skip
    muon = torch.optim.Muon(
        matrices,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    taken = set(map(id, matrices))
    rest = [parameter for parameter in parameters if id(parameter) not in taken]
    return [muon, _adamw(rest, settings)] if rest else [muon]


def _adamw(parameters: Parameters, settings: config.Optimizer) -> torch.optim.AdamW:
    """AdamW in one kernel (`fused`) where all parameters lie on devices that have it, else torch's own choice."""
    fused = {parameter.device.type for parameter in parameters} <= _FUSED_DEVICES
    return torch.optim.AdamW(
        _groups(parameters, settings),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=EPS,
        fused=fused or None,
    )


def _groups(parameters: Iterable[nn.Parameter], settings: config.Optimizer) -> list[dict[str, Any]]:
    """Those of two or more dimensions with weight decay, then the others without; an empty group is left out."""
    decayed: Parameters = []
    others: Parameters = []
    for parameter in parameters:
        (decayed if parameter.dim() >= 2 else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
