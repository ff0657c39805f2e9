"""Everything that wants a CUDA machine, in one command: `python benchmarks/gpu.py --json gpu.json`.

Parity on the devices, training in three precisions, a real out-of-memory fallback, the search for what fits, memory
peaks, and the overhead against a loop by hand. Uses all GPUs, one worker each. Exit code 1 if a check fails.
`--device cpu` is a dry run of the script itself, with two workers; it says what it leaves out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from run import TEN_MILLION, Batch, OneUpdate, Size, abba, batches, build, by_hand, upper_bound, with_isostep

from isostep import Updater, groups
from isostep.distributed.comm import first_ranks, gathered
from isostep.distributed.launch import run_workers
from isostep.ledger import Event, MemoryObserved, OutOfMemory, RunStarted, UpdateDone, read
from isostep.recipe.build import device_of_worker
from isostep.verification import problem
from isostep.verification.reference import dtype_tolerance, gradient_error, mean_of_means, reference_update

PRECISIONS = ("float32", "bfloat16", "float16")
LARGE = Size(width=1024, depth=12, length=512, examples_per_microbatch=8, accumulate=4)


@dataclass
class Report:
    """What was checked, measured and left out, by section; printed as it comes."""

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    def _add(self, name: str, what: str, value: Any, kind: str) -> None:
        self.sections.setdefault(name, {}).setdefault(kind, {})[what] = value

    def check(self, name: str, what: str, fine: bool) -> None:
        self._add(name, what, bool(fine), "checks")
        print(f"{'ok      ' if fine else 'FAILED  '}  {name}: {what}", flush=True)

    def number(self, name: str, what: str, value: Any) -> None:
        self._add(name, what, value, "numbers")
        print(f"          {name}: {what} = {value}", flush=True)

    def leave_out(self, name: str, what: str, why: str) -> None:
        self._add(name, what, why, "left_out")
        print(f"left out  {name}: {what}: {why}", flush=True)

    @property
    def passed(self) -> bool:
        return all(fine for section in self.sections.values() for fine in section.get("checks", {}).values())


@dataclass(frozen=True)
class Machine:
    """What there is. total: bytes of the smallest GPU; None on a CPU."""

    cuda: bool
    workers: int
    total: int | None
    quick: bool
    folder: Path

    def train(self, name: str, *flags: str, procs: int | None = None) -> list[Event]:
        """The ledger of a finished `isostep train`. Raises RuntimeError with what it said where it failed."""
        command = [sys.executable, "-m", "isostep", "train", "--run-dir", str(self.folder / name)]
        command += ["--procs", str(procs or self.workers), *flags]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=3600)
        if finished.returncode:
            raise RuntimeError(f"{name}: exit code {finished.returncode}: {finished.stderr.strip()}")
        return read(self.folder / name / "ledger.jsonl")


def updates_of(events: Sequence[Event]) -> list[UpdateDone]:
    return [event for event in events if isinstance(event, UpdateDone)]


def loss_gap(a: Sequence[UpdateDone], b: Sequence[UpdateDone]) -> float:
    """The largest relative difference of losses, update by update; infinite where one has none."""
    pairs = zip(a, b, strict=True)
    return max(abs(u.loss - v.loss) / abs(v.loss) if u.loss and v.loss else math.inf for u, v in pairs)


def compare(report: Report, section: str, name: str, a: list[UpdateDone], b: list[UpdateDone], most: float) -> None:
    """Check that two runs made the same updates: same examples, same denominators, nearly the same losses."""
    same = [(u.ids_hash, u.denominators) for u in a] == [(u.ids_hash, u.denominators) for u in b]
    report.check(section, f"{name}: the same examples and denominators", same)
    gap = loss_gap(a, b) if same else math.inf
    report.check(section, f"{name}: losses within {most:g} ({gap:.1e})", gap <= most)


def parity_worker(dtype: torch.dtype, overlap: bool) -> list[tuple[str, bool]]:
    """One update per layout on this worker's device, against the reference in float64 on the CPU.

    A mean of means must miss the tolerance by a factor of 1000.
    """
    device = device_of_worker()
    examples = problem.build_examples(13, 0)
    model = problem.build_model(dtype).double()
    reference = reference_update(model, examples, problem.COEFFICIENT, problem.CLIP_NORM)
    tolerance = dtype_tolerance(dtype, reference.num_tokens)
    wrong = mean_of_means(model, examples, problem.COEFFICIENT, problem.CLIP_NORM)
    control, _ = gradient_error(wrong, reference.gradients)
    rows = []
    for replicas in sorted({1, dist.get_world_size()}):
        group = first_ranks(replicas)
        if group is None:
            continue
        for size in (1, 3, 13):
            ours = problem.build_model(dtype).to(device)
            optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
            options: Any = {"clip_norm": problem.CLIP_NORM, "overlap": overlap, "process_group": group}
            updater = Updater(ours, optimizer, problem.objective(), **options)
            seen: dict[str, torch.Tensor] = {}

            def keep(*_: Any, seen: dict[str, torch.Tensor] = seen, model: Any = ours) -> None:
                seen.update({name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None})

            optimizer.register_step_pre_hook(keep)
            plan = groups(examples, examples_per_update=16, examples_per_microbatch=size)
            loss = updater.update(next(iter(plan))).loss
            errors = gathered(gradient_error(seen, reference.gradients)[0], group)
            off = math.inf if loss is None else abs(loss - reference.loss) / abs(reference.loss)
            what = f"D={replicas}, m={size} on {device}: {max(*errors, off):.1e} <= {tolerance:.1e}"
            rows.append((what, max(*errors, off) <= tolerance <= control / 1000))
    return rows


def parity(machine: Machine, report: Report) -> None:
    for dtype in (torch.float64, torch.float32):
        for overlap in (False, True) if machine.workers > 1 else (False,):
            for what, fine in run_workers(machine.workers, parity_worker, dtype, overlap, timeout=300):
                report.check("parity", f"{dtype}, overlap {overlap}, {what}", fine)
    if machine.cuda and machine.workers == 1:
        report.leave_out("parity", "NCCL", "it needs two GPUs, and there is one")
    if not machine.cuda:
        report.leave_out("parity", "NCCL and CUDA", "this is a CPU, with gloo")


def precision(machine: Machine, report: Report) -> None:
    """Some updates in each precision, with one worker and with all."""
    flags = ["--run.epochs=1", "--run.updates=8", "--validation.every=0", "--update.examples-per-update=16"]
    flags += ["--layout.examples-per-microbatch=4", "--model.context-length=256"]
    flags += ["--model.width=32", "--model.depth=2"] if machine.quick else []
    found = {}
    for name in PRECISIONS:
        events = machine.train(f"precision-{name}", *flags, f"--precision.dtype={name}")
        started = next(event for event in events if isinstance(event, RunStarted))
        found[name] = updates_of(events)
        applied = sum(update.status == "applied" for update in found[name])
        losses = [update.loss for update in found[name]]
        report.number("precision", f"{name}, losses", losses)
        fine = len(losses) == 8 and applied >= 4 and all(loss is not None and math.isfinite(loss) for loss in losses)
        report.check("precision", f"{name}: {applied} of 8 updates applied, all losses finite", fine)
        devices = str(started.run["facts"]["devices"])
        report.check("precision", f"{name}: trained on {devices}", machine.cuda == ("cuda" in devices))
        gap = loss_gap(found[name][:1], found["float32"][:1])
        report.check("precision", f"{name}: first loss within 2 % of float32's ({gap:.1e})", gap <= 0.02)
    alone = updates_of(machine.train("precision-alone", *flags, procs=1))
    compare(report, "precision", "one worker and all", alone, found["float32"], 1e-3)


def memory(machine: Machine, report: Report) -> None:
    """A microbatch that surely does not fit, one that does, and what the search finds; and the peaks of each.

    A block keeps for its backward, per token, more than 15 tensors of its width in float32 (among them what enters two
    norms, queries, keys, values, and four in the feed-forward part of 8/3 the width): over 40 bytes x width. Of
    examples that take 1.5 times the whole memory by that, so large a microbatch cannot run.
    """
    width, depth, length = (1024, 16, 1024) if machine.cuda else (32, 2, 64)
    per_example = 40 * width * depth * length
    size = 8 if machine.total is None else math.ceil(1.5 * machine.total / per_example)
    data = machine.folder / "data.jsonl"
    write_examples(data, 3 * size * machine.workers, length - 2)
    flags = [f"--model.context-length={length}", f"--model.width={width}", f"--model.depth={depth}"]
    flags += [f"--model.heads={max(1, width // 64)}", f"--update.examples-per-update={size * machine.workers}"]
    flags += ["--run.updates=2", "--run.epochs=1", "--validation.every=0", "--schedule.warmup=1"]
    flags += ["--optimizer.learning-rate=1e-4", "--run.timeout=1800", f"--data.source={data}"]
    small = machine.train("memory-small", *flags, "--layout.examples-per-microbatch=2")
    tell_peaks(report, "microbatches of 2", small)
    found = machine.train("memory-auto", *flags, "--layout.examples-per-microbatch=auto")
    tell_peaks(report, "microbatches of auto", found)
    manifest = sorted((machine.folder / "memory-auto").glob("checkpoints/*/manifest.json"))[-1]
    fits = json.loads(manifest.read_text())["examples_per_microbatch"]
    report.number("memory", "examples per microbatch that auto found", f"{fits} of at most {size}")
    report.check("memory", "auto: some size was found, and on a GPU less than all", fits < size or not machine.cuda)
    report.check("memory", "auto: no update ran out of memory", not ran_out(found))
    compare(report, "memory", "auto and m=2", updates_of(found), updates_of(small), 1e-4)
    if not machine.cuda:
        report.leave_out("memory", "a real out-of-memory error", "a CPU has none before the kernel kills")
        return
    large = machine.train("memory-large", *flags, f"--layout.examples-per-microbatch={size}")
    tell_peaks(report, f"microbatches of {size}, halved until they fit", large)
    fallbacks = ran_out(large)
    sizes = [(e.attempted, e.examples_per_microbatch_before, e.examples_per_microbatch_after) for e in fallbacks]
    report.number("memory", "out_of_memory events (update, from, to)", sizes)
    report.check("memory", f"m={size} ran out of memory in update 1", bool(sizes) and sizes[0][:2] == (1, size))
    counts = [update.counters.microbatches for update in updates_of(large)]
    report.check("memory", f"later groups kept the smaller size: {counts} microbatches", counts == sorted(counts))
    compare(report, "memory", f"m={size} after the fallback and m=2", updates_of(large), updates_of(small), 1e-4)


def ran_out(events: Sequence[Event]) -> list[OutOfMemory]:
    return [event for event in events if isinstance(event, OutOfMemory) and event.during == "update"]


def tell_peaks(report: Report, name: str, events: Sequence[Event]) -> None:
    last = [event for event in events if isinstance(event, MemoryObserved)][-1]
    parts = {"baseline": last.baseline, "first group": last.first_group, "later groups": last.later_groups}
    report.number("memory", f"{name}, MB", {k: [round((n or 0) / 1e6) for n in v] for k, v in parts.items()})
    fine = all(0 < b < f for b, f in zip(last.baseline, last.first_group, strict=True)) and all(last.later_groups)
    report.check("memory", f"{name}: peaks of every replica are there, above its baseline", fine)


def write_examples(path: Path, count: int, length: int) -> None:
    """Texts of one length, all different."""
    draw = random.Random(0)
    lines = ("".join(draw.choices(string.ascii_letters, k=length)) for _ in range(count + count // 10 + 20))
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def overhead_worker(blocks: int, size: Size, overlap: bool) -> list[float]:
    """Wall time of `Updater` over the loop by hand, each update waited for on the device."""
    device = device_of_worker()
    data = [{k: v.to(device) for k, v in batch.items()} for batch in batches(size, dist.get_rank())]
    ours, theirs = build(size).to(device), build(size).to(device)
    first = with_isostep(ours, torch.optim.AdamW(ours.parameters(), lr=1e-4), 1.0, overlap)
    second = by_hand(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-4), 1.0)

    def finished(update: OneUpdate, microbatches: Sequence[Batch]) -> None:
        update(microbatches)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return abba(partial(finished, first), partial(finished, second), data, blocks, time.perf_counter)


def overhead(machine: Machine, report: Report) -> None:
    size, blocks = (TEN_MILLION if machine.quick or not machine.cuda else LARGE), (6 if machine.quick else 20)
    for procs in sorted({1, machine.workers}):
        for overlap in (False, True) if procs > 1 else (False,):
            ratios = run_workers(procs, overhead_worker, blocks, size, overlap, timeout=600)
            what = f"wall time, Updater / by hand, D={procs}, overlap {overlap}"
            report.number("overhead", what, round(statistics.mean(ratios), 4))
            bound = upper_bound(ratios)
            limit = 1.05 if machine.cuda and not machine.quick else 1.5
            report.check("overhead", f"{what}: 95 % upper bound {bound:.3f} <= {limit}", bound <= limit)


SECTIONS = {"parity": parity, "precision": precision, "memory": memory, "overhead": overhead}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", choices=list(SECTIONS), nargs="+", default=list(SECTIONS), help="sections to run")
    parser.add_argument("--quick", action="store_true", help="smaller models and fewer repetitions")
    parser.add_argument("--json", metavar="FILE", help="write the report here")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    if not cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        parser.error("no CUDA device is visible; --device cpu is a dry run")
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
    report = Report()
    with tempfile.TemporaryDirectory(prefix="isostep-gpu-") as folder:
        total = min((d.total_memory for d in devices), default=None)
        machine = Machine(cuda, len(devices) or 2, total, args.quick, Path(folder))
        for name in args.only:
            try:
                SECTIONS[name](machine, report)
            except Exception as error:
                report.check(name, f"ends without {type(error).__name__}: {error}", False)
    facts = {"schema": 1, "torch": torch.__version__, "devices": [d.name for d in devices] or ["cpu"]}
    document = {**facts, "passed": report.passed, "sections": report.sections}
    if args.json:
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n")
    print("passed" if report.passed else "FAILED")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
