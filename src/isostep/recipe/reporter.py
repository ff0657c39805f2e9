"""What rank 0 tells of a run: the ledger, the terminal, trackers. On the other ranks it does nothing."""

from __future__ import annotations

import sys
from types import TracebackType

from ..distributed.comm import on_first_rank
from ..evaluate import EvaluationResult
from ..ledger import Event, Ledger
from ..report.progress import Progress
from ..report.track import Tracker, trackers
from ..result import UpdateResult
from .build import Training
from .run_dir import RunDirectory


class Reporter:
    """A context manager around a run. `lead` is rank 0."""

    def __init__(self, training: Training, directory: RunDirectory, *, resumed: bool, quiet: bool) -> None:
        """Raises InputError on every rank where rank 0 cannot open the ledger or a tracker."""
        self.lead = training.updater.rank == 0
        self._training, self._directory, self._resumed = training, directory, resumed
        self._ledger: Ledger | None = None
        self._trackers: list[Tracker] = []
        on_first_rank(self._open)
        self._progress = Progress(
            training.planned_updates,
            training.planned_examples,
            stream=sys.stderr if quiet else sys.stdout,
            quiet=not self.lead,
        )

    def _open(self) -> None:
        config = self._training.config
        here = self._training.progress[config.run.x_axis] if self._resumed else None
        document = config.model_dump(mode="json")
        self._trackers = trackers(config.run.track, self._directory.path, config.run.x_axis, document, resumed_at=here)
        self._ledger = Ledger(self._directory.ledger)

    def __enter__(self) -> Reporter:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)
        for tracker in self._trackers:
            tracker.close()
        if self._ledger is not None:
            self._ledger.close()

    def record(self, event: Event) -> None:
        if self._ledger is not None:
            self._ledger.append(event)

    def say(self, text: str) -> None:
        if self.lead:
            self._progress.say(text)

    def show_update(self, result: UpdateResult, learning_rate: float, seconds: float, memory: int) -> None:
        """Show an update and track it."""
        if not self.lead:
            return
        totals = self._training.updater.totals
        self._progress.update(
            totals.attempted,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            examples=totals.counts.examples,
            supervised_tokens=totals.counts.supervised_tokens,
            tokens_per_second=result.counts.total_tokens / seconds,
            seconds=seconds,
            memory=memory,
        )
        values = {"loss": result.loss, "grad_norm": result.grad_norm, "learning_rate": learning_rate}
        self._track({"train/" + name: value for name, value in values.items()})

    def show_evaluation(self, result: EvaluationResult) -> None:
        """Show a validation and track it."""
        loss = "-" if result.loss is None else f"{result.loss:.4f}"
        counts = result.counts
        self.say(
            f"validation loss {loss} nats per token, over all {counts.supervised_tokens:,} supervised tokens of "
            f"{counts.examples:,} examples"
        )
        self._track({"validation/loss": result.loss})

    def _track(self, values: dict[str, float | None]) -> None:
        for tracker in self._trackers:
            tracker.log(values, **self._training.progress)
