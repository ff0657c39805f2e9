"""Times `Updater` beside a hand-written exact loop, in one run, and prints the table of benchmarks/README.md.

CPU time (`time.process_time`, all threads of a process) in ABBA order, so that a drift of the machine hits both
sides alike. A row's bound is the one-sided 95 % upper bound of the mean ratio over blocks (Student's t).
"""

from __future__ import annotations

import argparse
import gc
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from isostep import Term, Updater, causal_lm
from isostep.distributed.launch import run_workers
from isostep.memory import peak_bytes, reset_peak
from isostep.models.decoder import Decoder, DecoderConfig

T_95 = {5: 2.015, 7: 1.895, 9: 1.833, 11: 1.796, 14: 1.761, 19: 1.729}
"""Student's t, one-sided 95 %, by degrees of freedom."""

Batch = dict[str, Tensor]
OneUpdate = Callable[[Sequence[Batch]], None]


@dataclass(frozen=True)
class Size:
    width: int
    depth: int
    length: int
    examples_per_microbatch: int
    accumulate: int


TEN_MILLION = Size(width=320, depth=8, length=128, examples_per_microbatch=4, accumulate=4)


def build(size: Size) -> Decoder:
    return Decoder(DecoderConfig(258, size.length, width=size.width, depth=size.depth, heads=8))


