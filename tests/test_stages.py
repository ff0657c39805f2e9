"""One update through stages on several ranks: the gradients of the torch-only reference, the bits of one process."""

from __future__ import annotations

import copy
import math
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from isostep import InputError, Term, Updater, causal_lm, groups, mse
from isostep.distributed.pipeline import Runtime
from isostep.distributed.stages import StagedComm, StagedModel
from isostep.models.decoder import Decoder, DecoderConfig
from isostep.schedule.generate import NAMES
from isostep.verification.problem import CLIP_NORM, COEFFICIENT, LONGEST, VOCAB_SIZE, build_examples, objective
from isostep.verification.reference import gradient_error, mean_of_means, reference_update
from pool import Pool


def build(depth: int, tied: bool, dtype: torch.dtype = torch.float64) -> Decoder:
    return Decoder(DecoderConfig(VOCAB_SIZE, LONGEST, 16, depth, 2, tie_embeddings=tied), seed=7).to(dtype)


class Kept(torch.optim.SGD):
    """Keeps the gradients that it is given."""

    def step(self, closure: Any = None) -> None:
        self.given = {id(p): p.grad.clone() for group in self.param_groups for p in group["params"]}


def let_go(staged: StagedModel) -> None:
    """Ends the process groups of a model in a worker that lives on: each has threads of its own."""
    del staged._stages, staged._runtimes
    for group in (staged.row, staged.column, *{group for _, group in staged.tied}):
        dist.destroy_process_group(group)


def names_of(model: Decoder) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


def mutate(staged: StagedModel, updater: Updater, mutant: str, patch: pytest.MonkeyPatch) -> None:
    """Makes a mistake that pipelines are known for."""
    if mutant == "scaled by microbatches":  # torch's default
        original = Runtime.__init__

        def scaling(self: Any, *args: Any, **options: Any) -> None:
            original(self, *args, **options)
            self.scale_grads = True

        patch.setattr(Runtime, "__init__", scaling)
    elif mutant == "norm per stage":
        patch.setattr(StagedComm, "everywhere", lambda self, squares: [square or 0.0 for square in squares])
    elif mutant == "tied not summed":
        patch.setattr(staged, "tied", [])
    elif mutant == "tied counted twice":

        def both(self: Any, squares: Any) -> list[float]:
            return self._row_sum([square or 0.0 for square in squares])

        patch.setattr(StagedComm, "everywhere", both)
    else:
        assert not mutant


def staged_update(
    _: Any,
    stages: int,
    schedule: str,
    m: int,
    num_examples: int,
    tied: bool,
    depth: int,
    mutant: str = "",
    clip_norm: float = CLIP_NORM,
) -> dict[str, Any]:
    """One update: the gradients that this rank's optimizer gets, by name, and what the update says."""
    model = build(depth, tied)
    names = names_of(model)
    staged = StagedModel(model.as_layers(), stages=stages, schedule=schedule)
    optimizer = Kept(staged.parameters())
    updater = Updater(staged, optimizer, objective(), clip_norm=clip_norm)
    plan = groups(build_examples(num_examples, 0), examples_per_update=num_examples, examples_per_microbatch=m)
    with pytest.MonkeyPatch.context() as patch:
        mutate(staged, updater, mutant, patch)
        result = updater.update(next(iter(plan)))
    gradients = {names[key]: gradient for key, gradient in optimizer.given.items()}
    let_go(staged)
    return {
        "status": result.status, "loss": result.loss, "norm": result.grad_norm, "gradients": gradients,
        "counts": result.counts, "coverage": result.coverage,
    }  # fmt: skip


CASES = [
    ("gpipe", 2, 1, 3, False), ("1f1b", 2, 1, 2, True), ("1f1b", 4, 1, 2, False), ("zb-h1", 2, 2, 3, False),
    ("interleaved-1f1b", 2, 1, 3, True), ("looped-bfs", 2, 2, 2, False), ("interleaved-zb", 2, 1, 3, False),
    ("zb-v", 2, 1, 2, True), ("zb-v", 2, 2, 2, False), ("dualpipe-v", 2, 1, 2, True), ("1f1b", 2, 2, 4, True),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "stages", "replicas", "m", "tied"), CASES)
