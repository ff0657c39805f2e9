"""Randomness in an update is keyed, never consumed: each microbatch draws from its own seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .units import Coverage, derive_key

FORWARD, LOADING = 0, 1
"""What draws are for: a forward and the loading of its examples do not repeat each other's."""


def microbatch_key(seed: int, purpose: int, epoch: int, coverage: Coverage, place: tuple[int, int, int]) -> int:
    """The seed of a microbatch's draws: its examples decide, wherever and whenever they run.

    place: index of the group, replica, index of the microbatch; it decides where the examples carry no ids (an empty
    coverage).
    """
    return derive_key(seed, purpose, epoch, coverage.hash, *(() if coverage.count else place)) >> 1


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
