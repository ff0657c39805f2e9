"""One replica's microbatches through stages of layers: torch's pipeline runtime, run from isostep's own schedules.

This is the only file that touches the private parts of torch.distributed.pipelining. What torch infers once, from a
first microbatch, is told it for every update: the shape of what each microbatch hands from stage to stage, so that
microbatches of a group may differ in size and length, without padding.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, _utils, schedules
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _RecvInfo

from ..schedule import csv_file
from ..schedule.ir import Schedule
from .timeline import Recorder

Shape = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor between two chunks."""
Peers: TypeAlias = Callable[[str], AbstractContextManager[None]]


class Stage(PipelineStage):
    """A model chunk of this rank, as torch's runtime sees it."""

    def __init__(self, chunk: nn.Module, index: int, rank_of: Sequence[int], group: Any, device: torch.device) -> None:
        super().__init__(chunk, index, len(rank_of), device, group=group)
        self.stage_index_to_group_rank = dict(enumerate(rank_of))
        self._runtime_validate = False  # against the shapes of the first microbatch, where torch's debug level is high
        self.after_backward: Callable[[], None] = lambda: None
        self.recorder: Recorder | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Its record ends behind the loss, in `Runtime`."""
        if self.recorder is not None:
            self.recorder.begin(self.stage_index, fwd_chunk_id, "F")
        return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **options: Any) -> None:
        if self.recorder is not None:
            self.recorder.begin(self.stage_index, bwd_chunk_id, "B" if full_backward else "I")
        super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **options)
        if bwd_chunk_id in self.bwd_cache:
            gradients = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(None if g is None else _to_send(g, full_backward) for g in gradients)
        self.after_backward()
        if self.recorder is not None:
            self.recorder.end()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        if self.recorder is not None:
            self.recorder.begin(self.stage_index, bwd_chunk_id, "W")
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **options)
        self.after_backward()
        if self.recorder is not None:
            self.recorder.end()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        if self.recorder is not None:
            self.recorder.sent(self.stage_index, fwd_chunk_id, "F")
        return super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        if self.recorder is not None:
            self.recorder.sent(self.stage_index, bwd_chunk_id, "B")
        return super().get_bwd_send_ops(bwd_chunk_id)

    def prepare(self, inputs: Sequence[Shape], outputs: Sequence[Shape], trains: bool) -> None:
        """Make room for what is received. inputs, outputs: of this chunk, one per microbatch."""
        self.clear_runtime_states()
        self.has_backward = trains
        self.chunks = len(inputs)
        self._stage_meta = SimpleNamespace(inputs=(_meta(inputs[0], grad=trains),), input_grads=None)
        self.act_send_info = {0: [] if self.is_last else [self.stage_index + 1]}
        self.grad_send_info = None
        for index, (entering, leaving) in enumerate(zip(inputs, outputs, strict=True)):
            self.args_recv_info[index] = (self._received(entering, self.stage_index - 1, not self.is_first, trains),)
            if not self.is_last:
                self.grad_recv_info[index] = (self._received(leaving, self.stage_index + 1, True, False),)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _validate_fwd_input(self, *_: Any) -> None:
        """Nothing: torch 2.11 would hold every microbatch to the shape of the first."""

    _validate_fwd_outputs = _validate_fwd_input

    def _received(self, shape: Shape, source: int, from_stage: bool, grad: bool) -> Any:
        if not from_stage:
            return SimpleNamespace(is_root_arg=True)
        local = self.stage_index_to_group_rank[source] == self.group_rank
        return _Received(source, shape, None if local else self.device, grad)


class _Received(_RecvInfo):
    """What one microbatch brings from another stage: all that torch 2.11 to 2.15 look for, each a part of it.

    device: where the room for it is; None where that stage is on the same rank and hands its tensor over.
    """

    def __init__(self, source: int, shape: Shape, device: torch.device | None, grad: bool) -> None:
        self.input_name, self.source, self.is_root_arg = f"from stage {source}", source, False
        self.tensor_meta = _meta(shape, grad)
        if hasattr(self, "allocate_buffer"):  # torch 2.15 makes room when a transfer starts
            self.buffer = None
            return
        self.buffer = torch.empty(shape[0] if device else 0, dtype=shape[1], device=device)
        self.buffer.requires_grad_(grad and shape[1].is_floating_point)


class Runtime(_PipelineScheduleRuntime):
    """A schedule for one number of microbatches, ready to run, any number of times. trains: its backwards run too."""

    def __init__(self, stages: list[Stage], schedule: Schedule, *, trains: bool) -> None:
        super().__init__(
            stages, schedule.num_microbatches, loss_fn=(lambda *_: None) if trains else None, scale_grads=False
        )
        self._own_stages, self._recorder = stages, None
        rows = csv.reader(csv_file.text(schedule).splitlines())
        self._prepare_schedule_with_comms({rank: [_Action.from_str(c) for c in row] for rank, row in enumerate(rows)})

    def _initialize_stages(self, *_: Any, **__: Any) -> None:
        """Nothing: `Stage.prepare` has done it."""

    def run(
        self,
        inputs: Sequence[Any],
        peers: Peers,
        loss: Callable[[Any, Any], Tensor] | None = None,
        targets: Sequence[Any] | None = None,
        recorder: Recorder | None = None,
    ) -> list[Any]:
        """All microbatches: what enters the first chunk, and what the loss gets beside the last chunk's output.

        Returns the outputs where there are no targets and this rank has the last chunk, else nothing. peers: turns a
        broken or late transfer into the error that says who is missing. recorder: takes down when each action and each
        transfer of this rank begins and ends. An error of a layer is raised as it was.
        """
        self._loss_fn, self._recorder = loss, recorder
        for stage in self._own_stages:
            stage.recorder = recorder
        if self._recorder is not None:
            self._recorder.start([each.numel() for each in inputs])
        with _heard(peers, self._recorder), _silent(), _as_raised():
            self._step_microbatches(
                [(each,) for each in inputs],
                [{} for _ in inputs],
                None if targets is None else list(targets),
                return_outputs=targets is None,
            )
        return [output for stage in self._stages if stage.is_last for output in stage.output_chunks]

    def _maybe_compute_loss(self, *args: Any, **options: Any) -> None:
        super()._maybe_compute_loss(*args, **options)
        if self._recorder is not None:
            self._recorder.end()


@contextmanager
def _heard(peers: Peers, recorder: Recorder | None) -> Iterator[None]:
    """torch's sends, receives and waits, each with `peers` around it; the waits are recorded."""
    started, waited = schedules._batch_p2p, schedules._wait_batch_p2p
    waiting = nullcontext if recorder is None else recorder.waiting

    def start(*args: Any) -> Any:
        with peers("stages"):
            return started(*args)

    def wait(works: Any) -> None:
        with peers("stages"), waiting():
            waited(works)

    schedules._batch_p2p, schedules._wait_batch_p2p = start, wait
    try:
        yield
    finally:
        schedules._batch_p2p, schedules._wait_batch_p2p = started, waited


@contextmanager
def _silent() -> Iterator[None]:
    """torch writes the whole schedule to the log beside an error that it raises anyway."""
    logger = logging.getLogger(schedules.__name__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _as_raised() -> Iterator[None]:
    """torch wraps an error of a layer into one of its own."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None and "ailed to run" in str(error):
            raise error.__cause__ from None
        raise


def _to_send(gradient: Tensor, full_backward: bool) -> Tensor:
    """Contiguous, and memory of its own: a backward for the weights may hand the same tensor to a parameter, to which
    later ones are added while it is on its way.
    """
    return gradient.contiguous() if full_backward else gradient.clone(memory_format=torch.contiguous_format)


def _meta(shape: Shape, grad: bool) -> Any:
    floating = shape[1].is_floating_point
    example = torch.empty(shape[0], dtype=shape[1], device="meta", requires_grad=grad and floating)
    described = getattr(_utils, "_TensorMeta", None)  # torch 2.11 has none
    return example if described is None else described.from_tensor(example)
