"""Dynamic loss scale for float16: one scale in a group, one verdict over all replicas.

The rule is torch.amp.GradScaler's (Micikevicius et al. 2018, "Mixed precision training", section 3.2): after a
non-finite gradient the update is skipped and the scale halved; after `growth_interval` applied updates in a row it
is doubled.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .errors import InputError, NonFiniteError

SMALLEST = 2.0**-24


@dataclass
class LossScale:
    """The scale and how it moves. `state_dict` keeps everything."""

    scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    applied_in_a_row: int = 0

    def refresh(self) -> None:
        """Take up what was changed elsewhere since the last update."""

    def record(self, *, finite: bool) -> None:
        """Move the scale after a verdict. Raises NonFiniteError where halving has stopped helping."""
        if not finite:
            self.applied_in_a_row = 0
            self.scale *= self.backoff_factor
            if self.scale < SMALLEST:
                raise NonFiniteError(
                    f"loss scale: got {self.scale:g} after skipping update upon update, expected 2**-24 or more; "
                    "the gradients are non-finite at any scale: look for inf or NaN in the data or the model"
                )
            return
        self.applied_in_a_row += 1
        if self.applied_in_a_row == self.growth_interval:
            self.applied_in_a_row = 0
            grown = self.scale * self.growth_factor
            self.scale = grown if grown <= torch.finfo(torch.float32).max else self.scale

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])


class TorchLossScale(LossScale):
    """A torch.amp.GradScaler used for its numbers: all are read from it before every update, and written back.

    Its own `unscale_` and `step` are never called: they judge one rank's gradients, before any reduction.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        if not scaler.is_enabled():
            raise InputError.of("loss_scale", "a disabled GradScaler", "an enabled one", "leave loss_scale out")
        super().__init__()
        self._scaler = scaler
        self.refresh()

    def refresh(self) -> None:
        state = self._scaler.state_dict()
        self.scale = state["scale"]
        self.growth_factor = state["growth_factor"]
        self.backoff_factor = state["backoff_factor"]
        self.growth_interval = state["growth_interval"]
        self.applied_in_a_row = state["_growth_tracker"]

    def record(self, *, finite: bool) -> None:
        try:
            super().record(finite=finite)
        finally:
            self._write_back()

    def state_dict(self) -> dict[str, Any]:
        self.refresh()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._write_back()

    def _write_back(self) -> None:
        self._scaler.load_state_dict(
            {
                "scale": self.scale,
                "growth_factor": self.growth_factor,
                "backoff_factor": self.backoff_factor,
                "growth_interval": self.growth_interval,
                "_growth_tracker": self.applied_in_a_row,
            }
        )


def loss_scale_of(value: LossScale | torch.amp.GradScaler | None) -> LossScale | None:
    """A LossScale from what the user gave."""
    if isinstance(value, torch.amp.GradScaler):
        return TorchLossScale(value)
    if value is not None and not (isinstance(value, LossScale) and math.isfinite(value.scale) and value.scale > 0):
        raise InputError.of("loss_scale", value, "a LossScale or a torch.amp.GradScaler", "give one of them")
    return value
