"""`isostep train`: the built-in decoder on real text, with local workers or under a launcher."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..cli import json_path, positive_float, positive_int, process_count, seed_number, write_json

EPILOG = """example:
  isostep train --procs 2 --run-dir runs/first

Trains a small decoder on the functions of the standard library of this Python: given signature and docstring,
write the body. Needs no download. Ends with a ledger (ledger.jsonl) from which coverage is proved: every example
of an epoch exactly once. The microbatch size and the number of workers change the speed, not the update.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("--procs", type=process_count, default=1, help="local workers, one replica each (default 1)")
    parser.add_argument("--run-dir", default="runs/default", help="where the run is kept (default runs/default)")
    parser.add_argument("--epochs", type=positive_int, default=1)
    parser.add_argument("--examples-per-update", type=positive_int, default=32, help="default 32")
    parser.add_argument("--examples-per-microbatch", type=positive_int, default=8, help="default 8")
    parser.add_argument("--context-length", type=positive_int, default=384, help="bytes (default 384)")
    parser.add_argument("--learning-rate", type=positive_float, default=3e-3, help="default 0.003")
    parser.add_argument("--last-group", choices=["keep", "drop"], default="keep")
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of the order (default 0)")
    parser.add_argument("--evaluate-every", type=positive_int, default=25, metavar="UPDATES", help="default 25")
    parser.add_argument("--overlap", action="store_true", help="reduce during each replica's last backward")
    parser.add_argument("--timeout", type=positive_float, default=300.0, help="seconds that any collective may take")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write a summary here, - for standard output")


def run(args: argparse.Namespace) -> int:
    from ..distributed.launch import launched_rank, run_workers
    from ..train import Options, What, summary, summary_text, train_worker

    options = Options(
        what=What(
            examples_per_update=args.examples_per_update,
            order_seed=args.seed,
            last_group=args.last_group,
            context_length=args.context_length,
            learning_rate=args.learning_rate,
            epochs=args.epochs,
        ),
        examples_per_microbatch=args.examples_per_microbatch,
        overlap=args.overlap,
        evaluate_every=args.evaluate_every,
        run_dir=args.run_dir,
        quiet=args.json == "-",
    )
    run_workers(args.procs, train_worker, options, timeout=args.timeout)
    if launched_rank():
        return 0
    document = summary(Path(args.run_dir))
    write_json(args.json, document)
    if args.json != "-":
        print(summary_text(document))
    return 0 if document["coverage"]["proved"] else 1
