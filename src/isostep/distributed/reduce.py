"""Gradient sums over replicas, once per update, in static bucket order.

Buckets are cut once, in reverse model order, the order in which backward finishes gradients. A tensor as large as a
bucket is reduced where it lies. Smaller ones are copied into one flat tensor that then IS their gradient: they become
views of it, so no gradient is copied back and at most one bucket lives twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError
from ..gradients import GradientSums

BUCKET_BYTES = 8 << 20


@dataclass(frozen=True)
class Bucket:
    """Indices of parameters whose gradients travel together; all have one dtype."""

    indices: tuple[int, ...]
    dtype: torch.dtype


def cut_buckets(gradients: GradientSums, limit: int) -> list[Bucket]:
    """Trainable parameters in reverse model order, cut where the dtype changes or `limit` bytes are exceeded.

    Depends on the model alone, so every replica cuts the same buckets.
    """
    buckets: list[Bucket] = []
    indices: list[int] = []
    size = 0
    for i in reversed(range(len(gradients))):
        if not gradients.parameters[i].requires_grad or gradients.parameters[i].is_meta:
            continue
        dtype = gradients.dtype(i)
        nbytes = gradients.parameters[i].numel() * dtype.itemsize
        if indices and (dtype != gradients.dtype(indices[0]) or size + nbytes > limit):
            buckets.append(Bucket(tuple(indices), gradients.dtype(indices[0])))
            indices, size = [], 0
        indices.append(i)
        size += nbytes
    if indices:
        buckets.append(Bucket(tuple(indices), gradients.dtype(indices[0])))
    return buckets


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a piece of memory without gaps or overlaps, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda d: d[1]):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def as_parameter(part: Tensor, parameter: Tensor) -> Tensor:
    """A piece of a bucket in the memory layout of its parameter: fused optimizers walk both linearly."""
    if is_dense(parameter):
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view(parameter.shape)


class GradientReducer:
    """Reduces the gradients of one model; remembers its buckets."""

    def __init__(self) -> None:
        self._trainable: tuple[bool, ...] = ()
        self._buckets: list[Bucket] = []

    def reduce(
        self,
        group: dist.ProcessGroup,
        gradients: GradientSums,
        backward: Callable[[], None] | None,
        present: Sequence[bool],
        wait: Callable[[dist.Work], None],
    ) -> None:
        """Replace every gradient by its sum over the group; see `comm.Comm.reduce`.

        A parameter that has a gradient on some replicas counts as zero on the others, and as None where it has one
        on none. Only if that is not known before an overlapped backward is it asked for in a small all-reduce.
        """
        sending = _Sending(gradients, self._buckets_of(gradients), group)
        if backward is not None:
            sending.during(backward)
        here = gradients.present()
        sending.rest()
        for work in sending.works:
            wait(work)
        wanted = [p or not trainable for p, trainable in zip(present, self._trainable, strict=True)]
        if backward is not None and not all(wanted):
            present = sending.anywhere(here, wait)
        for i, anywhere in enumerate(present):
            if not anywhere:
                gradients[i] = None

    def _buckets_of(self, gradients: GradientSums) -> list[Bucket]:
        trainable = tuple(p.requires_grad for p in gradients.parameters)
        if trainable != self._trainable:
            self._trainable, self._buckets = trainable, cut_buckets(gradients, BUCKET_BYTES)
        return self._buckets


class _Sending:
    """The buckets of one update on their way: each starts once, in order."""

    def __init__(self, gradients: GradientSums, buckets: Sequence[Bucket], group: dist.ProcessGroup) -> None:
        self._gradients, self._buckets, self._group = gradients, buckets, group
        self._bucket_of = {i: b for b, bucket in enumerate(buckets) for i in bucket.indices}
        self._unfinished = [set(bucket.indices) for bucket in buckets]
        self.works: list[dist.Work] = []
        self._lone_storages: set[int] = set()
        self._device = next(p.device for p in gradients.parameters if not p.is_meta)

    def during(self, backward: Callable[[], None]) -> None:
        """Run a backward; start each bucket when its last gradient is final and the buckets before it are started."""
        parameters = self._gradients.parameters
        hooks = [parameters[i].register_post_accumulate_grad_hook(partial(self._final, i)) for i in self._bucket_of]
        try:
            backward()
        finally:
            for hook in hooks:
                hook.remove()

    def rest(self) -> None:
        """Start every bucket that is not started yet."""
        while len(self.works) < len(self._buckets):
            self._start(self._buckets[len(self.works)])

    def anywhere(self, here: Sequence[bool], wait: Callable[[dist.Work], None]) -> list[bool]:
        """Per parameter, whether any replica has a gradient for it."""
        flags = torch.tensor(here, dtype=torch.float32, device=self._device)
        work = dist.all_reduce(flags, group=self._group, async_op=True)
        assert work is not None
        wait(work)
        return (flags > 0).tolist()

    def _final(self, i: int, parameter: Tensor) -> None:
        bucket = self._bucket_of[i]
        if bucket < len(self.works):
            raise InputError.of(
                "overlap", f"a second gradient for a parameter of shape {tuple(parameter.shape)} in one backward",
                "one", "use non-reentrant activation checkpointing, or overlap=False",
            )  # fmt: skip
        self._unfinished[bucket].discard(i)
        while len(self.works) < len(self._buckets) and not self._unfinished[len(self.works)]:
            self._start(self._buckets[len(self.works)])

    def _start(self, bucket: Bucket) -> None:
        tensor = self._lone(bucket.indices[0]) if len(bucket.indices) == 1 else self._flat(bucket)
        work = dist.all_reduce(tensor, group=self._group, async_op=True)
        assert work is not None
        self.works.append(work)

    def _lone(self, i: int) -> Tensor:
        parameter = self._gradients.parameters[i]
        gradient = self._gradients[i]
        if gradient is None:
            gradient = torch.zeros_like(parameter, dtype=self._gradients.dtype(i))
        if gradient.stride() != parameter.stride() or not is_dense(gradient):
            flat = torch.empty(gradient.numel(), dtype=gradient.dtype, device=gradient.device)
            gradient = as_parameter(flat, parameter).copy_(gradient)
        gradient = gradient.detach()
        storage = gradient.untyped_storage().data_ptr()
        if storage in self._lone_storages and gradient.numel():
            raise InputError.of(
                "overlap", "two parameters whose gradients share memory", "memory of its own for each",
                "add up parameters and not views of them, or use overlap=False",
            )  # fmt: skip
        self._lone_storages.add(storage)
        self._gradients[i] = gradient
        return gradient.as_strided((gradient.numel(),), (1,))

    def _flat(self, bucket: Bucket) -> Tensor:
        parameters = [self._gradients.parameters[i] for i in bucket.indices]
        flat = torch.empty(sum(p.numel() for p in parameters), dtype=bucket.dtype, device=self._device)
        for i, part in zip(bucket.indices, flat.split([p.numel() for p in parameters]), strict=True):
            view = as_parameter(part, self._gradients.parameters[i])
            gradient = self._gradients[i]
            view.zero_() if gradient is None else view.copy_(gradient)
            self._gradients[i] = view
        return flat