def test_gradients_are_those_of_the_reference(
    pool: Pool, pair: Pool, schedule: str, stages: int, replicas: int, m: int, tied: bool
) -> None:
    num_examples, depth = 12, 4
    reference = reference_update(build(depth, tied), build_examples(num_examples, 0), COEFFICIENT, CLIP_NORM)
    results = {2: pair, 4: pool}[stages * replicas].run(
        stages * replicas, staged_update, stages, schedule, m, num_examples, tied, depth
    )
    gradients: dict[str, torch.Tensor] = {}
    for result in results:
        assert result["status"] == "applied"
        assert result["loss"] == pytest.approx(reference.loss, rel=1e-12)
        assert result["counts"].examples == num_examples
        assert result["norm"] == results[0]["norm"]
        for name, gradient in result["gradients"].items():
            assert torch.equal(gradients.setdefault(name, gradient), gradient), "holders went different ways"
    error, where = gradient_error(gradients, reference.gradients)
    assert error <= 1e-12, where
    control = mean_of_means(build(depth, tied), build_examples(num_examples, 0), COEFFICIENT, CLIP_NORM)
    assert gradient_error(control, reference.gradients)[0] > 1e-3


@pytest.mark.grid
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("m", [1, 2, 5, 12])
@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("schedule", NAMES)
def test_every_schedule(pool: Pool, pair: Pool, schedule: str, stages: int, replicas: int, m: int, tied: bool) -> None:
    depth = 6  # layers for two chunks on each of four ranks
    reference = reference_update(build(depth, tied), build_examples(12, 0), COEFFICIENT, CLIP_NORM)
    results = {2: pair, 4: pool}[stages * replicas].run(
        stages * replicas, staged_update, stages, schedule, m, 12, tied, depth
    )
    for result in results:
        expected = {name: reference.gradients[name] for name in result["gradients"]}
        error, where = gradient_error(result["gradients"], expected)
        assert error <= 1e-12, where


MUTANTS = ("scaled by microbatches", "norm per stage", "tied not summed", "tied counted twice")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(pair: Pool, mutant: str) -> None:
    clip_norm = 1e9 if mutant.startswith("scaled") else CLIP_NORM  # clipping hides a common factor
    reference = reference_update(build(4, tied=True), build_examples(12, 0), COEFFICIENT, clip_norm)
    results = pair.run(2, staged_update, 2, "1f1b", 3, 12, True, 4, mutant, clip_norm)
    errors = [gradient_error(r["gradients"], {n: reference.gradients[n] for n in r["gradients"]})[0] for r in results]
    assert max(errors) > 1e-3


def one_process(alone: Any, m: int, num_examples: int, depth: int) -> tuple[dict[str, torch.Tensor], float | None]:
    """The same update in one process: gradients by name, and the norm."""
    model = build(depth, tied=False)
    names = names_of(model)
    optimizer = Kept(model.parameters())
    updater = Updater(model, optimizer, objective(), clip_norm=CLIP_NORM, process_group=alone)
    plan = groups(build_examples(num_examples, 0), examples_per_update=num_examples, examples_per_microbatch=m)
    result = updater.update(next(iter(plan)))
    return {names[key]: gradient for key, gradient in optimizer.given.items()}, result.grad_norm


IN_ORDER = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "interleaved-zb", "zb-v", "dualpipe-v")


@pytest.mark.parametrize("schedule", IN_ORDER)
def test_bits_are_those_of_one_process(pair: Pool, schedule: str) -> None:
    expected, norm = pair.run(1, one_process, 2, 10, 4)[0]
    results = pair.run(2, staged_update, 2, schedule, 2, 10, False, 4)
    gradients = {name: g for result in results for name, g in result["gradients"].items()}
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert {result["norm"] for result in results} == {norm}


def test_control_another_composition_has_other_bits(pair: Pool) -> None:
    first, second = (pair.run(1, one_process, m, 10, 4)[0][0] for m in (2, 3))
    assert any(not torch.equal(first[name], second[name]) for name in first)


# ------------------------------------------------------------------------------------- training, validation, failures


def trained(process_group: Any, stages: int, schedule: str, tied: bool, updates: int = 4) -> dict[str, Any]:
    """Weights by name after some updates with a schedule and validation in between; stages = 0: one process."""
    model = build(3, tied)
    names = names_of(model)
    module: Any = StagedModel(model.as_layers(), stages=stages, schedule=schedule) if stages else model
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=updates)
    group = None if stages else process_group
    updater = Updater(module, optimizer, objective(), clip_norm=CLIP_NORM, scheduler=scheduler, process_group=group)
    losses: list[Any] = []
    plan = groups(build_examples(13, 0), examples_per_update=5, examples_per_microbatch=2, epochs=9)
    for done, work in enumerate(plan, start=1):
        losses.append(updater.update(work).loss)
        losses.append(updater.evaluate(build_examples(7, 1), examples_per_microbatch=2).loss)
        if done == updates:
            break
    if stages:
        let_go(module)
    return {"weights": {names[id(p)]: p.detach() for p in module.parameters()}, "losses": losses}


