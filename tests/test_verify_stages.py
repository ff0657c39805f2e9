"""`isostep verify` over stages: every layout gives the same update, and what is broken on purpose is found."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from command import run, torchrun
from isostep import update
from isostep.cli import build_parser
from isostep.commands import verify
from isostep.distributed import stages
from isostep.distributed.pipeline import Runtime
from isostep.distributed.stages import StagedComm, StagedModel
from isostep.schedule.generate import NAMES
from isostep.verification.grid import verify_worker
from isostep.verification.observe import Options, Row
from pool import Pool

GRID = pytest.mark.grid


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """Two workers of their own: verify ends the process groups of those that it runs in."""
    workers = Pool(2)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def world() -> Iterator[Pool]:
    """Four of them."""
    workers = Pool(4)
    yield workers
    workers.close()


# ------------------------------------------------------------------------------------------------------- mutants

MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def mutant(function: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    MUTANTS[function.__name__] = function
    return function


def break_for_good(name: str) -> None:
    MUTANTS[name](pytest.MonkeyPatch())


@mutant
def scaled_per_microbatch(patch: pytest.MonkeyPatch) -> None:
    """torch's default: gradients are divided by the number of microbatches when a schedule ends."""
    original = Runtime.__init__

    def scaling(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self.scale_grads = True

    patch.setattr(Runtime, "__init__", scaling)


@mutant
def norm_per_stage(patch: pytest.MonkeyPatch) -> None:
    """Each rank clips by the norm of its own parameters."""
    patch.setattr(StagedComm, "everywhere", lambda self, squares: [square or 0.0 for square in squares])


@mutant
def tied_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Each holder of a tied parameter goes its own way."""
    original = StagedModel.__init__

    def untied(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self.tied = []

    patch.setattr(StagedModel, "__init__", untied)


@mutant
def tied_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """A tied parameter counts in the norm on each of its holders."""

    def both(self: Any, squares: Sequence[float | None]) -> list[float]:
        return self._row_sum([square or 0.0 for square in squares])

    patch.setattr(StagedComm, "everywhere", both)


@mutant
def holder_drifts(patch: pytest.MonkeyPatch) -> None:
    """The last rank applies slightly more than the others, below the tolerance of one update."""
    original = update.apply

    def applied(engine: Any, *args: Any) -> Any:
        if engine.comm.rank == engine.comm.size - 1:
            engine.gradients.scale(1 + 1e-14)
        return original(engine, *args)

    patch.setattr(update, "apply", applied)


@mutant
def stage_not_reduced(patch: pytest.MonkeyPatch) -> None:
    """The last stage rank keeps its gradients from the other replicas."""
    original = StagedComm.reduce

    def reduced(self: Any, *args: Any) -> None:
        replicas, self.replicas = self.replicas, 1 if self._model.has_last else self.replicas
        original(self, *args)
        self.replicas = replicas

    patch.setattr(StagedComm, "reduce", reduced)


@mutant
def reduced_twice(patch: pytest.MonkeyPatch) -> None:
    """As many bytes again go over the wire; the gradients stay right."""
    original = StagedComm.reduce

    def reduced(self: Any, gradients: Any, *args: Any) -> None:
        original(self, gradients, *args)
        if self.replicas > 1:
            nbytes = sum(p.numel() * p.element_size() for p in gradients.parameters if not p.is_meta)
            dist.all_reduce(torch.zeros(nbytes, dtype=torch.uint8), group=self._model.column)

    patch.setattr(StagedComm, "reduce", reduced)


@mutant
def filler_counts(patch: pytest.MonkeyPatch) -> None:
    """Filler adds the gradients of the batch that stands in for it."""
    original = StagedModel.run

    def running(self: Any, batches: Any, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(stages, "_FILLER", batches[-1] if batches else None)
            original(self, batches, *args)

    patch.setattr(StagedModel, "run", running)


@mutant
def microbatch_runs_twice(patch: pytest.MonkeyPatch) -> None:
    """The first microbatch goes through the stages once more, and its gradients are lost."""
    original = StagedModel.run

    def running(self: Any, batches: Any, *args: Any) -> None:
        if batches:
            self.evaluated(batches[:1], torch.no_grad)
        original(self, batches, *args)

    patch.setattr(StagedModel, "run", running)


ONE_REPLICA = (Row(3, 1, 2, "1f1b"),)
REPLICAS = (Row(5, 2, 2, "zb-h1"),)
FILLED = (Row(13, 1, 2, "interleaved-1f1b"),)


def _verify(_: Any, name: str | None, options: Options) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            MUTANTS[name](patch)
        return verify_worker(options)


def test_stages_pass_and_are_shown(pair: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    layouts = ((3, 1), (3, 2), *ONE_REPLICA, *FILLED, Row(4, 1, 2, "zb-v"))
    document = pair.run(2, _verify, None, Options(layouts, tied=True))[0]
    assert document["passed"], document
    assert document["control"]["factor"] > 1e6
    assert [report["layout"] for report in document["layouts"]][1:3] == [
        {"examples_per_microbatch": 3, "accumulate": 3, "replicas": 2, "stages": 1, "schedule": None},
        {"examples_per_microbatch": 3, "accumulate": 5, "replicas": 1, "stages": 2, "schedule": "1f1b"},
    ]
    for report in document["layouts"]:
        assert report["gradient_norm"] == pytest.approx(document["reference"]["gradient_norm"], rel=1e-12)
        assert report["ids_hash"] == document["reference"]["ids_hash"]
    ratios = [report["reduced_bytes_ratio"] for report in document["layouts"]]
    assert ratios == [0, 1, 1, 1, 0], "under zb-v both holders of the embedding are one rank"
    verify.show(document)
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    assert any(line.startswith("13 1 1 2 interleaved-1f1b ") and line.endswith("ok") for line in map(str.rstrip, shown))


FOUND = [
    ("scaled_per_microbatch", ONE_REPLICA, "norm off"),
    ("norm_per_stage", ONE_REPLICA, "gradient error"),
    ("tied_counted_twice", ONE_REPLICA, "norm off"),
    ("tied_not_summed", ONE_REPLICA, "different weights"),
    ("filler_counts", FILLED, "norm off"),
    ("microbatch_runs_twice", ONE_REPLICA, "other examples"),
    pytest.param("holder_drifts", ONE_REPLICA, "different weights", marks=GRID),
    pytest.param("holder_drifts", REPLICAS, "different weights", marks=GRID),
    pytest.param("stage_not_reduced", REPLICAS, "gradient error", marks=GRID),
    pytest.param("reduced_twice", REPLICAS, "gradient bytes reduced", marks=GRID),
]


@pytest.mark.parametrize(("name", "layouts", "said"), FOUND)
def test_mutant_is_found(request: pytest.FixtureRequest, name: str, layouts: Sequence[Row], said: str) -> None:
    workers: Pool = request.getfixturevalue("world" if layouts is REPLICAS else "pair")
    document = workers.run(workers.size, _verify, name, Options(layouts, tied=True))[0]
    assert not document["passed"]
    problems = [problem for report in document["layouts"] for problem in report["problems"]]
    assert any(said in problem for problem in problems), problems


@GRID
@pytest.mark.parametrize("name", ["scaled_per_microbatch", "norm_per_stage", "tied_counted_twice"])
def test_mutant_makes_the_command_exit_1(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--procs", "2", "--stages", "2", "--tied", "--examples-per-microbatch", "3", "--timeout", "20"]
    args = build_parser(["verify"]).parse_args(["verify", *given])
    assert verify.run(args, setup=partial(break_for_good, name)) == 1
    assert "FAILED" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------ layouts


def _threads(_: Any, options: Options) -> tuple[bool, int, list[Any], bool]:
    """Whether all is well, threads that a second run leaves, and whether the world is whole again."""
    passed = verify_worker(options)["passed"]
    before = len(list(Path("/proc/self/task").iterdir()))
    document = verify_worker(options)
    left = len(list(Path("/proc/self/task").iterdir())) - before
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_rank())
    return passed and document["passed"], left, ranks, threading.active_count() < 10


@GRID
def test_worlds_are_let_go_and_the_first_comes_back(world: Pool) -> None:
    options = Options(((4, 1), (4, 2), Row(4, 1, 2, "zb-v"), Row(5, 1, 4, "gpipe"), Row(6, 1, 3, "1f1b")))
    for passed, left, ranks, few in world.run(4, _threads, options):
        assert passed
        assert left <= 0
        assert ranks == [0, 1, 2, 3]
        assert few


@GRID
def test_float32_within_its_bound(world: Pool) -> None:
    document = world.run(4, _verify, None, Options((*ONE_REPLICA, *REPLICAS), dtype=torch.float32))[0]
    assert document["passed"], document
    assert document["tolerance"] < 1e-4


@GRID
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", NAMES)
def test_all_layouts(world: Pool, schedule: str, tied: bool) -> None:
    rows = [Row(m, d, p, schedule) for p, d in ((2, 1), (2, 2), (3, 1), (4, 1)) for m in (1, 2, 3, 4, 13)]
    document = world.run(4, _verify, None, Options(rows, tied=tied), timeout=110)[0]
    assert document["passed"], [report for report in document["layouts"] if not report["ok"]]
    assert len(document["layouts"]) == len(rows)


# -------------------------------------------------------------------------------------------------- the command


@GRID
def test_the_command_writes_rows_of_stages(tmp_path: Path) -> None:
    path = tmp_path / "verify.json"
    given = ("--procs", "2", "--examples-per-microbatch", "3", "--stages", "2", "1", "--schedule", "zb-v", "1f1b")
    finished = run("verify", *given, "--json", str(path))
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "passed: 4 of 4 layouts" in finished.stdout
    assert max(map(len, finished.stdout.splitlines())) <= 80
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert [(r["layout"]["replicas"], r["layout"]["stages"], r["layout"]["schedule"]) for r in document["layouts"]] == [
        (1, 1, None), (2, 1, None), (1, 2, "zb-v"), (1, 2, "1f1b"),
    ]  # fmt: skip
    for report in document["layouts"]:
        assert report["gradient_norm"] == pytest.approx(document["reference"]["gradient_norm"], rel=1e-12)
        assert report["ids_hash"] == document["reference"]["ids_hash"]
        assert report["reduced_bytes_ratio"] == (report["layout"]["replicas"] > 1)


@GRID
def test_under_torchrun() -> None:
    finished = torchrun("verify", "--procs", "2", "--examples-per-microbatch", "3", "--stages", "1", "2", "--tied")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("passed: 3 of 3 layouts") == 1
    refused = torchrun("verify", "--procs", "3", "--stages", "3")
    assert refused.returncode != 0
    assert "isostep: --procs: got 3, expected at most 2, which the launcher has started; start more" in refused.stderr


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["--procs", "2", "--stages", "1", "3"], "--stages: got 3, expected at most --procs, 2"),
        (["--schedule", "gpipe"], "--schedule: got 'gpipe'"),
        (["--stages", "2", "--ddp"], "--ddp: got '--stages 2'"),
        (["--procs", "64", "--stages", "32", "--schedule", "zb-v"], "zb-v makes 64"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    given: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from isostep.cli import main

    assert main(["verify", *given]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"isostep: {names}") or names in errors
    assert errors.count("\n") == 1
