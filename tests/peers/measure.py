"""The weights that a recorded run gave its tokens, by plain autograd in float64; uses nothing of isostep.

For each example that an update saw, the gradient of its summed loss at the parameters before the update is computed
anew, from the data set rather than from what a library made of it. The gradient that was applied is then split into
those of the microbatches by least squares.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from record import is_model

SCRIPTS = Path(__file__).parent / "scripts"
SAME = 0.01
"""Two weights are the same where they differ by less than this share."""


def load(script: str) -> Any:
    """A script as a module; its main() does not run."""
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    spec = importlib.util.spec_from_file_location(f"peer_{script}", SCRIPTS / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Examples:
    """The data set, found again by its input."""

    def __init__(self) -> None:
        toy = load("toy")
        self._padding = toy.PADDING
        self.rows = toy.examples()
        self._index = {tuple(row["input_ids"]): index for index, row in enumerate(self.rows)}
        assert len(self._index) == len(self.rows), "two examples are the same"

    def of(self, inputs: torch.Tensor) -> list[int]:
        return [self._index[tuple(token for token in row if token != self._padding)] for row in inputs.tolist()]

    def tokens(self, index: int) -> int:
        """Its supervised tokens: the first label is no target."""
        return sum(label != -100 for label in self.rows[index]["labels"][1:])

    def gradient(self, model: nn.Module, index: int) -> torch.Tensor:
        """Of the summed loss of its supervised tokens, in all parameters."""
        row = self.rows[index]
        output = model(torch.tensor([row["input_ids"]]))
        logits = getattr(output, "logits", output)[0, :-1]
        loss = F.cross_entropy(logits.double(), torch.tensor(row["labels"][1:]), ignore_index=-100, reduction="sum")
        parameters = list(model.parameters())
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return torch.cat(
            [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)]
        )


def solve(columns: Sequence[torch.Tensor], applied: torch.Tensor) -> tuple[list[float], float]:
    """Least squares, and the share of `applied` that is left."""
    matrix = torch.stack(list(columns), dim=1)
    norms = matrix.norm(dim=0).clamp(min=1e-300)
    found = torch.linalg.lstsq(matrix / norms, applied[:, None], driver="gelsd").solution[:, 0]
    left = (matrix / norms @ found - applied).norm() / applied.norm()
    return (found / norms).tolist(), float(left)


def measure(folder: Path, model: nn.Module) -> dict[str, Any]:
    """All updates of a run: for each rank and microbatch its tokens and their weight, and what is left unexplained."""
    ranks = [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank*.pt"))]
    examples = Examples()
    model = next(module for module in model.modules() if is_model(module)).double().eval()
    updates = []
    for number, of_ranks in enumerate(zip(*(rank["updates"] for rank in ranks), strict=True)):
        first = of_ranks[0]
        model.load_state_dict({**model.state_dict(), **{k: v.double() for k, v in first["parameters"].items()}})
        names = [name for name, _ in model.named_parameters()]
        applied = torch.cat([first["gradients"][name].flatten() for name in names]).double()
        spread = max(
            float((torch.cat([r["gradients"][name].flatten() for name in names]).double() - applied).norm())
            for r in of_ranks
        )
        if first["clipped"] is not None:
            limit, norm = first["clipped"]
            applied = applied / min(1.0, limit / (norm + 1e-6))
        microbatches = [
            (rank, place, examples.of(inputs))
            for rank, recorded in enumerate(of_ranks)
            for place, inputs in enumerate(recorded["inputs"])
        ]
        sums = {index: examples.gradient(model, index) for index in {i for _, _, found in microbatches for i in found}}
        weights, residual = solve([sum(sums[i] for i in found) for _, _, found in microbatches], applied)  # type: ignore[misc]
        counts = [sum(examples.tokens(i) for i in found) for _, _, found in microbatches]
        updates.append(
            {
                "update": number,
                "tokens": sum(counts),
                "residual": residual,
                "spread_over_ranks": spread / float(applied.norm()),
                "clipped": first["clipped"] is not None,
                "weights": [
                    {
                        "rank": rank, "microbatch_index": place, "examples": found, "tokens": count, "weight": weight,
                        "ratio": weight * sum(counts),
                    }
                    for (rank, place, found), count, weight in zip(microbatches, counts, weights, strict=True)
                ],
            }
        )  # fmt: skip
    used = [index for update in updates for entry in update["weights"] for index in entry["examples"]]
    return {
        "world": len(ranks),
        "updates": updates,
        "unused": sum(len(rank["unused"]) for rank in ranks),
        "repeated": len(used) - len(set(used)),
        "verdict": verdict(updates),
    }


def verdict(updates: Sequence[dict[str, Any]]) -> str:
    """What these weights amount to, where every token should weigh the same in its update."""
    ratios = [[entry["ratio"] for entry in update["weights"] if entry["tokens"]] for update in updates]
    if all(abs(ratio - 1) < SAME for of_update in ratios for ratio in of_update):
        return "exact"
    every = [ratio for of_update in ratios for ratio in of_update]
    return "exact-up-to-factor" if max(every) - min(every) < SAME * max(map(abs, every)) else "inexact"


def extremes(measured: dict[str, Any]) -> tuple[float, float]:
    every = [entry["ratio"] for update in measured["updates"] for entry in update["weights"] if entry["tokens"]]
    return (min(every), max(every)) if every else (math.nan, math.nan)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs="*", help="of its build_model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    json.dump(measure(options.folder, load(options.script).build_model(*options.arguments)), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
