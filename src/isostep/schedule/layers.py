"""The layers of a model from a file of costs, cut into stages by cost and, beside it, by counting layers.

The file is JSON, its layers in model order:
{"schema": 1, "source": "where the numbers come from", "layers": [{"name": "embedding", "forward": 1.5,
"input_grad": 1.5, "weight_grad": 1.5, "state_bytes": 4e9, "activation_bytes": 1e9}, ...]}
Costs are of one microbatch, in any one unit of time or work; a gradient that is left out costs as much as forward, and
so may `source` be left out.
`state_bytes` (weights, gradients, optimizer) and `activation_bytes` (of one microbatch) are in all layers or in none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import InputError
from .costs import Costs
from .generate import generate
from .ir import Schedule
from .partition import MOST, Cut, Memory, cut_equal_counts, partition
from .simulate import held_at_most, simulate

MOST_BYTES = 10_000_000
"""Of the file."""
MOST_LAYERS = 10_000
LONGEST_NAME, LONGEST_SOURCE = 100, 2_000
COSTS = ("forward", "input_grad", "weight_grad")
SIZES = ("state_bytes", "activation_bytes")


@dataclass(frozen=True)
class Layer:
    """One layer: its costs for one microbatch, in the unit of the file, and its bytes."""

    name: str
    forward: float
    input_grad: float
    weight_grad: float
    state_bytes: float | None = None
    """Weights, gradients and optimizer state; None where the file gives no bytes, as below."""
    activation_bytes: float | None = None
    """Of one microbatch, from its forward to its backward."""

    @property
    def cost(self) -> float:
        """Forward and both gradients."""
        return math.fsum((self.forward, self.input_grad, self.weight_grad))


@dataclass(frozen=True)
class ModelLayers:
    """The layers of a model in order, and where the numbers come from."""

    source: str
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class LayerStage:
    """Consecutive layers on one device."""

    first: str
    """Name of its first layer."""
    last: str
    num_layers: int
    forward: float
    """For one microbatch, as the two below."""
    input_grad: float
    weight_grad: float
    cost: float
    """Their sum."""
    share: float
    """Cost / cost of the slowest stage of this cut."""
    memory: float | None
    """Bytes: state, and activations of as many microbatches as 1f1b holds on this stage."""


@dataclass(frozen=True)
class TimedCut:
    """One way to cut the layers, and how it runs under 1f1b without transfers."""

    boundaries: tuple[int, ...]
    """Stage s has layers boundaries[s] to boundaries[s + 1] - 1."""
    stages: tuple[LayerStage, ...]
    makespan: float
    busy_share: float
    """Work of all stages / (P * makespan)."""
    cadence: float
    """Once the pipeline is full, one microbatch leaves it every so often: the cost of the slowest stage."""
    fits: bool
    """Every stage is within the memory limit, or there is none."""

    @property
    def slowest(self) -> int:
        """Index of the slowest stage, the first of equals."""
        return max(range(len(self.stages)), key=lambda index: (self.stages[index].cost, -index))


@dataclass(frozen=True)
class LayerCut:
    """The layers cut by cost, and the same layers in equal counts."""

    model: ModelLayers
    num_microbatches: int
    memory_limit: float | None
    by_cost: TimedCut
    equal_counts: TimedCut

    def document(self) -> dict[str, Any]:
        """The numbers as JSON can hold them."""
        return {
            "schema": 1,
            "source": self.model.source,
            "layers": len(self.model.layers),
            "stages": len(self.by_cost.stages),
            "num_microbatches": self.num_microbatches,
            "memory_limit": self.memory_limit,
            "by_cost": asdict(self.by_cost),
            "equal_counts": asdict(self.equal_counts),
        }


def run_layers(path: str, stages: int, num_microbatches: int, memory_limit: float | None = None) -> LayerCut:
    """Reads a file of layers and cuts them. Raises InputError; see `read_layers` and `cut_layers`."""
    return cut_layers(read_layers(path), stages, num_microbatches, memory_limit)


def cut_layers(model: ModelLayers, stages: int, num_microbatches: int, memory_limit: float | None = None) -> LayerCut:
    """Cuts the layers into `stages` so that the slowest stage is as fast as it can be. memory_limit: bytes of a stage.

    Raises InputError for more stages than layers, costs of 0 alone, a limit that no cut keeps, and a limit where no
    bytes are given.
    """
    if stages > len(model.layers):
        expected = f"at most {len(model.layers)}, the layers of the file: every stage needs one"
        raise InputError.of("stages", stages, expected, "take fewer stages or cut the layers finer")
    schedule = generate("1f1b", stages, num_microbatches)
    costs = [layer.cost for layer in model.layers]
    if not any(costs):
        raise InputError.of("layers", "costs of 0 alone", "at least one cost above 0", "give the costs of the layers")
    state = [layer.state_bytes for layer in model.layers if layer.state_bytes is not None]
    activation = [layer.activation_bytes for layer in model.layers if layer.activation_bytes is not None]
    memory = None
    if state:
        in_flight = [held_at_most(schedule, rank) for rank in range(stages)]
        memory = Memory(state, activation, in_flight, memory_limit)
    elif memory_limit is not None:
        expected = "a file whose layers give state_bytes and activation_bytes"
        raise InputError.of("memory limit", memory_limit, expected, "add them to every layer or leave out the limit")

    def timed(cut: Cut) -> TimedCut:
        return _timed(model.layers, cut, schedule, memory_limit)

    return LayerCut(
        model=model,
        num_microbatches=num_microbatches,
        memory_limit=memory_limit,
        by_cost=timed(partition(costs, stages, memory)),
        equal_counts=timed(cut_equal_counts(costs, stages, memory)),
    )


def _timed(layers: Sequence[Layer], cut: Cut, schedule: Schedule, memory_limit: float | None) -> TimedCut:
    """Sums per stage, and a simulation of them in a unit of about the slowest stage: a power of two, so exactly."""
    parts = [layers[start:end] for start, end in pairwise(cut.boundaries)]
    sums = {name: [math.fsum(getattr(layer, name) for layer in part) for part in parts] for name in COSTS}
    _, exponent = math.frexp(cut.bottleneck)
    scaled = [[math.ldexp(value, -exponent) for value in sums[name]] for name in COSTS]
    sim = simulate(schedule, Costs.of(schedule, *scaled))
    memory = cut.memory or [None] * len(parts)
    stages = tuple(
        LayerStage(
            first=part[0].name,
            last=part[-1].name,
            num_layers=len(part),
            **{name: values[index] for name, values in sums.items()},
            cost=cut.costs[index],
            share=cut.costs[index] / cut.bottleneck,
            memory=memory[index],
        )
        for index, part in enumerate(parts)
    )
    return TimedCut(
        boundaries=cut.boundaries,
        stages=stages,
        makespan=math.ldexp(sim.makespan, exponent),
        busy_share=sim.busy_share,
        cadence=cut.bottleneck,
        fits=memory_limit is None or all(size <= memory_limit for size in cut.memory or ()),
    )


def read_layers(path: str) -> ModelLayers:
    """The layers of a JSON file, as the head of this module describes it.

    Raises InputError for a file that cannot be read, and for any fault in it, with its place: layers[3].forward.
    """
    document = _parsed(path)
    _check_keys("file", document, ("schema", "layers"), ("source",))
    if document["schema"] != 1 or isinstance(document["schema"], bool):
        raise InputError.of("schema", _got(document["schema"]), "1", "write the file as schema 1 describes it")
    items = document["layers"]
    source = _text("source", document.get("source", "not said"), LONGEST_SOURCE, "say where the numbers come from")
    if not isinstance(items, list) or not 1 <= len(items) <= MOST_LAYERS:
        got = f"{len(items)} layers" if isinstance(items, list) else _got(items)
        raise InputError.of("layers", got, f"a list of 1 to {MOST_LAYERS} layers", "change it")
    layers = tuple(_layer(f"layers[{index}]", item) for index, item in enumerate(items))
    with_bytes = [layer.state_bytes is not None for layer in layers]
    if any(with_bytes) and not all(with_bytes):
        expected = f"{SIZES[0]} and {SIZES[1]} in every layer or in none"
        raise InputError.of(f"layers[{with_bytes.index(False)}]", "no bytes", expected, "add them")
    return ModelLayers(source, layers)


def _parsed(path: str) -> dict[str, Any]:
    """The object that the file holds."""
    name, remedy = "layers file", "choose another file"
    try:
        if not Path(path).is_file():
            raise InputError.of(name, path, "a file that exists", remedy)
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character, or ours
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InputError.of(name, path, f"a file that can be read ({reason})", remedy) from None
    if len(data) > MOST_BYTES:
        raise InputError.of(name, path, f"at most {MOST_BYTES} bytes", "leave out what is not needed")
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    except InputError:
        raise
    except RecursionError:
        raise InputError.of(name, path, "JSON of three levels", remedy) from None
    except UnicodeDecodeError as error:
        raise InputError.of(name, path, f"JSON in UTF-8 (byte {error.start} is not)", remedy) from None
    except ValueError as error:
        raise InputError.of(name, path, f"JSON ({error})", "correct it") from None
    if not isinstance(document, dict):
        raise InputError.of("file", _got(document), 'an object {"schema": 1, "layers": [...]}', "write it so")
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, none of whose keys occurs twice."""
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError.of("key", _got(twice), "every key once in an object", "leave out one of them")
    return document


