"""What really went over the wire: a wrapper around torch.distributed that counts, whatever the engine says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor

SMALL_BYTES = 1024
_COLLECTIVES = (
    "all_reduce",
    "reduce",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
    "broadcast",
    "all_to_all_single",
)


@dataclass
class Traffic:
    """Bytes of each collective call, in order. A call under `SMALL_BYTES` cannot carry a model's gradients: it is
    taken for counts or a vote.
    """

    calls: list[int] = field(default_factory=list)

    @property
    def small_calls(self) -> int:
        return sum(nbytes < SMALL_BYTES for nbytes in self.calls)

    @property
    def large_bytes(self) -> int:
        return sum(nbytes for nbytes in self.calls if nbytes >= SMALL_BYTES)


@contextmanager
def watched() -> Iterator[Traffic]:
    """Count every collective that this process calls through `torch.distributed` meanwhile."""
    traffic = Traffic()

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            traffic.calls.append(max((t.numel() * t.element_size() for t in tensors), default=0))
            return function(*args, **kwargs)

        return call

    originals = {name: getattr(dist, name) for name in _COLLECTIVES}
    try:
        for name, function in originals.items():
            setattr(dist, name, counting(function))
        yield traffic
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
