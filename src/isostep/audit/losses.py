"""The loss functions that an audit sees: each as its elements, and what their mean divides by."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction

PER_ELEMENT = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.gaussian_nll_loss, F.soft_margin_loss,
    F.multilabel_soft_margin_loss, F.multilabel_margin_loss, F.multi_margin_loss, F.margin_ranking_loss,
    F.hinge_embedding_loss, F.cosine_embedding_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
)  # fmt: skip
"""Their mean divides by the number of elements."""

CLASSIFYING = (F.cross_entropy, F.nll_loss, *([F.linear_cross_entropy] if hasattr(F, "linear_cross_entropy") else []))
"""Targets are class indices, of which `ignore_index` counts for nothing; or, for cross_entropy, probabilities."""

SIGNATURES = {function: inspect.signature(function) for function in (*PER_ELEMENT, *CLASSIFYING, F.kl_div, F.ctc_loss)}
WEIGHTED = (F.mse_loss, F.l1_loss)
"""Their mean divides by the sum of `weight` where there is one."""


@dataclass(frozen=True)
class Unreduced:
    """A loss before its reduction."""

    elements: Tensor
    """With gradient. The loss is their sum over `denominator`, or their sum, or themselves."""
    reduction: str
    """mean, sum or none"""
    denominator: Tensor | float
    """What a mean of this loss divides by, whether or not one was asked for."""
    supervised: Tensor | None
    """Bool, the shape of `elements`; None where every element counts."""
    shares: Tensor | None
    """What each element adds to the denominator, where that is not 1: class weights."""
    targets: Tensor | None
    dtype: torch.dtype
    """Of the loss. Elements that are summed are kept in float32 at least, as torch does inside its own reductions."""

    def reduced(self) -> Tensor:
        """The loss as it was asked for."""
        if self.reduction == "none":
            return self.elements
        total = self.elements.sum()
        return (total / self.denominator if self.reduction == "mean" else total).to(self.dtype)


def unreduced(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Unreduced | None:
    """The call `function(*args, **kwargs)` before its reduction; None where there is nothing to see."""
    call = SIGNATURES[function].bind(*args, **kwargs)
    call.apply_defaults()
    values = call.arguments
    reduction = values["reduction"]
    if values.get("size_average") is not None or values.get("reduce") is not None:
        reduction = _reduction.legacy_get_string(values["size_average"], values["reduce"], emit_warning=False)
        values["size_average"] = values["reduce"] = None
    if reduction not in ("mean", "sum", "none", "batchmean"):
        return None
    values["reduction"] = "none"
    elements = function(*call.args, **call.kwargs)
    if not elements.requires_grad:
        return None
    targets = next((values[name] for name in ("target", "targets") if isinstance(values.get(name), Tensor)), None)
    supervised, shares = _counted(function, values, elements)
    if reduction == "batchmean":
        denominator = float(values["input"].shape[0])
    elif shares is not None:
        denominator = shares.sum()
    else:
        denominator = float(elements.numel()) if supervised is None else supervised.sum()
    if function is F.ctc_loss and reduction == "mean":
        lengths = torch.as_tensor(values["target_lengths"], device=elements.device)
        elements = elements / lengths.clamp(min=1).to(elements.dtype)
    asked = "mean" if reduction == "batchmean" else reduction
    dtype = elements.dtype
    if asked != "none" and dtype in (torch.float16, torch.bfloat16):
        elements = elements.float()
    return Unreduced(elements, asked, denominator, supervised, shares, targets, dtype)


def _counted(
    function: Callable[..., Any], values: dict[str, Any], elements: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Which elements count, and what each adds to the denominator; None for all, and for 1."""
    weight = values.get("weight")
    if function in CLASSIFYING and not values["target"].is_floating_point():
        target = values["target"]
        ignored = values["ignore_index"]
        supervised = target != (-100 if ignored is None else ignored)
        if weight is None:
            return supervised, None
        return supervised, weight.detach()[torch.where(supervised, target, 0)].masked_fill(~supervised, 0)
    if function in WEIGHTED and weight is not None:
        return None, weight.detach().expand_as(elements)
    return None, None