@pytest.mark.parametrize(
    ("schedule", "stages", "replicas", "tied"),
    [("1f1b", 2, 1, False), ("zb-v", 2, 1, True), ("interleaved-1f1b", 2, 2, False), ("gpipe", 4, 1, True)],
)
def test_training_and_validation_are_those_of_one_process(
    pool: Pool, pair: Pool, schedule: str, stages: int, replicas: int, tied: bool
) -> None:
    expected = pair.run(1, trained, 0, "", tied)[0]
    for result in {2: pair, 4: pool}[stages * replicas].run(stages * replicas, trained, stages, schedule, tied):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        for name, weight in result["weights"].items():
            assert torch.allclose(weight, expected["weights"][name], rtol=1e-10, atol=1e-12), name


def empty_then_full(_: Any) -> list[str]:
    """Statuses of a group without any target, and of one whose microbatches are fewer than the stages."""
    model = build(2, tied=False)
    staged = StagedModel(model.as_layers(), stages=2, schedule="1f1b")
    updater = Updater(staged, torch.optim.SGD(staged.parameters(), lr=0.1), causal_lm)
    ids = torch.arange(6)[None]
    nothing = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    statuses = [updater.update([nothing, nothing]).status, updater.update([{"input_ids": ids, "labels": ids}]).status]
    let_go(staged)
    return statuses


def test_an_empty_group_and_fewer_microbatches_than_stages(pair: Pool) -> None:
    assert pair.run(2, empty_then_full) == [["empty", "applied"]] * 2


def evaluated_instead(_: Any) -> list[float | None]:
    """Losses of the trained weights, of others in their place, and of the trained ones again."""
    staged = StagedModel(build(2, tied=False).as_layers(), stages=2)
    updater = Updater(staged, torch.optim.SGD(staged.parameters(), lr=0.1), causal_lm)
    other = copy.deepcopy(staged.layers)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    examples = build_examples(6, 0)
    losses = [updater.evaluate(examples, model=model).loss for model in (None, other, None)]
    with pytest.raises(InputError, match="in their shapes"):
        updater.evaluate(examples, model=torch.nn.Linear(2, 2))
    let_go(staged)
    return losses


def test_other_weights_are_evaluated_in_place_of_the_trained_ones(pair: Pool) -> None:
    trained_loss, other_loss, again = pair.run(2, evaluated_instead)[1]
    assert trained_loss == again != other_loss


class Roomy(torch.nn.Module):
    """A layer that has room for so many examples in all forwards whose backward is to come."""

    def __init__(self, room: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16, dtype=torch.float64)
        self.room, self.held = room, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.linear(hidden)
        if self.held + len(hidden) > self.room:
            self.held = 0
            raise torch.OutOfMemoryError("simulated")
        self.held += len(hidden)
        outputs = self.linear(hidden)
        outputs.register_hook(lambda _: self._free(len(hidden)))
        return outputs

    def _free(self, examples: int) -> None:
        self.held -= examples


def largest(_: Any, schedule: str, room: tuple[float, float]) -> int:
    """The largest microbatch for stages with such layers, of a group of 12; the group runs in it."""
    layers = build(2, tied=False).as_layers()
    layers = [layers[0], layers[1], Roomy(room[0]), layers[2], Roomy(room[1]), layers[3]]
    staged = StagedModel(layers, stages=2, schedule=schedule, costs=[1] * 6)
    updater = Updater(staged, torch.optim.SGD(staged.parameters(), lr=0.1), causal_lm)
    examples = build_examples(12, 0)
    size = updater.largest_microbatch(examples, at_most=12)
    plan = groups(examples, examples_per_update=12, examples_per_microbatch=size)
    assert updater.update(next(iter(plan))).status == "applied"
    let_go(staged)
    return size


@pytest.mark.parametrize(
    ("schedule", "room", "expected"),
    [
        ("1f1b", (10, math.inf), 5),  # stage 0 holds two
        ("1f1b", (math.inf, 5), 5),  # stage 1 holds one
        ("gpipe", (12, math.inf), 12),  # it holds all of them, however many
        ("1f1b", (math.inf, math.inf), 12),
    ],
)
def test_largest_microbatch_of_stages(pair: Pool, schedule: str, room: tuple[float, float], expected: int) -> None:
    assert pair.run(2, largest, schedule, room) == [expected] * 2


