"""One replica's microbatches through stages of layers: torch's pipeline runtime, run from isostep's own schedules.

This is the only file that touches the private parts of torch.distributed.pipelining. What torch infers once, from a
first microbatch, is told it for every update: the shape of what each microbatch hands from stage to stage, so that
microbatches of a group may differ in size and length, without padding.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._utils import _TensorMeta
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _RecvInfo

from ..schedule import csv_file
from ..schedule.ir import Schedule

Shape = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor between two chunks."""
Peers: TypeAlias = Callable[[str], AbstractContextManager[None]]


class Stage(PipelineStage):
    """A model chunk of this rank, as torch's runtime sees it."""

    def __init__(self, chunk: nn.Module, index: int, rank_of: Sequence[int], group: Any, device: torch.device) -> None:
        super().__init__(chunk, index, len(rank_of), device, group=group)
        self.stage_index_to_group_rank = dict(enumerate(rank_of))
        self.after_backward: Callable[[], None] = lambda: None

    def backward_one_chunk(self, *args: Any, **options: Any) -> None:
        super().backward_one_chunk(*args, **options)
        self.after_backward()

    def backward_weight_one_chunk(self, *args: Any, **options: Any) -> None:
        super().backward_weight_one_chunk(*args, **options)
        self.after_backward()

    def prepare(self, inputs: Sequence[Shape], outputs: Sequence[Shape], trains: bool) -> None:
        """Make room for what is received. inputs, outputs: of this chunk, one per microbatch."""
        self.clear_runtime_states()
        self.has_backward = trains
        self.chunks = len(inputs)
        self._stage_meta.inputs = (_meta(inputs[0], grad=trains),)
        self._stage_meta.outputs = (_meta(outputs[0], grad=trains),)
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

    def _received(self, shape: Shape, source: int, from_stage: bool, grad: bool) -> _RecvInfo:
        meta = _meta(shape, grad=grad)
        if not from_stage:
            return _RecvInfo("input", None, None, meta, is_root_arg=True)
        local = self.stage_index_to_group_rank[source] == self.group_rank
        buffer = torch.empty(0 if local else shape[0], dtype=shape[1], device=self.device)
        return _RecvInfo(f"from stage {source}", source, buffer, meta)


class Runtime(_PipelineScheduleRuntime):
    """A schedule for one number of microbatches, ready to run. Without a loss its backwards do nothing."""

    def __init__(self, stages: list[Stage], schedule: Schedule, loss: Callable[[Any, Any], Tensor] | None) -> None:
        super().__init__(stages, schedule.num_microbatches, loss_fn=loss, scale_grads=False)
        rows = csv.reader(csv_file.text(schedule).splitlines())
        self._prepare_schedule_with_comms({rank: [_Action.from_str(c) for c in row] for rank, row in enumerate(rows)})

    def _initialize_stages(self, *_: Any, **__: Any) -> None:
        """Nothing: `Stage.prepare` has done it."""

    def run(self, inputs: Sequence[Any], targets: Sequence[Any] | None, peers: Peers) -> list[Any]:
        """All microbatches: what enters the first chunk, and what the loss gets beside the last chunk's output.

        Returns the outputs where there are no targets and this rank has the last chunk, else nothing. peers: turns a
        broken or late transfer into the error that says who is missing. An error of a layer is raised as it was.
        """
        with _heard(peers), _silent(), _as_raised():
            self._step_microbatches(
                [(each,) for each in inputs],
                [{} for _ in inputs],
                None if targets is None else list(targets),
                return_outputs=targets is None,
            )
        return [output for stage in self._stages if stage.is_last for output in stage.output_chunks]


@contextmanager
def _heard(peers: Peers) -> Iterator[None]:
    """torch's sends, receives and waits, each with `peers` around it."""
    started, waited = schedules._batch_p2p, schedules._wait_batch_p2p

    def start(*args: Any) -> Any:
        with peers("stages"):
            return started(*args)

    def wait(works: Any) -> None:
        with peers("stages"):
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
        if error.__cause__ is not None and "failed to run forward" in str(error):
            raise error.__cause__ from None
        raise


def _meta(shape: Shape, grad: bool) -> _TensorMeta:
    floating = shape[1].is_floating_point
    return _TensorMeta.from_tensor(
        torch.empty(shape[0], dtype=shape[1], device="meta", requires_grad=grad and floating)
    )
