"""`isostep simulate`: a pipeline schedule on paper, drawn and in numbers; or all named schedules compared."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from .. import cli
from ..errors import InputError
from ..schedule import csv_file, gantt_svg, gantt_text, search, trace
from ..schedule.costs import Costs
from ..schedule.generate import NAMES, SCHEDULES, generate
from ..schedule.ir import Schedule
from ..schedule.layers import run_layers
from ..schedule.layers_text import draw_layers
from ..schedule.simulate import Simulation, simulate
from ..units import count
from . import simulate_text

MAX_STAGES = 4096
OF_LAYERS = ("command", "default_of", "layers", "memory", "stages", "microbatches", "json", "width")
"""What may be given with --layers."""
PATIENCE = 2.0
"""Seconds of work before it is announced."""
MAX_LISTED = 1_000_000
"""Actions that a trace, or spans in JSON, may hold."""

EPILOG = f"""\
examples:
  isostep simulate --stages 4 --microbatches 8
  isostep simulate --schedule zb-v --stages 4 --microbatches 8 --svg zb-v.svg
  isostep simulate --schedule all --stages 4 --microbatches 16 --transfer 0.1 --memory-limit 4
  isostep simulate --schedule 1f1b --stages 3 --microbatches 6 --forward 1,2,1 --recompute
  isostep simulate --stages 4 --microbatches 8 --recompute 0.1,0.1,none,none --memory-limit 2.5
  isostep simulate --stages 8 --microbatches 256 --from 100 --to 160
  isostep simulate --schedule mine.csv
  isostep simulate --layers examples/layers.json --stages 4 --microbatches 16

Schedules: {", ".join(NAMES[:5])},
{", ".join(NAMES[5:])}; `all` compares them; `auto` searches for the best one
that fits; a file of torch.distributed.pipelining ends in .csv.
Costs are times in any unit, of one model chunk each: one number for all, or one per chunk in model order.
With `all`, `auto` and --whole-stages they are of whole stages: v chunks a rank cut each stage into v equal parts.
Exit code 0: fine. 1: the schedule holds more than --memory-limit (with `all`: every schedule does).
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = EPILOG
    parser.set_defaults(default_of=parser.get_default)
    parser.add_argument("--schedule", default="1f1b", metavar="S", help="a name, all, auto, or FILE.csv (default 1f1b)")
    parser.add_argument("--stages", type=cli.positive_int, metavar="P", help="ranks of the pipeline")
    parser.add_argument("--microbatches", type=cli.positive_int, metavar="M", help="microbatches of one update")
    parser.add_argument(
        "--chunks", type=cli.positive_int, metavar="V", help="model chunks a rank, where one can choose"
    )
    parser.add_argument("--forward-only", action="store_true", help="no backward: inference, or validation")
    parser.add_argument(
        "--objective", choices=("makespan", "own-span"), help="what auto makes least (default makespan)"
    )
    _configure_costs(parser.add_argument_group("costs"))
    _configure_output(parser.add_argument_group("output"))
    layers = parser.add_argument_group("layers, instead of a schedule: cut into stages by cost, for 1f1b")
    layers.add_argument("--layers", metavar="FILE", help="JSON of what each layer costs, such as examples/layers.json")
    layers.add_argument("--memory", type=cli.positive_float, metavar="BYTES", help="what a stage may hold")


def run(args: argparse.Namespace) -> int:
    """Simulate, draw, write. Returns 0, or 1 above the memory limit; raises InputError for what cannot be used."""
    if args.layers is not None:
        return _run_layers(args)
    _check(args)
    return _run_all(args) if args.schedule == "all" else _run_one(args)


def _configure_costs(group: Any) -> None:
    def add(flag: str, metavar: str, text: str) -> None:
        group.add_argument(flag, type=numbers, default=[0.0 if metavar == "C" else 1.0], metavar=metavar, help=text)

    add("--forward", "F", "time of a forward (default 1)")
    add("--input-grad", "B", "time of a backward for the inputs (default 1)")
    add("--weight-grad", "W", "time of a backward for the weights (default 1); a full backward takes B + W")
    add("--transfer", "C", "time from a chunk to the next on another rank (default 0); one, or one per link")
    group.add_argument(
        "--whole-stages", action="store_true",
        help="costs and --memory-limit are of whole stages, as with all and auto: 1 or P numbers, not 1 or P x V",
    )  # fmt: skip
    group.add_argument("--blocking", action="store_true", help="the sender is busy during its transfers too")
    group.add_argument(
        "--recompute", nargs="?", const=0.0, type=shares, metavar="KEPT",
        help="activations are computed again in the backward; KEPT of each, its input, is held (default 0); one for "
        "all or one per chunk, `none` for a chunk that keeps them",
    )  # fmt: skip
    group.add_argument(
        "--weight-share", type=share, default=1.0, metavar="S",
        help="of an activation, what a backward for the weights still needs after that for the inputs (default 1)",
    )  # fmt: skip
    group.add_argument(
        "--memory-limit", type=cli.positive_float, metavar="K",
        help="chunk activations that a rank may hold at once (with all and auto: of whole stages)",
    )  # fmt: skip


