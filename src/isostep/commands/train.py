"""`isostep train`: the built-in decoder on real text, with local workers or under a launcher."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..cli import positive_int

EPILOG = """example:
  isostep train --procs 2 --run-dir runs/first

Trains a small decoder on the functions of the standard library of this Python: given signature and docstring,
write the body. Needs no download. Ends with a ledger (ledger.jsonl) from which coverage is proved: every example
of an epoch exactly once. The microbatch size and the number of workers change the speed, not the update.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("--procs", type=positive_int, default=1, help="local workers, one replica each (default 1)")
    parser.add_argument("--run-dir", default="runs/default", help="where the run is kept (default runs/default)")
    parser.add_argument("--epochs", type=positive_int, default=1)
    parser.add_argument("--examples-per-update", type=positive_int, default=32, help="default 32")
    parser.add_argument("--examples-per-microbatch", type=positive_int, default=8, help="default 8")
    parser.add_argument("--context-length", type=positive_int, default=384, help="bytes (default 384)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="default 0.003")
    parser.add_argument("--last-group", choices=["keep", "drop"], default="keep")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order (default 0)")
    parser.add_argument("--evaluate-every", type=positive_int, default=25, metavar="UPDATES", help="default 25")
    parser.add_argument("--overlap", action="store_true", help="reduce during each replica's last backward")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that any collective may take")
    parser.add_argument("--json", metavar="FILE", help="write a summary here, - for standard output")


def run(args: argparse.Namespace) -> int:
    from ..distributed.launch import launched, run_workers
    from ..train import Options, What, check_run_dir, content_hash, summary, train_worker

    run_dir = Path(args.run_dir)
    if not launched() and check_run_dir(run_dir):
        print(f"{run_dir} is complete; nothing to do")
    else:
        options = Options(
            what=What(
                examples_per_update=args.examples_per_update,
                order_seed=args.seed,
                last_group=args.last_group,
                content_hash=content_hash(args.context_length),
                context_length=args.context_length,
                learning_rate=args.learning_rate,
                epochs=args.epochs,
            ),
            examples_per_microbatch=args.examples_per_microbatch,
            overlap=args.overlap,
            evaluate_every=args.evaluate_every,
            run_dir=str(run_dir),
        )
        run_workers(args.procs, train_worker, options, timeout=args.timeout)
    text, proved = summary(run_dir)
    print(text)
    return 0 if proved else 1