def _layer(place: str, item: Any) -> Layer:
    if not isinstance(item, dict):
        raise InputError.of(place, _got(item), "an object with name and forward", "write it so")
    _check_keys(place, item, ("name", "forward"), (*COSTS[1:], *SIZES))
    name = _text(f"{place}.name", item["name"], LONGEST_NAME, "name the layer")
    numbers = {key: _number(f"{place}.{key}", item[key]) for key in (*COSTS, *SIZES) if key in item}
    if (SIZES[0] in numbers) != (SIZES[1] in numbers):
        missing = SIZES[0] if SIZES[1] in numbers else SIZES[1]
        raise InputError.of(f"{place}.{missing}", "nothing", f"{SIZES[0]} and {SIZES[1]} together", f"add {missing}")
    for gradient in COSTS[1:]:
        numbers.setdefault(gradient, numbers["forward"])
    return Layer(name, **numbers)


def _check_keys(place: str, item: dict[str, Any], needed: Sequence[str], allowed: Sequence[str] = ()) -> None:
    for key in needed:
        if key not in item:
            where = key if place == "file" else f"{place}.{key}"
            value = '"schema": 1' if key == "schema" else key
            raise InputError.of(where, "nothing", f"a value: {' and '.join(needed)} are needed", f"add {value}")
    for key in item:
        if key not in needed and key not in allowed:
            known = ", ".join((*needed, *allowed))
            raise InputError.of(f"key of {place}", _got(key), f"one of {known}", "correct it or leave it out")


def _text(place: str, value: Any, longest: int, remedy: str) -> str:
    """A printable text on one line."""
    line = " ".join(value.split()) if isinstance(value, str) else ""
    if not (1 <= len(line) <= longest and line.isprintable()):
        raise InputError.of(place, _got(value), f"a text of 1 to {longest} printable characters", remedy)
    return line


def _number(place: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        raise InputError.of(place, _got(value), f"a number from 0 to {MOST:g}", "change it")
    return float(value)


def _got(value: Any) -> Any:
    """A value as an error line can quote it."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = str(value)
    return value if len(text) <= 60 else f"{text[:60]}..."
