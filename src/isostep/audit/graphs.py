"""Reading the graph of a backward pass: what leads from its root to the loss calls, and what goes past them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TIE = "isostep"
"""Key of a node's metadata that holds the loss call made there."""

MOST_NODES = 4000
"""How much of a backward graph is searched for the scalars on the way to a loss."""


def walk(nodes: list[Any]) -> tuple[bool, bool]:
    """Give every loss call below `nodes` the scalars on its way.

    Returns whether another way leads to parameters, and whether it passes through what is below a loss call too.
    """
    found: list[Any] = []
    scalars: dict[Any, tuple[float, ...]] = {}

    def visit(node: Any, output: int, above: Any) -> list[tuple[Any, int]]:
        on_the_way = scalars.get(above, ())
        scalar = _scalar_of(node)
        scalars[node] = on_the_way if scalar is None else (*on_the_way, scalar)
        call = node.metadata.get(TIE)
        if call is not None:
            call.scalars = on_the_way
            found.append(node)
            return []
        return _below(node, output)

    beside = _reached([(node, 0) for node in nodes], visit)
    if not any(type(node).__name__ == "AccumulateGrad" for node in beside):
        return False, False
    below = _reached([edge for node in found for edge in _below(node, 0)], lambda node, output, _: _below(node, output))
    shared = {node for node in beside & below if type(node).__name__ != "AccumulateGrad"}
    return True, bool(shared)


def _below(node: Any, output: int) -> list[tuple[Any, int]]:
    """Edges to the nodes below one of a node's outputs. DistributedDataParallel sends all outputs through one node."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    if type(node).__name__ == "_DDPSinkBackward" and output < len(edges):
        return [edges[output]]
    return edges


def _reached(edges: list[tuple[Any, int]], visit: Callable[[Any, int, Any], list[tuple[Any, int]]]) -> set[Any]:
    """All nodes that are reached from `edges`, at most MOST_NODES; `visit` gives the edges to go on with."""
    waiting = [(node, output, None) for node, output in edges]
    seen: set[tuple[Any, int]] = set()
    while waiting and len(seen) < MOST_NODES:
        node, output, above = waiting.pop()
        if (node, output) not in seen:
            seen.add((node, output))
            waiting.extend((following, number, node) for following, number in visit(node, output, above))
    return {node for node, _ in seen}


def _scalar_of(node: Any) -> float | None:
    """The number that a node of a graph multiplies by, if it multiplies by one. Nothing is unpacked."""
    kind = type(node).__name__
    names = {"MulBackward0": ("_raw_saved_other", "_raw_saved_self"), "DivBackward0": ("_raw_saved_other",)}
    for name in names.get(kind, ()):
        try:
            other = getattr(node, name).data
        except (AttributeError, RuntimeError):
            continue
        if isinstance(other, Tensor) and other.dim() == 0 and is_readable(other):
            value = float(other)
            return value if kind == "MulBackward0" else (1 / value if value else None)
    return None


def is_readable(tensor: Tensor) -> bool:
    """A plain dense tensor whose numbers can be read."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return plain and tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
