"""The recipe: the built-in decoder on the embedded functions, through `Updater`, into a run directory."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from .data.groups import DataGroup, groups
from .data.stdlib_functions import VOCAB_SIZE, StdlibFunctions
from .distributed.comm import on_first_rank
from .errors import InputError, IsostepError
from .grouping import GroupPlan
from .layout import Layout, ladder
from .ledger import (
    Dropped,
    EndReason,
    Evaluated,
    Ledger,
    OutOfMemory,
    RunEnded,
    RunStarted,
    UpdateDone,
    fold,
    format_hash,
    prove_coverage,
    read,
    standing_events,
)
from .models.decoder import Decoder, DecoderConfig
from .objective import causal_lm
from .updater import Updater


@dataclass(frozen=True, kw_only=True)
class What:
    """What one update is. Its hash names the run: a run with another one is another experiment."""

    objective: str = "causal-lm"
    examples_per_update: int = 32
    order_seed: int = 0
    last_group: str = "keep"
    content_hash: str = ""
    context_length: int = 384
    width: int = 128
    depth: int = 4
    heads: int = 4
    initial_seed: int = 0
    optimizer: str = "AdamW, betas 0.9 0.95, weight decay 0.1"
    learning_rate: float = 3e-3
    schedule: str = "linear warm-up over 10 updates, then cosine to 0"
    clip_norm: float = 1.0
    epochs: int = 1
    precision: str = "float32"

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of the fields as JSON."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run. `evaluate_every` counts applied updates; `quiet` reports on stderr, for a document on stdout."""

    what: What
    examples_per_microbatch: int
    overlap: bool
    evaluate_every: int
    run_dir: str
    quiet: bool = False


LEDGER = "ledger.jsonl"
WEIGHTS = "weights.pt"
WARM_UP_UPDATES = 10


def check_run_dir(run_dir: Path, what_hash: str) -> bool:
    """Whether this run is already complete. Raises InputError for a directory that holds an unfinished run, or
    another one.
    """
    path = run_dir / LEDGER
    if not path.exists():
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError.of("run directory", str(run_dir), "one that can be made", f"{error.strerror}") from None
        return False
    events = read(path)
    if events and isinstance(events[-1], RunEnded) and events[-1].reason == "complete":
        held = next((event.what_hash for event in events if isinstance(event, RunStarted)), "none")
        if held != what_hash:
            raise InputError.of(
                "run directory", f"{str(run_dir)!r} with a complete run of what {held[:12]}", f"what {what_hash[:12]}",
                "that run had other settings or data: choose another --run-dir",
            )  # fmt: skip
        print(f"{run_dir} is complete; nothing to do", file=sys.stderr)
        return True
    raise InputError.of(
        "run directory", str(run_dir), "an empty or a complete one",
        "it holds an unfinished run, which is neither resumed nor overwritten: choose another --run-dir "
        "(make train RUN_DIR=...) or remove it",
    )  # fmt: skip


def train_worker(options: Options) -> None:
    """In every worker: the whole run, unless it is complete already. Replica 0 writes the ledger and reports.

    Raises KeyboardInterrupt after a signal, when the update under way is done and recorded.
    """
    train = StdlibFunctions(options.what.context_length, split="train")
    what = replace(options.what, content_hash=train.content_hash())
    options = replace(options, what=what)
    if on_first_rank(partial(check_run_dir, Path(options.run_dir), what.hash)):
        return
    validation = StdlibFunctions(what.context_length, split="validation")
    model = Decoder(
        DecoderConfig(VOCAB_SIZE, what.context_length, width=what.width, depth=what.depth, heads=what.heads),
        seed=what.initial_seed,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=what.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    plan = groups(
        train,
        examples_per_update=what.examples_per_update,
        examples_per_microbatch=options.examples_per_microbatch,
        seed=what.order_seed,
        epochs=what.epochs,
        last_group="keep" if what.last_group == "keep" else "drop",
    )
    updater = Updater(
        model,
        optimizer,
        causal_lm,
        clip_norm=what.clip_norm,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, _schedule(len(plan))),
        overlap=options.overlap,
        seed=what.order_seed,
    )
    run = _Run(options, updater, plan.plan, validation, len(plan), model.num_parameters())
    with stop_on_signal(updater), run:
        for group in plan:
            if run.update(group):
                break
        else:
            run.complete(plan.dropped)
        if updater.replica == 0:
            save(model, Path(options.run_dir, WEIGHTS))
        run.finished = True
    if run.reason == "stopped":
        raise KeyboardInterrupt


