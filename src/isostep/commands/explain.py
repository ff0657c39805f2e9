"""`isostep explain`: worked pictures of replicas, tokens, batches and pipelines."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from rich.console import Console, RenderableType

from .. import cli
from ..errors import InputError
from ..explain import batch, draw, draw_pipeline, pipeline, replicas, tokens

Value = TypeVar("Value", int, float)

GROUPS = "replicas are separated by spaces, what one replica has by commas"
NEGATIVE = 'A list with a negative number is written in quotes after an equals sign: --targets="-1,2 3"'

REPLICAS_EXAMPLES = f"""\
examples:
  isostep explain replicas                          targets 0, 2, 4 on three replicas
  isostep explain replicas --portions 1,1,4         the fault of averaging means
  isostep explain replicas --targets "0,1 2,4,6"    two replicas, of two and three examples
  isostep explain replicas --gradients "1,3 3,1" --weights 5,5

In --targets and --gradients, {GROUPS}.
{NEGATIVE}"""

TOKENS_EXAMPLES = f"""\
examples:
  isostep explain tokens                            512 tokens at loss 2, 1536 at loss 4
  isostep explain tokens --counts "1,7 3,5"         two replicas x two microbatches
  isostep explain tokens --counts "1 7" --losses "2 4"

In --counts and --losses, {GROUPS}."""

BATCH_EXAMPLES = """\
examples:
  isostep explain batch --context-length 2048 --examples 10000
  isostep explain batch --replicas 4 --stages 2 --slices 2
  isostep explain batch --examples 10000 --last-group drop"""

PIPELINE_EXAMPLES = """\
examples:
  isostep explain pipeline                          3 stages, 4 microbatches: 6 ticks, busy 2/3
  isostep explain pipeline --stages 4 --microbatches 16"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the topics and their options."""
    parser.epilog = "example:\n  isostep explain replicas --portions 1,1,4"
    topics = parser.add_subparsers(dest="topic", metavar="TOPIC", required=True, parser_class=cli.Parser)
    _configure_replicas(_topic(topics, "replicas", "one update over several replicas", REPLICAS_EXAMPLES))
    _configure_tokens(_topic(topics, "tokens", "the weight of a token in six common loops", TOKENS_EXAMPLES))
    _configure_batch(_topic(topics, "batch", "sizes of one update; which ranks are replicas", BATCH_EXAMPLES))
    _configure_pipeline(_topic(topics, "pipeline", "stages at work; what more microbatches buy", PIPELINE_EXAMPLES))


def run(args: argparse.Namespace) -> int:
    """Draw one topic, or write it as JSON. Returns 0; raises InputError for values that cannot be used."""
    model, drawing = TOPICS[args.topic](args)
    cli.write_json(args.json, {"schema": 1, "explain": args.topic, **_plain(model)})
    if args.json != "-":
        Console(highlight=False, markup=False).print(drawing)
    return 0


def _topic(topics: Any, name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
    parser = topics.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="write the numbers as JSON; - writes them alone to stdout")
    return parser


def _configure_replicas(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--targets", nargs="+", metavar="Y", help='targets of each replica (default "0 2 4")')
    parser.add_argument(
        "--portions",
        nargs="+",
        metavar="N",
        help="examples of each replica: its last target is repeated up to N; 0 for none",
    )
    parser.add_argument("--w", metavar="W", help="the parameter before the update (default 1)")
    parser.add_argument("--lr", default="0.1", metavar="LR", help="learning rate (default 0.1)")
    parser.add_argument("--gradients", nargs="+", metavar="G", help="instead: one gradient vector per replica")
    parser.add_argument("--weights", nargs="+", metavar="W", help="with --gradients: the parameters before")


def _configure_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--counts", nargs="+", metavar="N", help='tokens of each microbatch (default "512,1536": one replica)'
    )
    parser.add_argument(
        "--losses",
        nargs="+",
        metavar="L",
        help='mean loss of each microbatch (default "2,4" for those counts)',
    )


