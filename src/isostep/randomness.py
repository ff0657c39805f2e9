"""Randomness in an update is keyed, never consumed: each microbatch draws from its own seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .units import Coverage, derive_key


def microbatch_key(seed: int, epoch: int, coverage: Coverage, index: int) -> int:
    """The seed of a microbatch's draws: its examples decide, wherever and whenever they run.

    `index` decides instead where the examples carry no ids (an empty coverage).
    """
    return derive_key(seed, epoch, coverage.hash, index if coverage.count == 0 else -1) >> 1


def seed_generators(device: torch.device, key: int) -> None:
    """Seed torch's default generators of the CPU and of `device`."""
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Leave torch's default generators of the CPU and of `device` as they were found."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
