"""The optimizers of a run, and which parameters each one updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from . import config
from .errors import InputError

Parameters = list[nn.Parameter]
Held = Callable[[nn.Parameter], bool] | None

EPS = 1e-8
"""Of AdamW: what is added to the square root of the second moment."""
_FUSED_DEVICES = frozenset({"cpu", "cuda"})


def build_optimizers(model: nn.Module, settings: config.Optimizer, held: Held = None) -> list[torch.optim.Optimizer]:
    """The optimizers of a model; each trainable parameter is in exactly one group of one of them.

    held: whether this rank updates a parameter, where others of the replica update the rest. All ranks have the same
    groups then, some of them without parameters.

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
    if settings.name == "sgd":
        groups = _groups(parameters, settings, held)
        return [torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum)]
    if settings.name == "adamw":
        return [_adamw(parameters, settings, held)]
    return _muon(parameters, block_matrices(model), settings, held)


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


def _muon(
    parameters: Parameters, matrices: Parameters, settings: config.Optimizer, held: Held
) -> list[torch.optim.Optimizer]:
    if not matrices:
        raise InputError.of(
            "optimizer.name", "muon", "a model with matrices in the blocks of an nn.ModuleList",
            'use "adamw", or keep the blocks in an nn.ModuleList',
        )  # fmt: skip
    muon = torch.optim.Muon(
        [{"params": _of_this_rank(matrices, held)}],
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    taken = set(map(id, matrices))
    rest = [parameter for parameter in parameters if id(parameter) not in taken]
    return [muon, _adamw(rest, settings, held)] if rest else [muon]


def _adamw(parameters: Parameters, settings: config.Optimizer, held: Held) -> torch.optim.AdamW:
    """AdamW in one kernel (`fused`) where all parameters lie on devices that have it, else torch's own choice."""
    fused = {parameter.device.type for parameter in parameters} <= _FUSED_DEVICES
    return torch.optim.AdamW(
        _groups(parameters, settings, held),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=EPS,
        fused=fused or None,
    )


def _groups(parameters: Iterable[nn.Parameter], settings: config.Optimizer, held: Held) -> list[dict[str, Any]]:
    """Those of two or more dimensions with weight decay, then the others without; a model without either has one."""
    decayed: Parameters = []
    others: Parameters = []
    for parameter in parameters:
        (decayed if parameter.dim() >= 2 else others).append(parameter)
    groups = [(decayed, settings.weight_decay), (others, 0.0)]
    return [{"params": _of_this_rank(p, held), "weight_decay": decay} for p, decay in groups if p]


def _of_this_rank(parameters: Parameters, held: Held) -> Parameters:
    return [parameter for parameter in parameters if held is None or held(parameter)]
