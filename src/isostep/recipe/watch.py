"""Peaks of memory over the life of a worker: before training, in its first group, in the groups after it."""

from __future__ import annotations

import torch

from ..memory import in_use_bytes, peak_bytes, reset_peak


class MemoryWatch:
    """Peaks of this process in bytes; made when the model is built. Validation is left out of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.baseline = in_use_bytes(device)
        self.first_group: int | None = None
        self.later_groups: int | None = None

    def begin_group(self) -> None:
        """Forget what was done between groups."""
        reset_peak(self._device)

    def end_group(self) -> int:
        """Take the peak of a group, and return it. The first one holds the first optimizer step."""
        peak = peak_bytes(self._device)
        if self.first_group is None:
            self.first_group = peak
        else:
            self.later_groups = max(self.later_groups or 0, peak)
        return peak