def _configure_output(group: Any) -> None:
    group.add_argument("--from", dest="start", type=time, default=0.0, metavar="T", help="draw from here")
    group.add_argument("--to", dest="end", type=time, metavar="T", help="draw to here")
    group.add_argument("--width", type=cli.positive_int, default=80, metavar="N", help="columns (default 80)")
    group.add_argument("--json", type=cli.json_path, metavar="FILE", help="the numbers; - for stdout, alone")
    group.add_argument("--spans", action="store_true", help="with --json: every action too, else its spans are []")
    group.add_argument("--svg", type=output_path, metavar="FILE", help="the Gantt chart")
    group.add_argument("--csv", type=output_path, metavar="FILE", help="the order, as torch's runtime reads it")
    group.add_argument("--trace", type=output_path, metavar="FILE", help="for chrome://tracing and ui.perfetto.dev")


def numbers(text: str) -> list[float]:
    """Argument type: one number, or several separated by commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        got = cli.shortened(text)
        raise argparse.ArgumentTypeError(f"got {got!r}, expected a number, or several separated by commas") from None


def share(text: str) -> float:
    """Argument type: a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"got {cli.shortened(text)!r}, expected a share from 0 to 1")
    return value


def shares(text: str) -> float | list[float | None] | None:
    """Argument type: one share, or several separated by commas, `none` or `-` for a chunk without."""
    values = [None if part in ("none", "-") else share(part) for part in text.split(",")]
    return values if len(values) > 1 else values[0]


def time(text: str) -> float:
    """Argument type: a number; its bounds are known when the makespan is."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {cli.shortened(text)!r}, expected a time, a number") from None


def output_path(text: str) -> str:
    """Argument type: a file that can be written; not - for stdout, which has the drawing."""
    path = cli.json_path(text)
    if text == "-" or (os.path.exists(text) and not os.access(text, os.W_OK)):
        raise argparse.ArgumentTypeError(f"got {cli.shortened(text)!r}, expected a file that can be written")
    return path


def _check(args: argparse.Namespace) -> None:
    """What can be refused before any work. Raises InputError."""
    from_file = args.schedule.endswith(".csv")
    if not from_file and args.schedule not in (*NAMES, "all", "auto"):
        expected = f"all, auto, a file that ends in .csv, or one of {', '.join(NAMES)}"
        raise InputError.of("--schedule", cli.shortened(args.schedule), expected, "choose one of these")
    if not from_file:
        _check_sizes_given(args)
    if args.memory is not None:
        raise InputError.of("--memory", args.memory, "--layers with it", "add --layers FILE, or leave out --memory")
    if args.objective is not None and args.schedule != "auto":
        raise InputError.of("--objective", args.objective, "--schedule auto with it", "leave it out, or take auto")
    if args.stages is not None and args.stages > MAX_STAGES:
        raise InputError.of("--stages", args.stages, f"at most {MAX_STAGES:,}", "choose fewer")
    if args.spans and args.json is None:
        raise InputError.of("--spans", "no --json", "a file to put the spans into", "add --json FILE")
    paths = [path for path in (args.json, args.svg, args.csv, args.trace) if path is not None]
    real = [os.path.realpath(path) for path in paths if path != "-"]
    if from_file:
        real.append(os.path.realpath(args.schedule))
    doubled = next((path for path in real if real.count(path) > 1 and not path.startswith("/dev/")), None)
    if doubled is not None:
        raise InputError.of("output", doubled, "one file for each output and input", "choose another name for one")


def _check_sizes_given(args: argparse.Namespace) -> None:
    for flag, value in (("--stages", args.stages), ("--microbatches", args.microbatches)):
        if value is None:
            raise InputError.of(flag, None, "a whole number of 1 or more", f"add {flag}")


def _run_layers(args: argparse.Namespace) -> int:
    """Layers cut into stages by cost, beside equal counts."""
    _check_sizes_given(args)
    for name, value in vars(args).items():
        if name not in OF_LAYERS and value != args.default_of(name):
            flag = {"start": "--from", "end": "--to"}.get(name, f"--{name.replace('_', '-')}")
            raise InputError.of(flag, value, "not to be given with --layers", f"leave out {flag}")
    cut = run_layers(args.layers, args.stages, args.microbatches, args.memory)
    cli.write_json(args.json, cut.document())
    if args.json != "-":
        _console(args).print(draw_layers(cut))
    return 0


def _run_one(args: argparse.Namespace) -> int:
    with _waiting(f"simulating {args.schedule}") as say:
        sim, note = _searched(args, say) if args.schedule == "auto" else (_simulated(args), "")
        drawing = gantt_text.draw(sim, args.start, args.end, args.width)
        svg = gantt_svg.draw(sim, args.start, args.end) if args.svg else ""
        table = simulate_text.numbers_table(sim)
        _write(args, sim, svg)
    over = simulate_text.over_limit(sim, args.memory_limit)
    if args.json != "-":
        parts = [simulate_text.heading_line(sim), *filter(None, [note]), "", drawing, "", table]
        _console(args).print(*parts, sep="\n")
    if over:
        print(over, file=sys.stderr if args.json == "-" else sys.stdout)
    return 1 if over else 0


def _simulated(args: argparse.Namespace) -> Simulation:
    """A named schedule or one from a file. Raises InputError where it cannot be built, read or run."""
    if args.schedule.endswith(".csv"):
        schedule = csv_file.read(args.schedule)
        _check_agrees(args, schedule)
    else:
        schedule = generate(args.schedule, args.stages, args.microbatches, args.chunks)
    schedule = schedule.forward_only() if args.forward_only else schedule
    _check_listed(args, schedule.size)
    costs = Costs.of_stages if args.whole_stages else Costs.of
    return simulate(schedule, costs(schedule, **_costs(args)))


def _searched(args: argparse.Namespace, say: Callable[[str], None]) -> tuple[Simulation, str]:
    """The best order that a search finds, and a line that says where it comes from. Raises InputError if none fits."""
    for flag, given in (("--chunks", args.chunks), ("--forward-only", args.forward_only)):
        if given:
            raise InputError.of(flag, given, "not to be given with --schedule auto", f"leave out {flag}")
    _check_listed(args, 6 * args.stages * args.microbatches)
    found = search.auto(
        args.stages,
        args.microbatches,
        memory_limit=args.memory_limit,
        objective=args.objective or "makespan",
        progress=lambda tried: say(f"searching: {count(tried, 'order')} tried"),
        **_costs(args),
    )
    return found.simulation, f"the best of {count(found.tried, 'order')}: {found.origin}"


def _check_agrees(args: argparse.Namespace, schedule: Schedule) -> None:
    """Raises InputError where an option contradicts the file."""
    for flag, given, read in (
        ("--stages", args.stages, schedule.stages),
        ("--microbatches", args.microbatches, schedule.num_microbatches),
        ("--chunks", args.chunks, schedule.chunks),
    ):
        if given not in (None, read):
            raise InputError.of(flag, given, f"{read}, as in the file", f"leave out {flag}")


def _check_listed(args: argparse.Namespace, size: int) -> None:
    flag = "--trace" if args.trace else "--spans"
    if (args.trace or args.spans) and size > MAX_LISTED:
        raise InputError.of(flag, f"{size:,} actions", f"at most {MAX_LISTED:,}", "choose fewer microbatches")


def _costs(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `Costs.of` and `Costs.of_stages`."""
    return {
        "forward": args.forward,
        "input_grad": args.input_grad,
        "weight_grad": args.weight_grad,
        "transfer": args.transfer,
        "weight_share": args.weight_share,
        "recompute": args.recompute,
        "blocking": args.blocking,
    }


