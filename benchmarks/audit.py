"""Times a training loop under an audit beside the same loop alone, in one run: the table of benchmarks/README.md.

CPU time (`time.process_time`, all threads) of blocks of four updates in ABBA order; losses of both are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from run import T_95, TEN_MILLION, Batch, Size, batches, build, row, upper_bound

from isostep.audit import watch
from isostep.distributed.launch import run_workers
from isostep.memory import peak_bytes, reset_peak

UPDATES = 4
SMALL = Size(width=320, depth=8, length=128, examples_per_microbatch=1, accumulate=4)
BOUND = 1.5


class Loop:
    """A plain loop with clipping, DistributedDataParallel where there are two workers. Its losses add up."""

    def __init__(self, size: Size) -> None:
        torch.manual_seed(0)
        model = build(size)
        self.model = torch.nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.losses: list[float] = []

    def run(self, data: Sequence[Batch]) -> None:
        for _ in range(UPDATES):
            for batch in data:
                logits = self.model(batch["input_ids"])
                targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                (loss / len(data)).backward()
                self.losses.append(float(loss.detach()))
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def worker(size: Size, blocks: int) -> tuple[list[float], float, float]:
    """Ratios of CPU time, the largest relative difference of losses, and the ratio of peak memory."""
    data = batches(size, dist.get_rank())
    audited, alone = Loop(size), Loop(size)

    def timed(loop: Loop) -> float:
        if loop is alone:
            begin = time.process_time()
            loop.run(data)
            return time.process_time() - begin
        with watch():
            begin = time.process_time()
            loop.run(data)
            return time.process_time() - begin

    peaks = []
    for loop in (alone, audited):
        reset_peak(torch.device("cpu"))
        timed(loop)
        peaks.append(peak_bytes(torch.device("cpu")))
    ratios = []
    for _ in range(blocks):
        first, second, third, fourth = timed(audited), timed(alone), timed(alone), timed(audited)
        ratios.append((first + fourth) / (second + third))
    apart = max(abs(a - b) / abs(b) for a, b in zip(audited.losses, alone.losses, strict=True))
    return ratios, apart, peaks[1] / peaks[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, choices=[n + 1 for n in T_95], default=6)
    blocks = parser.parse_args().blocks
    print("| what | measured | bound | holds |\n|---|---|---|---|", flush=True)
    for size in (TEN_MILLION, SMALL):
        for procs in (1, 2):
            ratios, apart, peak = run_workers(procs, worker, size, blocks, timeout=600)
            bound = upper_bound(ratios)
            name = f"{size.examples_per_microbatch} x {size.length} tokens, {procs} worker{'s' * (procs > 1)}"
            value = f"mean {statistics.mean(ratios):.3f}, 95 % upper bound {bound:.3f}"
            print(row(f"CPU time, audited / alone, {name}", value, f"<= {BOUND}", bound <= BOUND), flush=True)
            print(row(f"losses apart, {name}", f"{apart:.1e}", "<= 1e-6", apart <= 1e-6), flush=True)
            print(row(f"peak memory, audited / alone, {name}", f"{peak:.3f}", "-", True), flush=True)


if __name__ == "__main__":
    main()