class Turned(torch.nn.Linear):
    """What leaves it is not contiguous."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input).transpose(0, 1).contiguous().transpose(0, 1)


class Viewed(torch.nn.Linear):
    """What leaves it is a view of a tensor, as what leaves a linear layer with a bias is."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input)[..., :]


class WritesOver(torch.nn.Linear):
    """It writes over what it is given."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input.relu_())


class Shifted(torch.nn.Module):
    """The gradient of its input is that of its output: of a sum, one number that is expanded."""

    def __init__(self, *_: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.shift


def odd_layers(_: Any, schedule: str, kind: type[torch.nn.Module]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of this rank's layers through stages, each with that of one process."""
    torch.manual_seed(0)
    layers = [kind(3, 3, dtype=torch.float64) for _ in range(4)]
    batches = [torch.randn(n, 2, 3, dtype=torch.float64) for n in (2, 4)]
    whole = copy.deepcopy(layers)
    for batch in batches:
        torch.nn.Sequential(*whole)(batch.clone()).sum().backward()
    staged = StagedModel(layers, stages=2, schedule=schedule, costs=[1] * 4)
    optimizer = Kept(staged.parameters())
    updater = Updater(staged, optimizer, Term("sum", lambda outputs, _: outputs.sum(), lambda _: torch.tensor(0.5)))
    updater.update(batches)
    let_go(staged)
    pairs = []
    for index, layer in staged.layers.items():
        for (name, parameter), other in zip(layer.named_parameters(), whole[int(index)].parameters(), strict=True):
            assert other.grad is not None, name
            pairs.append((optimizer.given[id(parameter)], other.grad))
    return pairs


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("kind", [Turned, Viewed, WritesOver, Shifted])
def test_what_layers_may_hand_on(pair: Pool, schedule: str, kind: type[torch.nn.Module]) -> None:
    for gradients in pair.run(2, odd_layers, schedule, kind):
        assert len(gradients) >= 2
        assert all(torch.equal(gradient, expected) for gradient, expected in gradients)


class Dropped(torch.nn.Linear):
    """Remembers its mask."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        mask = torch.nn.functional.dropout(torch.ones_like(input))
        if torch.is_grad_enabled():
            self.mask = mask
        return super().forward(input * mask)


def small_update(
    group: Any,
    stages: int,
    schedule: str,
    kind: type[torch.nn.Module],
    dtype: torch.dtype,
    costs: list[float],
    **options: Any,
) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Loss and norm; gradients by layer and name; masks by layer. stages 0: in one piece."""
    torch.manual_seed(0)
    layers = [kind(8, 8, dtype=dtype) for _ in range(4)]
    model = (
        StagedModel(layers, stages=stages, schedule=schedule, costs=costs) if stages else torch.nn.Sequential(*layers)
    )
    optimizer = Kept(model.parameters())
    term = Term("sum", lambda outputs, _: outputs.float().square().sum(), lambda batch: torch.tensor(len(batch)))
    if not stages:
        options |= {"process_group": group, "forward": lambda model, batch: model(batch)}
    updater = Updater(model, optimizer, term, clip_norm=0.1, **options)
    result = updater.update([torch.randn(n, 8).to(dtype) for n in (2, 3, 1, 2)])
    held = (
        dict(enumerate(layers)) if not isinstance(model, StagedModel) else {int(k): v for k, v in model.layers.items()}
    )
    if isinstance(model, StagedModel):
        let_go(model)
    gradients = {f"{k}.{n}": optimizer.given[id(p)] for k, layer in held.items() for n, p in layer.named_parameters()}
    masks = {str(k): layer.mask for k, layer in held.items() if isinstance(layer, Dropped)}
    return (result.loss, result.grad_norm), gradients, masks