def _write(args: argparse.Namespace, sim: Simulation, svg: str) -> None:
    """All files that are asked for."""
    cli.write_json(args.json, sim.document(args.spans) if args.json else {})
    if args.svg:
        cli.write_text("--svg", args.svg, svg)
    if args.csv:
        cli.write_text("--csv", args.csv, csv_file.text(sim.schedule))
    if args.trace:
        cli.write_text("--trace", args.trace, json.dumps(trace.document(sim)))


def _run_all(args: argparse.Namespace) -> int:
    """Every named schedule over the same work."""
    start = args.start or None
    alone = (("--svg", args.svg), ("--csv", args.csv), ("--trace", args.trace), ("--from", start), ("--to", args.end))
    for flag, value in alone:
        if value is not None:
            raise InputError.of(flag, value, "one schedule", "choose one with --schedule, or leave it out")
    sims: list[Simulation] = []
    left_out: list[tuple[str, str]] = []
    for name in NAMES:
        chunks = None if SCHEDULES[name].chunks_are_fixed else args.chunks
        try:
            schedule = generate(name, args.stages, args.microbatches, chunks)
        except InputError as error:
            left_out.append((name, str(error)))
            continue
        _check_listed(args, schedule.size)
        with _waiting(f"simulating {name}"):
            schedule = schedule.forward_only() if args.forward_only else schedule
            sims.append(simulate(schedule, Costs.of_stages(schedule, **_costs(args))))
    sims.sort(key=lambda sim: sim.makespan)
    if args.json:
        documents = [sim.document(args.spans) for sim in sims]
        reasons = [{"schedule": name, "reason": reason} for name, reason in left_out]
        cli.write_json(args.json, {"schema": 1, "schedules": documents, "left_out": reasons})
    if args.json != "-":
        _console(args).print(simulate_text.comparison(sims, left_out, args.memory_limit))
    return 0 if any(simulate_text.fits(sim, args.memory_limit) for sim in sims) else 1


def _console(args: argparse.Namespace) -> Console:
    return Console(width=max(args.width, 80), highlight=False, markup=False)


@contextmanager
def _waiting(words: str) -> Iterator[Callable[[str], None]]:
    """Says what is being done on stderr, if that is a terminal and it takes longer than 2 seconds.

    Gives a function that changes the words.
    """
    console = Console(stderr=True)
    status = console.status(words)
    if not console.is_terminal:
        yield status.update
        return
    timer = threading.Timer(PATIENCE, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield status.update
    finally:
        timer.cancel()
        timer.join()
        status.stop()
