"""The recipe: from a configuration to a trained model in a run directory, through `Updater`."""

from __future__ import annotations

import platform
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from . import __version__
from .config import Config
from .data.groups import DataGroup
from .data.text import load_split
from .distributed.checkpoint import CheckpointWriter, folder_of, load_tensors, manifest_of, reason_of
from .distributed.comm import everyone, first_ranks, on_first_rank, to_first_rank
from .errors import AbandonedError, CoverageError, InputError, IsostepError, NonFiniteError, OutOfMemoryError
from .ledger import (
    CheckpointAnnounced,
    Counts,
    Dropped,
    EndReason,
    Evaluated,
    MemoryObserved,
    OutOfMemory,
    Resumed,
    RunEnded,
    RunStarted,
    format_hash,
)
from .recipe.build import Training, build, grouped
from .recipe.reporter import Reporter
from .recipe.run_dir import AVERAGE, WEIGHTS, Documents, Opening, RunDirectory
from .recipe.state import capture, restore
from .recipe.timeline import TimelineWriter
from .recipe.watch import MemoryWatch
from .result import UpdateResult

SAME_SIGNAL = 2.0
SHARED = (CoverageError, NonFiniteError)
"""Errors that are raised on every rank, none of which is lost."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def train_worker(config: Config, allow_changed_what: bool = False, quiet: bool = False) -> None:
    """In every worker: a run to its end, from wherever its directory says that it is. Rank 0 records and reports.

    quiet: report on stderr, for a document on stdout. Raises KeyboardInterrupt after a signal, when what was done is
    saved; InputError, and whatever an update raises.
    """
    train, validation = load_split(config.data, config.model.context_length)
    contents = everyone((train.content_hash(), validation.content_hash()))
    if len(set(contents)) > 1:
        raise InputError.of("data", contents, "the same on every worker", "give every machine the same files")
    content, validation_content = contents[0]
    replicas = len(contents) // config.layout.stages
    now = Documents(config.what(content), config.how(replicas), config.about_run(validation_content), versions())
    with RunDirectory(config.run.dir) as directory:
        opening = on_first_rank(partial(directory.open, now, allow_changed_what=allow_changed_what))
        if opening.state == "complete":
            if directory.held:
                print(*opening.text(directory.path), sep="\n", file=sys.stderr)
            return
        manifest = read_manifest(opening, directory)
        training = build(config, train, validation)
        watch = MemoryWatch(training.device)
        fit_microbatches(training, manifest, now.how)
        place(training, opening, manifest, directory, now.how)
        run = Run(training, directory, opening, now, watch, quiet=quiet)
        with stop_on_signal(training):
            run.to_the_end()
    if run.reason == "stopped":
        raise KeyboardInterrupt


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {
        "isostep": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def read_manifest(opening: Opening, directory: RunDirectory) -> dict[str, Any] | None:
    """The manifest of the checkpoint to begin from; every replica reads it all, and none waits for another's reading.

    Raises InputError on every replica where a file is not as it was written on one.
    """
    manifest, error = None, None
    try:
        if opening.path is not None:
            manifest = manifest_of(directory.path / opening.path, opening.digest)
    except InputError as found:
        error = str(found)
    if errors := [text for text in everyone(error) if text is not None]:
        raise InputError(errors[0])
    return manifest


def fit_microbatches(training: Training, manifest: dict[str, Any] | None, how: dict[str, Any]) -> None:
    """Settle `examples_per_microbatch = "auto"`: as before under the same layout, else what fits with the longest."""
    if training.config.layout.examples_per_microbatch != "auto":
        return
    if manifest is not None and manifest["how"] == how:
        training.examples_per_microbatch = manifest["examples_per_microbatch"]
        return
    size = training.config.update.examples_per_update or len(training.train)
    at_most = -(-size // (training.updater.replicas * training.config.layout.stages))  # a microbatch for each stage
    training.examples_per_microbatch = training.updater.largest_microbatch(training.train, at_most=at_most)


def place(
    training: Training, opening: Opening, manifest: dict[str, Any] | None, directory: RunDirectory, how: dict[str, Any]
) -> None:
    """Bring the training to where its checkpoint is, if there is one."""
    if opening.path is not None and manifest is not None:
        held = training.held
        tensors = load_tensors(directory.path / opening.path, training.device, wanted=held.wants)
        if manifest["how"] != how:
            manifest["state"]["progress"]["examples_that_fit"] = None
        restore(held, training.optimizers, training.updater, tensors, manifest["state"])
    training.groups = grouped(training.config, training.train, training.examples_per_microbatch, training.cursor)


class Run:
    """One start of a run, on every rank; `reporter` does something on rank 0 alone, `writer` is of replica 0."""

    def __init__(
        self, training: Training, directory: RunDirectory, opening: Opening, now: Documents, watch: MemoryWatch, *,
        quiet: bool,
    ) -> None:  # fmt: skip
        self.training, self.directory, self.opening, self.now, self.watch = training, directory, opening, now, watch
        self.updater, self.config = training.updater, training.config
        self.reason: EndReason = "failed"
        self.saved_at = opening.from_update if opening.path else 0
        self.recorded = self.updater.totals.attempted
        self.save_is_due = False
        self.evaluated = set(opening.evaluated)
        self.dropped = 0
        self.evaluation_size: int = training.evaluation_size
        self.stages = self.config.layout.stages
        group = first_ranks(self.stages)
        self.reporter = Reporter(training, directory, resumed=opening.state == "resume", quiet=quiet)
        self.writer = None
        if group is not None:
            self.writer = CheckpointWriter(directory.path, self.config.checkpoint.keep, group, self.announce)
        self.timeline = None
        if self.config.run.timeline and (staging := training.staging) is not None:
            self.timeline = TimelineWriter(
                self.updater, staging.model, directory.path, staging.measured, self.reporter.record, self.reporter.say
            )

    def to_the_end(self) -> None:
        """All updates that are left, with validation and checkpoints. However it ends, the ledger says so."""
        with self.reporter:
            self.begin()
            try:
                self.reason = self.loop()
                self.end()
            except BaseException as error:
                for save in (partial(self.rescue, error), self.finish_timeline):
                    with suppress(IsostepError, OSError):  # the first error is the one to tell
                        save()
                with suppress(OSError):
                    self.reporter.record(RunEnded(reason="failed", message=str(error)))
                raise
            self.reporter.record(RunEnded(reason=self.reason))

    def rescue(self, error: BaseException) -> None:
        """After an error, save what was applied and recorded before it.

        Stages save together, so only after an error that all of them have.
        """
        together = self.stages == 1 or isinstance(error, SHARED)
        if together and self.updater.intact and self.recorded == self.updater.totals.attempted:
            self.save()
        self.finish_saving()

    def begin(self) -> None:
        """Record the start, or the resume with what it changed, and say what is going to happen."""
        if self.writer is not None:
            self.writer.clear(self.opening.announced)
        before, now = self.opening.facts.get("schedule"), self.training.learning_rate.text()
        if before not in (None, now):
            self.opening.changes["facts.schedule"] = [before, now]
        self.reporter.record(self.started() if self.opening.state == "new" else self.resumed())
        for line in [*self.opening.text(self.directory.path), *self.training.announcement(self.now.what_hash)]:
            self.reporter.say(line)

    def started(self) -> RunStarted:
        now, plan = self.now, self.training.groups.plan
        return RunStarted(
            what_hash=now.what_hash,
            what=now.what,
            how=now.how,
            run={**now.run, "facts": self.training.facts()},
            versions=now.versions,
            num_examples=plan.num_examples,
            seed=plan.seed,
            last_group=plan.last_group,
            examples_per_update=plan.examples_per_update,
        )

    def resumed(self) -> Resumed:
        return Resumed(
            from_update=self.opening.from_update,
            what_override=self.opening.what_override,
            how=self.now.how,
            changes=self.opening.changes,
            what_hash=self.now.what_hash,
            facts=self.training.facts(),
            versions=self.now.versions,
        )

    def loop(self) -> EndReason:
        """Update upon update, until there is none left or somebody asks to stop."""
        limit = self.config.run.updates
        groups = iter(self.training.groups)
        try:
            self.evaluate_if_due()
            while limit is None or self.updater.totals.attempted < limit:
                group = next(groups, None)
                self.record_dropped()
                if group is None:
                    break
                if self.update(group):
                    return "stopped"
            self.evaluate()
        except AbandonedError as error:
            self.reporter.say(str(error))
            return "stopped"
        return "complete"

    def update(self, group: DataGroup) -> bool:
        """One update and what is due after it. Returns whether the run is to stop."""
        rate = self.training.set_learning_rate()
        self.watch.begin_group()
        begin = time.perf_counter()
        result = self.updater.update(group)
        seconds = time.perf_counter() - begin
        memory = self.watch.end_group()
        if self.training.average is not None and result.status == "applied":
            self.training.average.update_parameters(self.training.weights)
        self.record_update(result, seconds)
        self.reporter.show_update(result, rate, seconds, memory)
        if self.timeline is not None:
            self.timeline.after_update(result, self.updater.totals.attempted)
        if result.stop_requested:
            return True
        every, attempted = self.config.checkpoint.every, self.updater.totals.attempted
        due = every > 0 and attempted % every == 0
        if due or self.watch.later_groups is None:
            self.record_memory()
        self.save_is_due = self.save_is_due or due
        if self.writer is not None:
            self.say_saved(self.writer.poll())
        if self.save_is_due and not self.saving():  # else after a later update: nobody waits for the disk
            self.save()
        if result.status == "applied":
            self.evaluate_if_due()
        return False

    def evaluate_if_due(self) -> None:
        every, applied = self.config.validation.every, self.updater.totals.applied
        if applied == 0 or (every and applied % every == 0):
            self.evaluate()

    def end(self) -> None:
        """The last checkpoint, on disk when this returns; and the weights by themselves."""
        self.finish_timeline()
        self.record_memory()
        self.save()
        self.finish_saving()
        write_weights(self.training, "model.", self.directory.path / WEIGHTS)
        if self.training.average is not None:
            write_weights(self.training, "average.module.", self.directory.path / AVERAGE)

    def finish_timeline(self) -> None:
        if self.timeline is not None:
            self.timeline.finish()

    def evaluate(self) -> None:
        """The objective over the validation data, once after the same number of applied updates.

        Memory that runs out makes its microbatches smaller, and nothing else.
        """
        applied = self.updater.totals.applied
        if applied in self.evaluated:
            return
        training, before = self.training, self.evaluation_size
        try:
            result = self.updater.evaluate(training.validation, examples_per_microbatch=before, model=training.judged)
        except OutOfMemoryError as error:
            if self.stages > 1:  # the others wait in the middle of it
                raise
            self.reporter.say(f"validation left out, training goes on: {error}")
            self.record_out_of_memory("evaluation", before, 1)
            self.evaluation_size = 1
            self.reporter.record(Evaluated(after_applied=applied, loss=None, terms={}, counters=Counts()))
            return
        finally:
            self.evaluated.add(applied)
        if result.halvings and result.examples_per_microbatch is not None:
            self.evaluation_size = result.examples_per_microbatch
            self.record_out_of_memory("evaluation", before, self.evaluation_size)
        self.reporter.record(
            Evaluated(after_applied=applied, loss=result.loss, terms=result.terms, counters=result.counts)
        )
        self.reporter.show_evaluation(result)

    def save(self) -> None:
        """Start a checkpoint of everything up to the last update, unless there is one."""
        training, attempted = self.training, self.updater.totals.attempted
        self.save_is_due = False
        if self.saved_at == attempted:
            return
        tensors, state = capture(training.held, training.optimizers, self.updater)
        if self.stages > 1:
            for values in self.updater.gather(state["optimizer_values"]):
                state["optimizer_values"] |= values
        manifest = {
            "after_attempted": attempted,
            "how": self.now.how,
            "examples_per_microbatch": training.examples_per_microbatch,
            "state": state,
        }
        if self.writer is not None:
            self.writer.start(tensors, manifest, attempted)
        self.saved_at = attempted

    def saving(self) -> bool:
        """Whether a checkpoint is under way, on any of the ranks that write one together."""
        busy = self.writer is not None and self.writer.busy
        return busy if self.stages == 1 else any(self.updater.gather(busy))

    def finish_saving(self) -> None:
        if self.writer is not None:
            self.say_saved(self.writer.finish())

    def announce(self, after_attempted: int, path: str, digest: str) -> None:
        self.reporter.record(CheckpointAnnounced(after_attempted=after_attempted, path=path, digest=digest))

    def say_saved(self, after_attempted: int | None) -> None:
        if after_attempted is not None:
            folder = self.directory.path / folder_of(after_attempted)
            self.reporter.say(f"checkpoint after update {after_attempted} is on disk: {folder}")

    def record_update(self, result: UpdateResult, seconds: float) -> None:
        if result.halvings:
            self.record_out_of_memory("update", result.examples_per_microbatch_tried, result.examples_per_microbatch)
        self.reporter.record(result.event(self.updater.totals.attempted, seconds))
        self.recorded = self.updater.totals.attempted

    def record_out_of_memory(self, during: Literal["update", "evaluation"], before: int, after: int) -> None:
        self.reporter.say(f"out of memory with {before} examples per microbatch in {during}: going on with {after}")
        self.reporter.record(
            OutOfMemory(
                attempted=self.updater.totals.attempted,
                during=during,
                examples_per_microbatch_before=before,
                examples_per_microbatch_after=after,
            )
        )

    def record_dropped(self) -> None:
        """Record the partial groups that were left out on the way to the next group."""
        for group in self.training.groups.dropped[self.dropped :]:
            self.reporter.record(
                Dropped(
                    epoch=group.epoch,
                    start=group.start,
                    stop=group.stop,
                    ids=group.ids,
                    ids_hash=format_hash(group.coverage),
                )
            )
        self.dropped = len(self.training.groups.dropped)

    def record_memory(self) -> None:
        """Record the peaks of every replica; all of them call this."""
        watch = self.watch
        if watch.first_group is None:
            return
        peaks = self.updater.gather((str(self.training.device), watch.baseline, watch.first_group, watch.later_groups))
        devices, baseline, first, later = map(list, zip(*peaks, strict=True))
        self.reporter.record(MemoryObserved(devices=devices, baseline=baseline, first_group=first, later_groups=later))


def write_weights(training: Training, prefix: str, path: Path) -> None:
    """Write the tensors of that prefix, of all stages, so that the file is the whole new one or not there.

    Every rank calls it; rank 0 writes. Raises IsostepError.
    """
    own = {name.removeprefix(prefix): t for name, t in training.held.tensors.items() if name.startswith(prefix)}
    if training.staging is not None:
        parts = to_first_rank(own if training.updater.replica == 0 else {})
        own = {name: tensor for part in parts for name, tensor in part.items()}
    if training.updater.rank > 0:
        return
    partial_path = path.with_suffix(".partial")
    try:
        torch.save(own, partial_path)
        partial_path.replace(path)
    except (OSError, RuntimeError) as error:  # the latter is what torch makes of a full disk
        with suppress(OSError):
            partial_path.unlink()
        raise IsostepError(
            f"{path}: got {reason_of(error)}, expected room and access for it; mend that and give the same command"
        ) from error


@contextmanager
def stop_on_signal(training: Training) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the run after the update under way, or without it if that outlasts the grace.

    A second signal does not wait for it. What arrives within `SAME_SIGNAL` seconds is one signal: a terminal sends it
    to every process, and the launcher passes its own on.
    """
    first: list[float] = []

    def handler(*_: object) -> None:
        now = time.monotonic()
        if not first:
            first.append(now)
            training.updater.request_stop(grace=training.config.run.grace)
        elif now - first[0] > SAME_SIGNAL:
            training.updater.request_stop(grace=0.0)

    previous = {number: signal.signal(number, handler) for number in STOPPING}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
