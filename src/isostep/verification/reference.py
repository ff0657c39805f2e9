"""The reference that every layout must match. It imports torch only, and runs all examples one at a time.

Nothing here may import from the rest of the package: what judges the engine shares no code with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Reference:
    """Gradients by parameter name after clipping, their norm before it, the loss, and what was counted."""

    gradients: dict[str, Tensor]
    norm: float
    loss: float
    num_examples: int
    num_supervised_tokens: int
    num_tokens: int


def reference_update(
    model: nn.Module, examples: Sequence[dict[str, Tensor]], coefficient: float, clip_norm: float
) -> Reference:
    """Next-token cross entropy over all supervised tokens, plus coefficient times the mean squared log-partition
    over all tokens.

    examples: `input_ids` and `labels`, int64 [length]; label i + 1 is the target of position i, -100 is none.
    Leaves the model without gradients.
    """
    supervised = sum(int(label) != -100 for e in examples for label in e["labels"][1:])
    tokens = sum(len(e["input_ids"]) for e in examples)
    model.zero_grad(set_to_none=True)
    loss = 0.0
    for example in examples:
        logits = model(example["input_ids"][None])[0]
        cross_entropy = F.cross_entropy(logits[:-1], example["labels"][1:], ignore_index=-100, reduction="sum")
        squared = logits.logsumexp(-1).square().sum()
        part = cross_entropy / supervised + coefficient * squared / tokens
        part.backward()
        loss += part.item()
    gradients, norm = _clipped(model, clip_norm)
    return Reference(gradients, norm, loss, len(examples), supervised, tokens)


def mean_of_means(
    model: nn.Module, examples: Sequence[dict[str, Tensor]], coefficient: float, clip_norm: float
) -> dict[str, Tensor]:
    """The control: the same objective with each pair of examples averaged by itself, then the averages averaged.

    What a loop does that divides each microbatch's mean loss by the number of microbatches. Leaves no gradients.
    """
    model.zero_grad(set_to_none=True)
    size = 2 if len(examples) > 2 else 1
    pairs = [examples[i : i + size] for i in range(0, len(examples), size)]
    for pair in pairs:
        supervised = max(1, sum(int(label) != -100 for e in pair for label in e["labels"][1:]))
        tokens = sum(len(e["input_ids"]) for e in pair)
        for example in pair:
            logits = model(example["input_ids"][None])[0]
            cross_entropy = F.cross_entropy(logits[:-1], example["labels"][1:], ignore_index=-100, reduction="sum")
            squared = logits.logsumexp(-1).square().sum()
            ((cross_entropy / supervised + coefficient * squared / tokens) / len(pairs)).backward()
    return _clipped(model, clip_norm)[0]


def _clipped(model: nn.Module, clip_norm: float) -> tuple[dict[str, Tensor], float]:
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients, float(norm)


def gradient_error(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, str]:
    """Max over parameters of |g - r|_inf / |r|_inf, and the parameter where it is; a zero reference wants zero.

    Infinite where a parameter has a gradient in one and none in the other, or where one is not finite.
    """
    worst, where = 0.0, next(iter(reference), "")
    for name in {**reference, **gradients}:
        error = float("inf")
        if name in gradients and name in reference:
            g, r = gradients[name].double(), reference[name].double()
            size = r.abs().max().item()
            difference = (g - r).abs().max().item()
            error = difference / size if size else (0.0 if difference == 0 else float("inf"))
        if not error <= worst:
            worst, where = (error if error == error else float("inf")), name
    return worst, where


def dtype_tolerance(dtype: torch.dtype, num_tokens: int) -> float:
    """The error that a layout may have: 1e-12 in float64; in float32 n * u for a sum of n terms.

    u is the unit roundoff; n * u bounds recursive summation of n terms in any order (Higham 2002, "Accuracy and
    Stability of Numerical Algorithms", section 4.2). The gradient sums one term per token.
    """
    return 1e-12 if dtype == torch.float64 else num_tokens * torch.finfo(dtype).eps / 2
