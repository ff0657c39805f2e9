"""`isostep verify`: one update over a grid of layouts in real processes, against an independent reference."""

from __future__ import annotations

import argparse
from typing import Any

from ..cli import json_path, positive_float, positive_int, process_count, seed_number, write_json

EPILOG = """example:
  isostep verify --procs 4 --json verify.json

Runs one update on a small group that is hard on purpose (unequal lengths and counts, microbatches and replicas
without any target, a partial group, two terms with different denominators, clipping) in every layout of a grid,
in real worker processes, and compares the gradients that reach the optimizer with a reference that imports torch
only and runs all examples one at a time. A control, the mean of microbatch means, must miss the tolerance by far.
Exit code 0: every layout matches. 1: some layout does not.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("--procs", type=process_count, default=4, help="workers: replicas 1 to this (default 4)")
    parser.add_argument(
        "--examples-per-microbatch", type=positive_int, nargs="+", default=[1, 2, 3, 4, 13], metavar="M",
        help="microbatch sizes of the grid (default 1 2 3 4 13)",
    )  # fmt: skip
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


def run(args: argparse.Namespace, setup: Any = None) -> int:
    import torch

    from ..distributed.launch import run_workers
    from ..verification.grid import Options, verify_worker

    layouts = [(m, replicas) for replicas in range(1, args.procs + 1) for m in args.examples_per_microbatch]
    options = Options(
        layouts=tuple(layouts),
        num_examples=args.examples,
        examples_per_update=args.examples + 3,
        seed=args.seed,
        dtype=getattr(torch, args.dtype),
        overlap=args.overlap,
        ddp=args.ddp,
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
    table = Table("m", "A", "D", "gradient error", "loss", "tokens", "reduced", "applied", "", box=None, pad_edge=False)
    for report in document["layouts"]:
        layout = report["layout"]
        table.add_row(
            *(str(layout[key]) for key in ("examples_per_microbatch", "accumulate", "replicas")),
            f"{report['gradient_error']['max']:.1e}",
            "-" if report["loss"] is None else f"{report['loss']:.9f}",
            str(report["num_supervised_tokens"]),
            f"{report['reduced_bytes_ratio']:.2f}x",
            f"{report['applied']} of {report['attempted']}",
            "[green]ok[/]" if report["ok"] else "[red]NOT OK[/]",
        )
        for problem in report["problems"]:
            table.add_row("", "", "", f"[red]{problem}[/]")
    console.print(table)
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
