"""Memory: how much is used and available, what counts as running out of it, and what is tried then."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from .errors import OutOfMemoryError

_CPU_ALLOCATOR = "DefaultCPUAllocator"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


def half(examples_per_microbatch: int | None) -> int:
    """The size to try after memory ran out; None is for ready microbatches, which nobody can cut.

    Raises OutOfMemoryError where no smaller size is left.
    """
    if examples_per_microbatch is None:
        raise OutOfMemoryError(
            "memory: got out of memory in a ready microbatch, expected room for it; "
            "bring smaller batches, or give a map-style data set (in training by `groups`), which isostep can cut"
        )
    if examples_per_microbatch <= 1:
        raise OutOfMemoryError(
            "memory: got out of memory with 1 example per microbatch, expected room for one; "
            "use shorter examples, a smaller model, lower precision or activation checkpointing"
        )
    return -(-examples_per_microbatch // 2)


def in_use_bytes(device: torch.device) -> int:
    """What is in use now, as `peak_bytes` counts it: once the model is built, the baseline of a run."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _kilobytes("self/status", "VmRSS")


def peak_bytes(device: torch.device) -> int:
    """Peak since the last reset: bytes allocated on a CUDA device, resident set of this process on a CPU.

    0 where the system does not tell.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _kilobytes("self/status", "VmHWM")


def reset_peak(device: torch.device) -> None:
    """Start a new peak from what is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Host memory that can still be taken: MemAvailable, or what a control group leaves of its limit if that is less.

    None where the system does not tell.
    """
    host = _kilobytes("meminfo", "MemAvailable", proc)
    rooms = [host, *_cgroup_rooms(proc, cgroups)] if host else _cgroup_rooms(proc, cgroups)
    return min(rooms, default=None)


def _kilobytes(file: str, field: str, proc: Path = Path("/proc")) -> int:
    """A field of a file of /proc in bytes; 0 where there is none."""
    found = re.search(rf"^{field}:\s+(\d+) kB", _text(proc / file), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _cgroup_rooms(proc: Path, cgroups: Path) -> list[int]:
    """What the limits of this process's control groups leave, its own and those around it; version 2 and version 1."""
    rooms = []
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, limit, usage, cache = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(base) and (most := _text(place / limit).strip()).isdigit():
                freed = re.search(rf"^{cache} (\d+)", _text(place / "memory.stat"), re.MULTILINE)
                used = int(_text(place / usage) or 0) - (int(freed[1]) if freed else 0)
                rooms.append(max(0, int(most) - used))
    return rooms


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
