"""A small linear picture of a large gradient: the sums of its elements, with random signs, over SIZE buckets.

The map is linear and the same on every rank, so the sketch of a sum of gradients is the sum of their sketches, and what
combination of microbatches a gradient is can be read from the sketches alone. (Count sketch: Charikar, Chen and
Farach-Colton, Finding frequent items in data streams, section 3.2; here with one row and buckets in turn.)
"""

from __future__ import annotations

import torch
from torch import Tensor

SIZE = 1024
"""Buckets. More microbatches than this in one update cannot be told apart."""

PERIOD = 1048573
"""Signs repeat after so many elements: a prime, so that no row or column of a large matrix keeps its signs."""

_signs: dict[torch.device, Tensor] = {}


def sketch(values: Tensor, place: int, begin: int = 0) -> Tensor:
    """The sketch of a tensor, float64, shape (SIZE,). `place` tells parameters apart: it chooses where signs begin.

    begin: elements of the whole tensor before these, where they are a part of it. Sketches of all parts add up to the
    sketch of the whole.
    """
    flat = (values.to_dense() if values.layout != torch.strided else values).detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    signs = _signs_on(flat.device)
    total = torch.zeros(SIZE, dtype=torch.float64, device=flat.device)
    done = 0
    while done < flat.numel():
        sign = (place * 7919 + begin + done) % PERIOD
        part = flat[done : done + PERIOD - sign]
        part = part.to(torch.float64 if part.dtype == torch.float64 else torch.float32)
        _add(total, part * signs[sign : sign + part.numel()], (place * 389 + begin + done) % SIZE)
        done += part.numel()
    return total


def _add(total: Tensor, signed: Tensor, bucket: int) -> None:
    """Add elements to the buckets in turn, beginning with `bucket`."""
    head = signed[: (SIZE - bucket) % SIZE]
    total[bucket : bucket + head.numel()] += head
    signed = signed[head.numel() :]
    whole = signed.numel() // SIZE * SIZE
    total += signed[:whole].view(-1, SIZE).sum(0)
    total[: signed.numel() - whole] += signed[whole:]


def _signs_on(device: torch.device) -> Tensor:
    if device not in _signs:
        generator = torch.Generator().manual_seed(20240607)
        signs = torch.randint(0, 2, (PERIOD,), generator=generator, dtype=torch.int8) * 2 - 1
        _signs[device] = signs.to(device)
    return _signs[device]


def row_hashes(tensors: list[Tensor], rows: int) -> Tensor:
    """One int64 hash per row of the first axis, over all tensors; 0 where a row says little: less than four different
    whole numbers, or less than two others.
    """
    total = torch.zeros(rows, dtype=torch.int64, device=tensors[0].device)
    telling = torch.zeros(rows, dtype=torch.bool, device=tensors[0].device)
    for tensor in tensors:
        values = _as_integers(tensor.detach().reshape(rows, -1))
        factors = (torch.arange(1, values.shape[1] + 1, device=values.device) * 6364136223846793005) | 1
        hashed = (values * factors).sum(1)
        total = (total ^ (hashed ^ (hashed >> 29))) * 1442695040888963407
        few = values[:, :: max(1, values.shape[1] // 512)].sort(dim=1).values
        telling |= (few[:, 1:] != few[:, :-1]).sum(1) >= (1 if tensor.is_floating_point() else 3)
    return torch.where(telling, total | 1, 0)


def _as_integers(values: Tensor) -> Tensor:
    if not values.is_floating_point():
        return values.to(torch.int64)
    same_width = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[values.element_size()]
    return values.contiguous().view(same_width).to(torch.int64)