def save(model: Decoder, path: Path) -> None:
    """Write the weights so that the file is either the whole new one or not there."""
    partial_path = path.with_suffix(".partial")
    torch.save(model.state_dict(), partial_path)
    partial_path.replace(path)


def _schedule(num_updates: int) -> Any:
    """Learning rate factor by applied updates: linear warm-up, then cosine to 0."""

    def factor(update: int) -> float:
        warm = min(1.0, (update + 1) / WARM_UP_UPDATES)
        return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, update / num_updates)))

    return factor


class _Run:
    """Reports and records one run. Everything is recorded by replica 0 and evaluated by all."""

    def __init__(
        self, options: Options, updater: Updater, plan: GroupPlan, validation: StdlibFunctions, num_updates: int,
        num_parameters: int,
    ) -> None:  # fmt: skip
        self.options, self.updater, self.plan, self.validation = options, updater, plan, validation
        self.num_updates, self.num_parameters = num_updates, num_parameters
        self.lead = updater.replica == 0
        self.ledger = Ledger(Path(options.run_dir, LEDGER)) if self.lead else None
        self.reason: EndReason = "failed"
        self.finished = False
        self.started = time.perf_counter()

    def __enter__(self) -> None:
        what, options = self.options.what, self.options
        layout = Layout(options.examples_per_microbatch, self.updater.replicas)
        self.record(
            RunStarted(
                what_hash=what.hash,
                what=asdict(what),
                how={**asdict(layout), "overlap": options.overlap},
                run={"evaluate_every": options.evaluate_every, "run_dir": options.run_dir},
                versions={"python": platform.python_version(), "torch": torch.__version__},
                num_examples=self.plan.num_examples,
                seed=what.order_seed,
                last_group=what.last_group,
                examples_per_update=what.examples_per_update,
            )
        )
        self.say(f"decoder of {self.num_parameters:,} parameters; what {what.hash[:12]}")
        self.say(ladder(layout, self.plan, what.context_length))
        self.evaluate()
        self.started = time.perf_counter()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not self.finished:
            self.reason = "failed"
        self.record(RunEnded(reason=self.reason, message="" if error is None else str(error)))
        if self.ledger is not None:
            self.ledger.close()

    def update(self, group: DataGroup) -> bool:
        """One update, recorded. Returns whether the run is to stop after it."""
        begin = time.perf_counter()
        result = self.updater.update(group)
        totals = self.updater.totals
        if result.halvings:
            self.record(
                OutOfMemory(
                    attempted=totals.attempted,
                    examples_per_microbatch_before=group.largest_microbatch,
                    examples_per_microbatch_after=result.examples_per_microbatch,
                )
            )
        self.record(result.event(totals.attempted, time.perf_counter() - begin))
        if result.stop_requested:
            self.reason = "stopped"
            return True
        if totals.attempted % 5 == 0 or totals.attempted == self.num_updates:
            rate = totals.counts.total_tokens / (elapsed := time.perf_counter() - self.started)
            seconds_left = elapsed / totals.attempted * (self.num_updates - totals.attempted)
            self.say(
                f"update {totals.attempted:>4}/{self.num_updates}  loss {_number(result.loss)}  "
                f"norm {_number(result.grad_norm)}  {totals.counts.supervised_tokens:>9,} supervised tokens  "
                f"{rate:,.0f} tokens/s  {seconds_left:.0f} s left"
            )
        left = self.num_updates - totals.attempted
        if totals.applied % self.options.evaluate_every == 0 and left > self.options.evaluate_every // 2:
            self.evaluate()
        return False

    def complete(self, dropped: list[Any]) -> None:
        for group in dropped:
            self.record(
                Dropped(
                    epoch=group.epoch,
                    start=group.start,
                    stop=group.stop,
                    ids=group.ids,
                    ids_hash=format_hash(group.coverage),
                )
            )
        self.evaluate()
        self.reason = "complete"

    def evaluate(self) -> None:
        result = self.updater.evaluate(self.validation, examples_per_microbatch=self.options.examples_per_microbatch)
        self.record(
            Evaluated(
                after_applied=self.updater.totals.applied,
                loss=result.loss,
                terms=result.terms,
                counters=result.counts,
            )
        )
        self.say(
            f"validation loss {_number(result.loss)} nats per byte, over all {result.counts.supervised_tokens:,} "
            f"supervised tokens of {result.counts.examples} examples"
        )

    def record(self, event: Any) -> None:
        if self.ledger is not None:
            self.ledger.append(event)

    def say(self, text: str) -> None:
        if self.lead:
            print(text, file=sys.stderr if self.options.quiet else sys.stdout, flush=True)


