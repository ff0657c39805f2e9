"""Schedules: time and memory to build and simulate them, and how both grow with the number of actions.

Each row is a process of its own, so that its peak memory is its own. Run: python benchmarks/schedule.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

ROWS = [
    ("interleaved-1f1b", 16, 512, 4, 9),
    ("1f1b", 16, 512, 1, 9),
    ("zb-v", 16, 512, 2, 9),
    ("1f1b", 1024, 1024, 1, 3),
    ("1f1b", 1024, 2048, 1, 3),
    ("1f1b", 1024, 4096, 1, 3),
    ("1f1b", 1024, 8192, 1, 3),
]
"""Name, P, M, v, runs; the median is printed, after one run that does not count."""

ONE_ROW = """
import json, resource, sys, time
import numpy
from isostep.schedule.costs import Costs
from isostep.schedule.generate import generate
from isostep.schedule.simulate import simulate
name, p, m, v, runs = json.loads(sys.argv[1])
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seconds = []
for _ in range(runs + (runs > 3)):
    start = time.perf_counter()
    schedule = generate(name, p, m, v)
    built = time.perf_counter()
    makespan = simulate(schedule, Costs.of(schedule)).makespan
    seconds.append((built - start, time.perf_counter() - built))
    size = schedule.size
    del schedule
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([seconds[runs > 3:], size, makespan, base, peak]))
"""


def main() -> None:
    """Print the table."""
    print("| schedule | P | M | v | actions | build | simulate | both | per action | peak memory |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in ROWS:
        finished = subprocess.run(
            [sys.executable, "-c", ONE_ROW, json.dumps(row)], capture_output=True, text=True, check=True
        )
        seconds, size, _, base, peak = json.loads(finished.stdout)
        build, run = (statistics.median(column) for column in zip(*seconds, strict=True))
        both = statistics.median(map(sum, seconds))
        name, p, m, v, _ = row
        print(
            f"| {name} | {p:,} | {m:,} | {v} | {size:,} | {build:.3f} s | {run:.3f} s | {both:.3f} s "
            f"| {both / size * 1e9:.0f} ns | {peak / 1024:,.0f} MiB ({base / 1024:.0f} before) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
