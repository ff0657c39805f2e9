"""The gradient sum of every parameter while a group runs, its global norm, and its hand-over to the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

LOW_PRECISION = (torch.float16, torch.bfloat16)


class GradientSums:
    """One gradient sum per parameter, in model order; None where nothing reached the parameter.

    A parameter of float32 or wider is summed by autograd in `p.grad`. A parameter of float16 or bfloat16 is summed
    in float32 beside the model and rounded once, when the optimizer gets it: in bfloat16, adding 1e-3 to 1 leaves 1.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._wide: dict[int, Tensor | None] = {}
        self._summing = False
        for i, p in enumerate(self.parameters):
            if p.dtype in LOW_PRECISION:
                self._wide[i] = None
                p.register_post_accumulate_grad_hook(lambda p, i=i: self._widen(i, p))

    def _widen(self, i: int, p: Tensor) -> None:
        if not self._summing or p.grad is None:
            return
        total = self._wide[i]
        self._wide[i] = p.grad.float() if total is None else total.add_(p.grad)
        p.grad = None

    def begin(self) -> None:
        """Start a group from nothing; gradients that were left on the parameters are dropped."""
        self.clear()
        self._summing = True

    def clear(self) -> None:
        """Drop all gradients and stop summing."""
        self._summing = False
        for p in self.parameters:
            p.grad = None
        for i in self._wide:
            self._wide[i] = None

    def __len__(self) -> int:
        return len(self.parameters)

    def __getitem__(self, i: int) -> Tensor | None:
        return self._wide[i] if i in self._wide else self.parameters[i].grad

    def __setitem__(self, i: int, gradient: Tensor | None) -> None:
        if i in self._wide:
            self._wide[i] = gradient
        else:
            self.parameters[i].grad = gradient

    def dtype(self, i: int) -> torch.dtype:
        """The dtype in which parameter i's gradients are summed."""
        return torch.float32 if i in self._wide else self.parameters[i].dtype

    def present(self) -> list[bool]:
        """Per parameter, whether it has a gradient."""
        return [self[i] is not None for i in range(len(self))]

    def norm(self) -> float:
        """The global 2-norm; inf or NaN exactly where some gradient is.

        Squares are summed in float64, per parameter and then over parameters in model order, so that the same
        gradients have the same norm however they were split. One host-device synchronisation.
        """
        norms = [
            torch.linalg.vector_norm(g, 2, dtype=torch.float64) for i in range(len(self)) if (g := self[i]) is not None
        ]
        total = 0.0
        for norm in torch.stack(norms).tolist() if norms else ():
            total += norm * norm
        return math.sqrt(total)

    def scale(self, factor: float) -> None:
        """Multiply every gradient by a host number."""
        if factor != 1.0 and (gradients := [g for i in range(len(self)) if (g := self[i]) is not None]):
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]

    def hand_over(self) -> None:
        """Put the sums where optimizers look: `p.grad`, in the parameter's own dtype."""
        self._summing = False
        for i, total in self._wide.items():
            self.parameters[i].grad = None if total is None else total.to(self.parameters[i].dtype)
            self._wide[i] = None