@contextmanager
def stop_on_signal(updater: Updater) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after the update that is under way."""
    previous = {
        number: signal.signal(number, lambda *_: updater.request_stop()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def summary(run_dir: Path) -> dict[str, Any]:
    """What the ledger of a run says, as a document; `coverage` is proved anew. Reads the ledger and nothing else."""
    events = read(run_dir / LEDGER)
    start = next((event for event in events if isinstance(event, RunStarted)), None)
    if start is None:
        raise IsostepError(f"ledger of {run_dir}: got no start of a run, expected one; the run died before it began")
    plan = GroupPlan(
        num_examples=start.num_examples,
        examples_per_update=start.examples_per_update,
        examples_per_microbatch=1,
        seed=start.seed,
    )
    proof = prove_coverage(events, plan.ids_of)
    totals = fold(events)
    return {
        "schema": 1,
        "run_dir": str(run_dir),
        "what_hash": start.what_hash,
        "updates": {name: getattr(totals, name) for name in ("attempted", "applied", "skipped", "empty")},
        "counters": asdict(totals.counters),
        "loss": [e.loss for e in standing_events(events) if isinstance(e, UpdateDone) and e.loss is not None],
        "validation": [{"after_applied": e.after_applied, "loss": e.loss} for e in totals.evaluations],
        "coverage": {"proved": proof.ok, "text": proof.text().splitlines(), "faults": list(proof.faults)},
    }


def summary_text(document: dict[str, Any]) -> str:
    """A summary for people."""
    updates, counts = document["updates"], document["counters"]
    losses = [_number(evaluation["loss"]) for evaluation in document["validation"]]
    lines = [
        f"updates: {', '.join(f'{number} {name}' for name, number in updates.items())}",
        f"examples: {counts['examples']:,} in {counts['microbatches']:,} microbatches",
        f"tokens: {counts['supervised_tokens']:,} supervised, {counts['total_tokens']:,} in all, "
        f"of which {counts['padding_tokens']:,} padding",
        f"loss of each update: {sparkline(document['loss'])}",
        f"validation loss: {' -> '.join(losses)}",
        "coverage, proved from the ledger's seed and positions:",
        *document["coverage"]["text"],
    ]
    return "\n".join(lines)


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A curve in one line of text: means of consecutive values, the lowest bar for the lowest mean."""
    if not values:
        return "-"
    width = min(width, len(values))
    cuts = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    bars = "▁▂▃▄▅▆▇█"
    return "".join(bars[round((m - low) / (high - low or 1.0) * (len(bars) - 1))] for m in means)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