def _configure_batch(parser: argparse.ArgumentParser) -> None:
    def add_count(flag: str, text: str, default: int | None = None) -> None:
        shown = "" if default is None else f" (default {default})"
        parser.add_argument(flag, type=cli.positive_int, default=default, metavar="N", help=text + shown)

    add_count("--examples-per-microbatch", "m, examples of one forward and backward", 2)
    add_count("--accumulate", "A, microbatches per replica per update", 8)
    add_count("--replicas", "D, data-parallel copies of the model", 2)
    add_count("--stages", "P, consecutive parts of the layers", 2)
    add_count("--slices", "T, parts of each matrix", 1)
    add_count("--context-length", "tokens of one example, at most")
    add_count("--examples", "size of the data set, for the updates of one epoch")
    parser.add_argument(
        "--last-group",
        choices=("keep", "drop"),
        default="keep",
        help="a last group that is not full (default keep)",
    )


def _configure_pipeline(parser: argparse.ArgumentParser) -> None:
    for flag, default, text in (
        ("--stages", 3, "P, consecutive parts of the layers, each on its own device"),
        ("--microbatches", 4, "M, microbatches of one group"),
    ):
        shown = f"{text} (default {default})"
        parser.add_argument(flag, type=cli.positive_int, default=default, metavar="N", help=shown)


def _explain_replicas(args: argparse.Namespace) -> tuple[Any, RenderableType]:
    lr = _number("lr", args.lr, float)
    if args.gradients is not None or args.weights is not None:
        vectors = _vectors(args, lr)
        return vectors, draw.draw_vectors(vectors)
    update = replicas.replica_update(
        _groups("targets", args.targets or ["0 2 4"], float),
        None if args.portions is None else _numbers("portions", args.portions, int),
        1.0 if args.w is None else _number("w", args.w, float),
        lr,
    )
    return update, draw.draw_replicas(update)


def _vectors(args: argparse.Namespace, lr: float) -> replicas.VectorUpdate:
    if args.gradients is None or args.weights is None:
        missing = "--weights" if args.weights is None else "--gradients"
        raise InputError.of(missing, None, "--gradients and --weights together", f"add {missing}")
    for flag, value in (("--targets", args.targets), ("--portions", args.portions), ("--w", args.w)):
        if value is not None:
            raise InputError.of(flag, value, "not to be given with --gradients", f"leave out {flag}")
    gradients = _groups("gradients", args.gradients, float)
    return replicas.vector_update(_numbers("weights", args.weights, float), gradients, lr)


def _explain_tokens(args: argparse.Namespace) -> tuple[Any, RenderableType]:
    counts, losses = args.counts, args.losses
    if counts is None:
        counts, losses = ["512,1536"], losses or ["2,4"]
    weights = tokens.token_weights(
        _groups("counts", counts, int), None if losses is None else _groups("losses", losses, float)
    )
    return weights, draw.draw_tokens(weights)


def _explain_batch(args: argparse.Namespace) -> tuple[Any, RenderableType]:
    sizes = batch.batch_sizes(
        args.examples_per_microbatch,
        args.accumulate,
        args.replicas,
        args.stages,
        args.slices,
        args.context_length,
        args.examples,
        args.last_group,
    )
    return sizes, draw.draw_batch(sizes)


def _explain_pipeline(args: argparse.Namespace) -> tuple[Any, RenderableType]:
    model = pipeline.pipeline(args.stages, args.microbatches)
    return model, draw_pipeline.draw_pipeline(model)


TOPICS: dict[str, Callable[[argparse.Namespace], tuple[Any, RenderableType]]] = {
    "replicas": _explain_replicas,
    "tokens": _explain_tokens,
    "batch": _explain_batch,
    "pipeline": _explain_pipeline,
}


def _groups(name: str, words: Sequence[str], kind: type[Value]) -> list[list[Value]]:
    """The numbers of each replica: replicas separated by spaces, the numbers of one by commas."""
    replica_texts = " ".join(words).split()
    if not replica_texts:
        raise InputError.of(name, "", "one number or more", f"write for example --{name} 1,7")
    return [[_number(name, text, kind) for text in replica.split(",")] for replica in replica_texts]


def _numbers(name: str, words: Sequence[str], kind: type[Value]) -> list[Value]:
    """A plain list, separated by commas or spaces."""
    return [number for group in _groups(name, words, kind) for number in group]


def _number(name: str, text: str, kind: type[Value]) -> Value:
    try:
        return kind(text)
    except ValueError:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        expected = "a whole number" if kind is int else "a number"
        raise InputError.of(name, shown, expected, "write numbers separated by commas") from None


def _plain(value: Any) -> Any:
    """Dataclasses, tuples and fractions as what JSON can hold."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Fraction):
        return float(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
