"""The same orders as torch.distributed.pipelining builds, and files that its own reader takes."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from isostep.schedule import csv_file
from isostep.schedule.generate import generate
from isostep.schedule.ir import Schedule

CLASSES = {
    "interleaved-1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "looped-bfs": torch_schedules.ScheduleLoopedBFS,
    "interleaved-zb": torch_schedules.ScheduleInterleavedZeroBubble,
    "zb-v": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipe-v": torch_schedules.ScheduleDualPipeV,
}
SIZES = [(p, m, v) for p in (2, 3, 4) for m in (2, 4, 6, 8, 12) for v in (2, 3)]


def torch_order(name: str, p: int, m: int, v: int) -> list[list[str]]:
    """What each rank does, as torch builds it, without a process group; idle ticks are left out."""
    if name == "gpipe":
        maker: Any = object.__new__(torch_schedules.ScheduleGPipe)
        maker.pp_group_size, maker._num_stages, maker._n_microbatches = p, p, m
        orders = maker._get_pipeline_order()
    else:
        maker = object.__new__(CLASSES[name])
        maker.pp_group_size, maker._num_stages, maker.num_stages, maker._n_microbatches = p, p * v, p * v, m
        maker.n_local_stages = v
        maker._stages = [SimpleNamespace() for _ in range(v)]
        maker.number_of_rounds = max(1, m // p)
        maker.microbatches_per_round = m // maker.number_of_rounds
        orders = {rank: maker._calculate_single_rank_operations(rank) for rank in range(p)}
    kept = ("F", "B", "I", "W", "OVERLAP_F_B")
    return [[str(a) for a in orders[r] if a is not None and a.computation_type.value in kept] for r in range(p)]


def our_order(schedule: Schedule) -> list[list[str]]:
    return list(csv.reader(csv_file.text(schedule).splitlines()))


@pytest.mark.parametrize("name", [*CLASSES, "gpipe"])  # torch's listing of 1f1b counts the last stage from 1
def test_orders_are_those_that_torch_runs(name: str) -> None:
    compared = 0
    for p, m, v in SIZES:
        v = 2 if name in ("zb-v", "dualpipe-v") else v if name in CLASSES else 1
        rounds = max(1, m // p)
        if (name.startswith("interleaved") and m % rounds) or (name == "dualpipe-v" and m < 2 * p):
            continue
        assert our_order(generate(name, p, m, v)) == torch_order(name, p, m, v), (p, m, v)
        compared += 1
    assert compared >= 10


def test_control_another_order_differs() -> None:
    assert our_order(generate("interleaved-zb", 4, 8, 2)) != torch_order("interleaved-1f1b", 4, 8, 2)


def torch_reads(path: Path, schedule: Schedule) -> Any:
    """torch's runtime with a file loaded: read, validated, and completed with sends and receives."""
    runtime: Any = object.__new__(torch_schedules._PipelineScheduleRuntime)
    runtime.pipeline_order, runtime._stages = {}, []
    runtime.pp_group_size, runtime._num_stages = schedule.stages, schedule.num_chunks
    runtime._n_microbatches, runtime._defer_pp_recv = schedule.num_microbatches, False
    runtime._max_active_stages, runtime._unshard_lookahead = 3, "full"  # torch 2.15: these and the next
    runtime._defer_reduce_grad_wait, runtime._max_outstanding_sends = False, None
    runtime._load_csv(str(path))
    return runtime


RUNNABLE = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "dualpipe-v")


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
def test_torch_reads_our_files_and_we_read_torchs(name: str, p: int, m: int, tmp_path: Path) -> None:
    schedule = generate(name, p, m)
    path = tmp_path / "order.csv"
    path.write_text(csv_file.text(schedule))
    runtime = torch_reads(path, schedule)
    assert tuple(runtime.stage_index_to_group_rank[s] for s in range(schedule.num_chunks)) == schedule.rank_of
    assert sum("SEND" in str(a) for order in runtime.pipeline_order_with_comms.values() for a in order) > 0
    runtime._dump_csv(str(path), format="compute_comms")
    assert our_order(csv_file.read(path)) == our_order(schedule)


def test_control_torch_refuses_a_file_without_a_backward(tmp_path: Path) -> None:
    schedule = generate("1f1b", 2, 4)
    path = tmp_path / "order.csv"
    path.write_text(csv_file.text(schedule).replace("1B3", ""))
    with pytest.raises(AssertionError, match="backward"):
        torch_reads(path, schedule)