def batches(size: Size, seed: int) -> list[Batch]:
    """Microbatches with unequal supervised counts."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(size.accumulate):
        ids = torch.randint(258, (size.examples_per_microbatch, size.length), generator=generator)
        labels = ids.clone()
        labels[:, : int(torch.randint(1, size.length // 2, (), generator=generator))] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float) -> OneUpdate:
    """The exact loop as one writes it who knows what is right."""

    def update(microbatches: Sequence[Batch]) -> None:
        count = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in microbatches]).sum()
        if dist.get_world_size() > 1:
            dist.all_reduce(count)
        denominator = count.item()
        total = torch.zeros((), device=count.device)
        for batch in microbatches:
            logits = model(batch["input_ids"])
            targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)  # shifting the logits would copy them
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            (loss / denominator).backward()
            total += loss.detach()
        if dist.get_world_size() > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            dist.all_reduce(total)
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def with_isostep(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float, overlap: bool = False
) -> OneUpdate:
    updater = Updater(model, optimizer, causal_lm, clip_norm=clip_norm, overlap=overlap)
    return lambda microbatches: updater.update(microbatches) and None


def pair(size: Size, overlap: bool = False) -> tuple[OneUpdate, OneUpdate]:
    """isostep and the loop by hand, each on a model of its own."""
    ours, theirs = build(size), build(size)
    return (
        with_isostep(ours, torch.optim.AdamW(ours.parameters(), lr=1e-4), 1.0, overlap),
        by_hand(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-4), 1.0),
    )


def abba(a: OneUpdate, b: OneUpdate, data: Sequence[Batch], blocks: int, clock: Callable[[], float]) -> list[float]:
    """Ratio a / b of each block a b b a, after one update of each that does not count."""

    def timed(update: OneUpdate) -> float:
        begin = clock()
        update(data)
        return clock() - begin

    timed(a), timed(b)
    ratios = []
    for _ in range(blocks):
        first, second, third, fourth = timed(a), timed(b), timed(b), timed(a)
        ratios.append((first + fourth) / (second + third))
    return ratios


def upper_bound(ratios: Sequence[float]) -> float:
    """One-sided 95 % upper bound of the mean."""
    return statistics.mean(ratios) + T_95[len(ratios) - 1] * statistics.stdev(ratios) / math.sqrt(len(ratios))


def ratio_worker(blocks: int, overlap: bool) -> list[float]:
    ours, theirs = pair(TEN_MILLION, overlap)
    return abba(ours, theirs, batches(TEN_MILLION, dist.get_rank()), blocks, time.process_time)


def overlap_worker(blocks: int) -> list[float]:
    """Wall time with overlap on against off."""
    on, _ = pair(TEN_MILLION, overlap=True)
    off, _ = pair(TEN_MILLION, overlap=False)
    return abba(on, off, batches(TEN_MILLION, dist.get_rank()), blocks, time.perf_counter)


def memory_worker(which: str) -> list[int]:
    """Peak resident bytes of three updates on every rank, from a first update on."""
    model = build(TEN_MILLION)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    update = (
        by_hand(model, optimizer, 1.0) if which == "hand" else with_isostep(model, optimizer, 1.0, which == "overlap")
    )
    data = batches(TEN_MILLION, dist.get_rank())
    update(data)
    gc.collect()
    device = torch.device("cpu")
    reset_peak(device)
    for _ in range(3):
        update(data)
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, peak_bytes(device))
    return peaks


class NoOp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def own_code() -> tuple[float, float]:
    """Seconds of isostep's own code per update and per microbatch: on a model that does nothing, less the bare loop.

    A line through the medians at 1 and 33 microbatches.
    """
    term = Term("sum", lambda outputs, batch: outputs.sum(), lambda batch: batch.numel())
    model = NoOp()
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.0), term, clip_norm=1.0)
    bare_model = NoOp()
    bare_optimizer = torch.optim.SGD(bare_model.parameters(), lr=0.0)

    def bare(data: Sequence[Tensor]) -> None:
        count = sum(batch.numel() for batch in data)
        for batch in data:
            (bare_model(batch).sum() / count).backward()
        nn.utils.clip_grad_norm_(bare_model.parameters(), 1.0)
        bare_optimizer.step()
        bare_optimizer.zero_grad(set_to_none=True)

    def median_difference(num_microbatches: int) -> float:
        data = [torch.ones(4) for _ in range(num_microbatches)]
        differences = []
        for _ in range(300):
            begin = time.perf_counter()
            updater.update(data)
            middle = time.perf_counter()
            bare(data)
            differences.append(2 * middle - begin - time.perf_counter())
        return statistics.median(differences)

    median_difference(1)
    one, many = median_difference(1), median_difference(33)
    slope = (many - one) / 32
    return one - slope, slope


def row(name: str, value: str, bound: str, fine: bool) -> str:
    return f"| {name} | {value} | {bound} | {'yes' if fine else 'NO'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, choices=[n + 1 for n in T_95], default=10)
    blocks = parser.parse_args().blocks
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads in all, ",
        end="",
    )
    print(f"{build(TEN_MILLION).num_parameters():,} parameters, {blocks} blocks\n")
    print("| what | measured | bound | holds |\n|---|---|---|---|", flush=True)
    for procs, overlap in ((1, False), (2, False), (2, True)):
        ratios = run_workers(procs, ratio_worker, blocks, overlap, timeout=300)
        bound = upper_bound(ratios)
        name = f"CPU time, `Updater` / by hand, {procs} worker{'s' * (procs > 1)}{', overlap' * overlap}"
        value = f"mean {statistics.mean(ratios):.3f}, 95 % upper bound {bound:.3f}"
        print(row(name, value, "<= 1.05", bound <= 1.05), flush=True)
    for procs in (1, 2):
        ours, theirs = (run_workers(procs, memory_worker, which, timeout=300) for which in ("isostep", "hand"))
        ratio = max(a / b for a, b in zip(ours, theirs, strict=True))
        value = f"{ratio:.3f} ({max(ours) / 1e6:.0f} MB / {max(theirs) / 1e6:.0f} MB)"
        name = f"peak memory, `Updater` / by hand, {procs} worker{'s' * (procs > 1)}"
        print(row(name, value, "<= 1.02", ratio <= 1.02), flush=True)
    update, microbatch = own_code()
    print(row("own code per update", f"{update * 1e3:.3f} ms", "<= 0.5 ms", update <= 0.5e-3))
    print(row("own code per microbatch", f"{microbatch * 1e6:.1f} us", "<= 50 us", microbatch <= 50e-6), flush=True)
    ratios = run_workers(2, overlap_worker, blocks, timeout=300)
    print(row("wall time, overlap on / off, 2 workers", f"mean {statistics.mean(ratios):.3f}", "-", True))


if __name__ == "__main__":
    main()
