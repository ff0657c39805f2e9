"""`isostep verify`: one update over a grid of layouts in real processes, against an independent reference."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ..cli import json_path, positive_float, positive_int, process_count, seed_number, write_json
from ..errors import InputError
from ..schedule.generate import NAMES, SCHEDULES

ALL = "all"
MAX_CHUNKS = 48
"""A model of more layers has so many parameters that a vote is as large as the gradient of its embedding."""
EPILOG = """examples:
  isostep verify --procs 4 --json verify.json
  isostep verify --procs 4 --stages 1 2 4 --schedule 1f1b zb-v --tied

Runs one update on a small group that is hard on purpose (unequal lengths and counts, microbatches and replicas
without any target, a partial group, two terms with different denominators, clipping) in every layout of a grid,
in real worker processes, and compares the gradients that reach the optimizer with a reference that imports torch
only and runs all examples one at a time. A control, the mean of microbatch means, must miss the tolerance by far.
A layout has D replicas of P stages, in D x P of the workers; the model has a layer for each chunk of a schedule.
Exit code 0: every layout matches. 1: some layout does not.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("--procs", type=process_count, default=4, help="workers: D x P is 1 to this (default 4)")
    parser.add_argument(
        "--examples-per-microbatch", type=positive_int, nargs="+", default=[1, 2, 3, 4, 13], metavar="M",
        help="microbatch sizes of the grid (default 1 2 3 4 13)",
    )  # fmt: skip
    parser.add_argument(
        "--stages", type=positive_int, nargs="+", default=[1], metavar="P",
        help="pipeline stages of the grid (default 1: the model in one piece)",
    )  # fmt: skip
    parser.add_argument(
        "--schedule", choices=[*NAMES, ALL], nargs="+", metavar="S",
        help="of two and more stages: names of `isostep simulate`, or all (default 1f1b)",
    )  # fmt: skip
    parser.add_argument("--tied", action="store_true", help="the head is the matrix of the embedding")
    parser.add_argument("--examples", type=group_size, default=13, help="examples in the group, 2 to 1000 (default 13)")
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of data and order (default 0)")
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--overlap", action="store_true", help="reduce during each replica's last backward")
    parser.add_argument("--ddp", action="store_true", help="wrap the model in DistributedDataParallel first")
    parser.add_argument(
        "--timeout", type=positive_float, default=60.0, help="seconds that any collective may take (default 60)"
    )
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the document here, - for standard output")


def group_size(text: str) -> int:
    """Argument type: examples of the group. One has no control: any mean over it is exact."""
    value = positive_int(text)
    if not 2 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected 2 to 1000 examples")
    return value


def arrangements(args: argparse.Namespace) -> list[tuple[int, str | None]]:
    """Pairs of P and schedule, those in one piece first. Raises InputError for what does not go together."""
    stages = sorted(set(args.stages))
    if stages[-1] > args.procs:
        raise InputError.of("--stages", stages[-1], f"at most --procs, {args.procs}", "start more workers")
    if stages[-1] == 1 and args.schedule:
        raise InputError.of("--schedule", args.schedule[0], "none for a model in one piece", "give --stages 2 or more")
    if stages[-1] > 1 and args.ddp:
        raise InputError.of("--ddp", f"--stages {stages[-1]}", "a model in one piece", "leave out one of the two")
    given = args.schedule or ["1f1b"]
    schedules = NAMES if ALL in given else tuple(dict.fromkeys(given))
    for schedule in schedules:
        if (chunks := SCHEDULES[schedule].chunks * stages[-1]) > MAX_CHUNKS:
            raise InputError.of(
                "--stages", stages[-1], f"at most {MAX_CHUNKS} chunks where {schedule} makes {chunks}", "take fewer"
            )
    return [(p, schedule) for p in stages for schedule in ([None] if p == 1 else schedules)]


def run(args: argparse.Namespace, setup: Any = None) -> int:
    arranged = arrangements(args)

    import torch

    from ..distributed.launch import launched_rank, run_workers
    from ..verification.grid import verify_worker
    from ..verification.observe import Options, Row

    if launched_rank() is not None and args.procs > (world := int(os.environ["WORLD_SIZE"])):
        raise InputError.of("--procs", args.procs, f"at most {world}, which the launcher has started", "start more")
    layouts = [
        Row(m, replicas, stages, schedule)
        for stages, schedule in arranged
        for replicas in range(1, args.procs // stages + 1)
        for m in args.examples_per_microbatch
    ]
    options = Options(
        layouts=layouts,
        num_examples=args.examples,
        examples_per_update=args.examples + 3,
        seed=args.seed,
        dtype=getattr(torch, args.dtype),
        overlap=args.overlap,
        ddp=args.ddp,
        tied=args.tied,
        setup=setup,
    )
    document = run_workers(args.procs, verify_worker, options, timeout=args.timeout)
    write_json(args.json, document)
    if args.json != "-":
        show(document)
    return 0 if document["passed"] else 1


def show(document: dict[str, Any]) -> None:
    """Draw the document as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(
        "m", "A", "D", "P", "schedule", "gradient\nerror", "loss", "tokens", "reduced", "applied", "",
        box=None, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    problems = []
    for report in document["layouts"]:
        layout = report["layout"]
        m, accumulate, replicas, stages, schedule = layout.values()
        table.add_row(
            *map(str, (m, accumulate, replicas, stages)),
            schedule or "-",
            f"{report['gradient_error']['max']:.1e}",
            "-" if report["loss"] is None else f"{report['loss']:.9f}",
            str(report["num_supervised_tokens"]),
            f"{report['reduced_bytes_ratio']:.2f}x",
            f"{report['applied']} of {report['attempted']}",
            "[green]ok[/]" if report["ok"] else "[red]NOT OK[/]",
        )
        place = f"m {m}, D {replicas}" + (f", P {stages}, {schedule}" if schedule else "")
        problems += [f"{place}: {problem}" for problem in report["problems"]]
    console.print(table)
    for problem in problems:
        console.print(problem, style="red", markup=False)
    reference, control = document["reference"], document["control"]
    console.print(
        f"reference: loss {reference['loss']:.9f} over {reference['num_supervised_tokens']} supervised tokens; "
        f"tolerance {document['tolerance']:.1e}\n"
        f"control: mean of microbatch means is off by {control['gradient_error']['max']:.1e}, "
        f"{control['factor']:.1e} times the tolerance"
    )
    good = sum(report["ok"] for report in document["layouts"])
    verdict = "[green]passed[/]" if document["passed"] else "[red]FAILED[/]"
    console.print(f"{verdict}: {good} of {len(document['layouts'])} layouts give the same update")