EVEN, ODD = [1.0] * 4, [9.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "schedule",
    [pytest.param("1f1b", marks=pytest.mark.grid), "zb-h1", pytest.param("dualpipe-v", marks=pytest.mark.grid)],
)
@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.bfloat16, {}), (torch.float16, {}), (torch.float32, {"precision": "bfloat16"})]
)
def test_low_precision_is_that_of_one_process(
    pair: Pool, schedule: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Parameters of low precision are summed beside the model, also where only a backward for weights reaches them."""
    whole = pair.run(1, partial(small_update, **options), 0, "", torch.nn.Linear, dtype, EVEN)[0]
    for costs in (EVEN, ODD) if schedule == "1f1b" else (EVEN,):
        parts = pair.run(2, partial(small_update, **options), 2, schedule, torch.nn.Linear, dtype, costs)
        assert parts[0][0] == parts[1][0] == whole[0]
        gradients = parts[0][1] | parts[1][1]
        assert gradients.keys() == whole[1].keys()
        assert all(torch.equal(gradients[name], whole[1][name]) for name in gradients)


def test_draws_are_those_of_a_layer_whatever_the_cut(pair: Pool) -> None:
    masks = []
    for schedule, costs in (("1f1b", EVEN), ("1f1b", ODD), ("zb-v", EVEN)):
        parts = pair.run(2, small_update, 2, schedule, Dropped, torch.float32, costs)
        masks.append(parts[0][2] | parts[1][2])
    for layer in "0123":
        assert torch.equal(masks[0][layer], masks[1][layer])
        assert torch.equal(masks[0][layer], masks[2][layer])
    assert not any(torch.equal(masks[0][a], masks[0][b]) for a, b in ("01", "02", "13", "23"))


def refused_layers(_: Any, layers: list[torch.nn.Module]) -> str:
    """The error of an update over such layers, one for each cost."""
    try:
        staged = StagedModel(layers, stages=2, costs=[1] * len(layers))
        Updater(staged, torch.optim.SGD(staged.parameters()), mse).update([(torch.ones(2, 2), torch.ones(2))])
    except InputError as error:
        return str(error)
    return "none"


class Chosen(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input).argmax(-1)


def test_layers_that_cannot_be_cut_are_refused_on_every_rank(pair: Pool) -> None:
    linear, lookup, relu = torch.nn.Linear(2, 2), torch.nn.Embedding(2, 1), torch.nn.ReLU()
    said = "layer 0, the last of a chunk: got torch.int64, expected floating point"
    assert all(error.startswith(said) for error in pair.run(2, refused_layers, [Chosen(2, 2), lookup]))
    said = "stage rank 1: got 'layers 1 to 1 without a parameter', expected one or more on every rank"
    assert all(error.startswith(said) for error in pair.run(2, refused_layers, [linear, relu]))


class Failing(torch.nn.Module):
    """A layer that fails in its third forward: by an error, by death, or by never coming back."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16, dtype=torch.float64)
        self.how, self.calls = how, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += torch.is_grad_enabled()
        if self.calls == 3 and self.how == "error":
            raise ValueError("this layer has had enough")
        if self.calls == 3:
            os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[self.how])
        return hidden + self.linear(hidden)


def fail_in_a_stage(rank: int, store: str, place: int, how: str) -> None:
    """A process of two: an update in the middle of which a layer of one stage fails. Says what it raises, and ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=8))
    layers = build(2, tied=False).as_layers()
    layers.insert(place, Failing(how))
    staged = StagedModel(layers, stages=2, schedule="1f1b", costs=[1.0] * len(layers))
    before = [p.detach().clone() for p in staged.parameters()]
    updater = Updater(staged, torch.optim.SGD(staged.parameters(), lr=0.1), objective())
    plan = groups(build_examples(12, 0), examples_per_update=12, examples_per_microbatch=2)
    try:
        updater.update(next(iter(plan)))
    except Exception as error:
        assert all(torch.equal(a, b) for a, b in zip(before, staged.parameters(), strict=True))
        print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(0)  # as a process that its error ends, without the wait for gloo


GRID = pytest.mark.grid


@pytest.mark.parametrize(
    ("place", "how"),
    [
        (3, "error"),
        (1, "killed"),
        pytest.param(1, "error", marks=GRID),
        pytest.param(3, "killed", marks=GRID),
        pytest.param(3, "stopped", marks=GRID),
    ],
)
def test_a_stage_that_fails_ends_the_update_of_the_others_with_one_line(place: int, how: str, tmp_path: Path) -> None:
    failing = 0 if place == 1 else 1
    code = (
        "import sys, test_stages as t; t.fail_in_a_stage(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    started = time.monotonic()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(tmp_path / "store"), str(place), how],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        out, err = workers[1 - failing].communicate(timeout=60)
    finally:
        for worker in workers:
            worker.kill()
    said = workers[failing].communicate()[0]
    assert said == {"error": "ValueError: this layer has had enough\n"}.get(how, "")
    assert out.startswith("PeerLostError: stages: lost stage rank"), (out, err)
    assert (out.count("\n"), err) == (1, "")
    assert how != "error" or "this layer has had enough" in out
    assert time.monotonic() - started < 50
