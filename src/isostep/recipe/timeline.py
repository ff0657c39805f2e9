"""The measured timeline of a pipeline run: recorded on every rank, written and drawn by rank 0."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..distributed.stages import StagedModel
from ..distributed.timeline import Reading, Recorder, Recording, clock_offsets, link_seconds
from ..layer_costs import MeasuredLayers
from ..ledger import Event, TimelineObserved
from ..result import UpdateResult
from ..schedule import gantt_svg, trace
from ..schedule.drawing import percent
from ..schedule.measured import handovers
from ..schedule.timeline_file import MS, NAME, Recorded, Start, Update, comparisons, cut_torn_line, line, slowest
from ..updater import Updater

RECORDED = 20
"""Updates that are recorded, after the first one of a start, which warms up."""
SVG = "timeline.svg"
TRACE = "timeline.trace.json"


def start_of(model: StagedModel, measured: MeasuredLayers, transfer_seconds: float = 0.0) -> Start:
    """What a prediction is made of."""
    return Start(
        stages=model.stages,
        replicas=model.replicas,
        schedule=model.schedule_name,
        chunks=len(model.rank_of) // model.stages,
        boundaries=tuple(model.bounds),
        recomputes=tuple(model.recomputes),
        tokens=measured.tokens,
        transfer_seconds=transfer_seconds,
        source=measured.model.source,
        layers=measured.model.layers,
        kept_bytes=measured.kept_bytes,
    )


class TimelineWriter:
    """Records the first updates of a start of a run on every rank of a staged model, and then nothing more.

    run_dir: where rank 0 writes `timeline.jsonl`, a line with each update, and at the end the pictures of a typical
    one. measured_layers: what the prediction is made of. record, say: called on rank 0, with an event for the ledger
    and with a line for the user.
    """

    def __init__(
        self,
        updater: Updater,
        staged_model: StagedModel,
        run_dir: Path,
        measured_layers: MeasuredLayers,
        record: Callable[[Event], None],
        say: Callable[[str], None],
    ) -> None:
        self._updater, self._model, self._run_dir = updater, staged_model, run_dir
        self._measured, self._record, self._say = measured_layers, record, say
        self._rank = updater.rank
        self._device = next(staged_model.parameters()).device
        self._reading: Reading = (0.0, 0.0)
        self._recorded: Recorded | None = None
        self._left = RECORDED
        self._recorder: Recorder | None = Recorder(self._device)
        staged_model.recorder = self._recorder

    def after_update(self, result: UpdateResult, attempted: int) -> None:
        """Every rank calls this after each update: the ranks exchange what they recorded of it, until it is enough.

        Raises PeerLostError where another rank does not answer, and OSError where the file cannot be written.
        """
        recorder = self._recorder
        if recorder is None or result.status == "empty":
            return
        if self._recorded is None:
            recorder.start([])
            self._recorded = Recorded(self._begin(), ())
            self._reading = self._read_clock(recorder)
            return
        before, self._reading = self._reading, self._read_clock(recorder)
        recording = recorder.take(self._rank).on_first_clock(before, self._reading)
        recordings: list[Recording] = self._updater.gather(recording)
        self._left -= 1
        if self._rank == 0:
            self._add(self._recorded, _update_of(recordings, attempted, self._model.stages))
        if self._left == 0:
            self.finish()

    def finish(self) -> None:
        """Record no more; rank 0 draws what there is. Waits for nobody, so it may follow an error of another rank.

        Raises OSError where a picture cannot be written.
        """
        if self._recorder is None:
            return
        self._recorder = self._model.recorder = None
        if self._rank:
            return
        if self._recorded is None or not self._recorded.updates:
            self._say("timeline: nothing is recorded, since the first update only warms up and no other followed")
        else:
            update, compared = self._recorded.typical()
            chosen = slowest(compared)
            title = f"update {update.attempted}"
            _write(self._run_dir / SVG, gantt_svg.pair(chosen, title))
            replicas = (each.measured for each in compared.values())
            _write(self._run_dir / TRACE, json.dumps(trace.document(*replicas)))
            self._say(
                f"timeline of update {update.attempted}: makespan {chosen.measured.makespan:.4g} ms, predicted "
                f"{chosen.predicted.makespan:.4g} ms; ranks busy {percent(chosen.measured.busy_share)}: "
                f"{self._run_dir / SVG}"
            )

    def _begin(self) -> Start:
        """What the file says before the first update; every rank takes part in measuring a transfer."""
        model, measured = self._model, self._measured
        cuts = model.bounds[1:-1]
        nbytes = max((measured.boundary_bytes[cut - 1] for cut in cuts), default=0.0)
        with model.peers("timeline"):
            transfer_seconds = link_seconds(model.row, int(nbytes), self._device)
        start = start_of(model, measured, transfer_seconds)
        if self._rank == 0:
            cut_torn_line(self._run_dir / NAME)
            self._append(line(start))
        return start

    def _read_clock(self, recorder: Recorder) -> Reading:
        with self._model.peers("timeline"):
            offsets = clock_offsets(self._model.world, self._device, recorder.clock)
        return recorder.clock(), offsets[self._rank]

    def _add(self, recorded: Recorded, update: Update) -> None:
        self._recorded = Recorded(recorded.start, (*recorded.updates, update))
        self._append(line(update))
        chosen = slowest(comparisons(recorded.start, update))
        self._record(
            TimelineObserved(
                attempted=update.attempted,
                path=NAME,
                makespan=chosen.measured.makespan / MS,
                predicted_makespan=chosen.predicted.makespan / MS,
                busy_share=chosen.measured.busy_share,
                predicted_busy_share=chosen.predicted.busy_share,
                bound=chosen.bounds.bound,
            )
        )

    def _append(self, text: str) -> None:
        with open(self._run_dir / NAME, "a", encoding="utf-8") as file:
            file.write(text)


def _update_of(recordings: list[Recording], attempted: int, stages: int) -> Update:
    """All replicas' part of an update, by world rank; times from the first start."""
    zero = min(span.start for each in recordings for span in each.spans)
    leads = recordings[::stages]
    transfers = []
    for first in range(0, len(recordings), stages):
        row = dict(enumerate(recordings[first : first + stages], start=first))
        transfers += handovers({r: each.sent for r, each in row.items()}, {r: each.received for r, each in row.items()})
    return Update(
        attempted=attempted,
        num_microbatches=tuple(len(each.sizes) for each in leads),
        tokens_per_microbatch=tuple(sum(each.sizes) / max(1, len(each.sizes)) for each in leads),
        spans=tuple(s._replace(start=s.start - zero, end=s.end - zero) for each in recordings for s in each.spans),
        transfers=tuple(h._replace(start=h.start - zero, waited=h.waited - zero, end=h.end - zero) for h in transfers),
    )


def _write(path: Path, text: str) -> None:
    """The file is either the whole new one or as it was."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
