"""The file of layers; what their cut comes to under 1f1b; how it is drawn."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from isostep.errors import InputError
from isostep.schedule.costs import Costs
from isostep.schedule.generate import generate
from isostep.schedule.layers import Layer, LayerCut, ModelLayers, TimedCut, cut_layers, read_layers, run_layers
from isostep.schedule.layers_text import draw_layers
from isostep.schedule.simulate import simulate

FILE = str(Path(__file__).parent.parent / "examples" / "layers.json")

# ---- layers and what their cut comes to


def model(*costs: float, **sizes: float) -> ModelLayers:
    layers = [Layer(f"layer {i}", cost, cost / 2, cost / 4, **sizes) for i, cost in enumerate(costs)]
    return ModelLayers("made up", tuple(layers))


def test_equal_counts_are_not_equal_stages_in_the_example() -> None:
    cut = run_layers(FILE, 4, 16)
    assert [stage.num_layers for stage in cut.equal_counts.stages] == [4, 4, 3, 3]
    assert [stage.num_layers for stage in cut.by_cost.stages] == [5, 4, 4, 1]
    assert (cut.by_cost.stages[0].first, cut.by_cost.stages[3].last) == ("token embedding", "norm + logits")
    assert cut.by_cost.slowest == cut.equal_counts.slowest == 3
    assert cut.equal_counts.makespan > 1.3 * cut.by_cost.makespan
    assert cut.equal_counts.busy_share < 0.6 < 0.7 < cut.by_cost.busy_share


def test_example_file_holds_what_its_source_says() -> None:
    width, tokens, context, vocabulary = 768, 4 * 1024, 1024, 50257
    layers = read_layers(FILE).layers
    assert [layer.name for layer in layers] == [
        "token embedding", *(f"decoder layer {index}" for index in range(12)), "norm + logits",
    ]  # fmt: skip
    embedding, decoder, logits = layers[0], layers[1], layers[-1]
    assert {layer.cost for layer in layers[1:-1]} == {decoder.cost}
    weights = 4 * width * width + 2 * width * 3072
    products, scores = 2 * weights * tokens / 1e9, 2 * context * width * tokens / 1e9
    assert decoder.forward == pytest.approx(products + scores)
    assert (decoder.input_grad, decoder.weight_grad) == pytest.approx((products + 2 * scores, products))
    assert (decoder.state_bytes, decoder.activation_bytes) == (16 * weights, 34 * tokens * width)
    assert embedding.forward == pytest.approx(4 * width * tokens / 1e9)
    assert logits.forward == pytest.approx(2 * vocabulary * width * tokens / 1e9)
    assert (embedding.state_bytes, logits.state_bytes) == (16 * vocabulary * width, 16 * (vocabulary + 1) * width)


def keeps_cadence(cut: TimedCut, num_microbatches: int, cadence: float) -> bool:
    """The makespan is one cadence per microbatch, and at most one passage of a microbatch to fill and to drain."""
    passage = sum(stage.cost for stage in cut.stages)
    return 0 <= cut.makespan - num_microbatches * cadence + 1e-9 <= passage + 2e-9


@given(st.lists(st.floats(0, 2), min_size=4, max_size=8).filter(any), st.integers(1, 4))
def test_slowest_stage_sets_the_cadence(costs: list[float], stages: int) -> None:
    cut = cut_layers(model(*costs), stages, 200)
    for timed in (cut.by_cost, cut.equal_counts):
        assert timed.cadence == max(stage.cost for stage in timed.stages)
        assert timed.stages[timed.slowest].share == 1
        assert keeps_cadence(timed, 200, timed.cadence)
    assert cut.by_cost.cadence <= cut.equal_counts.cadence


def test_control_the_mean_stage_does_not_set_it() -> None:
    cut = cut_layers(model(1, 1, 4), 3, 200).by_cost
    mean = sum(stage.cost for stage in cut.stages) / 3
    assert keeps_cadence(cut, 200, cut.cadence)
    assert not keeps_cadence(cut, 200, mean)
    assert not keeps_cadence(cut, 200, cut.cadence * 1.01)


@pytest.mark.parametrize("unit", [1.0, 1e15, 1e-12, 1e90])
def test_any_unit_of_cost_gives_the_same_cut(unit: float) -> None:
    costs = [3.0, 1.0, 4.0, 1.0, 5.0]
    cut = cut_layers(model(*(cost * unit for cost in costs)), 3, 8).by_cost
    schedule = generate("1f1b", 3, 8)
    stages = [sum(costs[start:end]) for start, end in pairwise(cut.boundaries)]
    sim = simulate(schedule, Costs.of(schedule, stages, [s / 2 for s in stages], [s / 4 for s in stages]))
    assert cut.makespan / unit == pytest.approx(sim.makespan, rel=1e-12)
    assert cut.busy_share == pytest.approx(sim.busy_share, rel=1e-12)


def test_memory_is_that_of_the_microbatches_that_1f1b_holds() -> None:
    layers = model(1, 1, 1, state_bytes=100.0, activation_bytes=10.0)
    assert [stage.memory for stage in cut_layers(layers, 3, 8).by_cost.stages] == [130, 120, 110]
    assert [stage.memory for stage in cut_layers(layers, 3, 2).by_cost.stages] == [120, 120, 110]
    assert cut_layers(layers, 3, 8, memory_limit=130).by_cost.fits
    with pytest.raises(InputError, match=r"expected 130 or more.*layers\[0\] alone needs 130 on stage 0"):
        cut_layers(layers, 3, 8, memory_limit=129)


def test_a_limit_moves_layers_to_later_stages_and_equal_counts_may_break_it() -> None:
    layers = model(1, 1, 1, 1, 1, 1, state_bytes=0.0, activation_bytes=10.0)
    free, tight = cut_layers(layers, 2, 8), cut_layers(layers, 2, 8, memory_limit=40)
    assert free.by_cost.boundaries == free.equal_counts.boundaries == tight.equal_counts.boundaries == (0, 3, 6)
    assert tight.by_cost.boundaries == (0, 2, 6)
    assert (tight.by_cost.fits, tight.equal_counts.fits, free.equal_counts.fits) == (True, False, True)


@pytest.mark.parametrize(
    ("cut", "named"),
    [
        (lambda: cut_layers(model(1, 2), 3, 8), "stages: got 3, expected at most 2"),
        (lambda: cut_layers(model(0, 0), 2, 8), "layers: got 'costs of 0 alone'"),
        (lambda: cut_layers(model(1, 2), 2, 8, 1e9), "memory limit: got .* expected a file whose layers give"),
        (lambda: cut_layers(model(1, 2), 0, 8), "stages"),
        (lambda: cut_layers(model(1, 2), 2, 0), "microbatches"),
    ],
)
def test_what_the_layers_cannot_give_is_refused(cut: Callable[[], object], named: str) -> None:
    with pytest.raises(InputError, match=named):
        cut()


# ---- the file


def file_of(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "costs.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def document(*layers: Any, **keys: Any) -> str:
    return json.dumps({"schema": 1, "source": "made up", "layers": layers, **keys})


GOOD = {"name": "a", "forward": 1}


def test_gradients_that_are_left_out_cost_as_much_as_forward(tmp_path: Path) -> None:
    path = file_of(tmp_path, document({**GOOD, "forward": 3}, {**GOOD, "input_grad": 0, "weight_grad": 2.5}))
    assert read_layers(path) == ModelLayers("made up", (Layer("a", 3, 3, 3), Layer("a", 1, 0, 2.5)))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "JSON"),
        ("{", "JSON"),
        (b"\xff\xfe", "UTF-8"),
        ("[" * 100_000, "JSON"),
        ("1" * 5_000, "JSON"),
        ("[]", "file: got 'a list of 0'"),
        ("{}", "schema: got 'nothing'"),
        (document(GOOD, schema=2), "schema: got 2"),
        (document(GOOD, schema=True), "schema: got True"),
        (document(GOOD, source=""), "source: got ''"),
        (document(GOOD, source=5), "source: got 5"),
        (document(GOOD, more=1), "key of file: got 'more'"),
        (document(), "layers: got '0 layers'"),
        (document(layers={}), "layers: got 'an object of 0'"),
        (document(*[GOOD] * 10_001), "layers: got '10001 layers'"),
        (document(GOOD, 7), r"layers\[1\]: got 7"),
        (document(GOOD, {"name": "b"}), r"layers\[1\].forward: got 'nothing'"),
        (document({"forward": 1}), r"layers\[0\].name: got 'nothing'"),
        (document({**GOOD, "name": ""}), r"layers\[0\].name: got ''"),
        (document({**GOOD, "name": "\x1b[31m"}), r"layers\[0\].name"),
        (document({**GOOD, "name": "a" * 101}), r"layers\[0\].name"),
        (document({**GOOD, "flops": 1}), r"key of layers\[0\]: got 'flops'"),
        (document(GOOD, GOOD, GOOD, {**GOOD, "forward": -1}), r"layers\[3\].forward: got -1"),
        (document({**GOOD, "forward": "1"}), r"layers\[0\].forward: got '1'"),
        (document({**GOOD, "forward": True}), r"layers\[0\].forward: got True"),
        (document({**GOOD, "forward": None}), r"layers\[0\].forward: got None"),
        (document({**GOOD, "forward": [1]}), r"layers\[0\].forward: got 'a list of 1'"),
        (document({**GOOD, "forward": math.nan}), r"layers\[0\].forward: got nan"),
        (document({**GOOD, "weight_grad": math.inf}), r"layers\[0\].weight_grad: got inf"),
        (document({**GOOD, "input_grad": 10**300}), r"layers\[0\].input_grad"),
        (document({**GOOD, "state_bytes": 1}), r"layers\[0\].activation_bytes: got 'nothing'"),
        (document({**GOOD, "state_bytes": -1, "activation_bytes": 1}), r"layers\[0\].state_bytes: got -1"),
        (document({**GOOD, "state_bytes": 1, "activation_bytes": 1}, GOOD), r"layers\[1\]: got 'no bytes'"),
        ('{"schema": 1, "schema": 1}', "key: got 'schema', expected every key once"),
        (document(GOOD) + " " * 10_000_000, "at most 10000000 bytes"),
    ],
)
def test_every_fault_of_the_file_is_one_line_with_its_place(text: str | bytes, named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=named) as raised:
        read_layers(file_of(tmp_path, text))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("path", ["", "/nowhere/costs.json", "/dev", "/dev/zero", "a\0b", "x" * 5_000])
def test_a_file_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(InputError, match="layers file: got"):
        read_layers(path)


# ---- what is shown


def drawn(cut: LayerCut, encoding: str = "utf-8") -> str:
    console = Console(width=80, highlight=False, markup=False, legacy_windows=False)
    options = console.options.update()
    options.encoding = encoding
    return "".join(segment.text for segment in console.render(draw_layers(cut), options))


WIDE = Layer("層" * 90, 1, 1, 1)


def many_stages() -> LayerCut:
    return cut_layers(model(*range(1, 1500), state_bytes=1e12, activation_bytes=1e9), 1200, 16, 1e14)


@pytest.mark.parametrize(
    ("cut", "shown"),
    [
        (lambda: run_layers(FILE, 4, 16), ["token embedding .. decoder layer 3", "948.569", "1.33 times", "29.0 %"]),
        (lambda: run_layers(FILE, 4, 16, 2.2e9), ["memory limit of a stage: 2.2 GB", "2.31 GB!", "yes", "no"]),
        (lambda: run_layers(FILE, 14, 1), ["1 microbatch", "decoder layer 11"]),
        (many_stages, ["stages not drawn", "stage 1199"]),
        (lambda: cut_layers(ModelLayers("x", (WIDE, Layer("é" * 90, 1e99, 0, 0))), 1, 1), ["stage 0"]),
        (lambda: cut_layers(model(1e-9, 1e9, 1e99), 2, 4), ["stage 1"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_drawing_fits_80_columns(cut: Callable[[], LayerCut], shown: list[str], encoding: str) -> None:
    text = drawn(cut(), encoding)
    assert [part for part in shown if part not in text] == []
    assert [line for line in text.splitlines() if cell_len(line) > 80] == []
    assert "The slowest stage sets the cadence" in text


def test_bars_are_as_long_as_the_cost() -> None:
    lines = [line for line in drawn(cut_layers(model(1, 1, 2, 4), 2, 4)).splitlines() if line.startswith("stage")]
    assert [line.count("█") for line in lines] == [8, 8, 4, 12]


def test_document_is_json_with_both_cuts() -> None:
    cut = run_layers(FILE, 4, 16, 2.2e9)
    document = json.loads(json.dumps(cut.document()))
    assert (document["schema"], document["layers"], document["stages"], document["num_microbatches"]) == (1, 14, 4, 16)
    assert document["memory_limit"] == 2.2e9
    assert document["by_cost"]["boundaries"] == list(cut.by_cost.boundaries)
    assert document["equal_counts"]["stages"][3]["last"] == "norm + logits"
    assert not document["equal_counts"]["fits"]


def test_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import isostep.schedule.layers_text, isostep.schedule.partition"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
