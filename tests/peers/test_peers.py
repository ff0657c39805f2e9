"""Real libraries: what `isostep audit` says of a script against weights that were found without it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from cases import CASES, RECORD, Case, losses, run
from measure import extremes, load, measure

CLOSE = 0.01
OBSERVED = 0.98
SAME_LOSS = 1e-6
ONE_LAYOUT = [case for case in CASES if (case.accumulate, case.replicas) == (4, 1)]


@dataclass(frozen=True)
class Recorded:
    measured: dict[str, Any]
    losses: list[float]


@cache
def recorded(case: Case) -> Recorded:
    """The script run on its own, and its weights by plain autograd."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        folder = Path(name)
        done = run([*case.launcher, str(RECORD), name, *case.command], folder)
        assert done.returncode == 0, done.stderr[-3000:]
        model = load(case.recipe.script).build_model(*case.recipe.model)
        return Recorded(measure(folder, model), losses(done.stdout))


def allowed_verdicts(measured: dict[str, Any]) -> set[str]:
    """What the measured weights amount to. Where each update has a factor of its own it is a matter of words."""
    if measured["repeated"]:
        return {"inexact"}
    for update in measured["updates"]:
        ratios = [entry["ratio"] for entry in update["weights"]]
        if max(ratios) - min(ratios) > CLOSE * max(ratios):
            return {"inexact"}
    return {"exact"} if measured["verdict"] == "exact" else {"exact-up-to-factor", "inexact"}


each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
def test_weights_follow_the_rule_of_the_library(case: Case) -> None:
    measured = recorded(case).measured
    assert measured["world"] == case.replicas
    assert measured["updates"]
    for update in measured["updates"]:
        assert update["residual"] < 1e-4
        assert update["spread_over_ranks"] < 1e-6
        found = [entry["weight"] for entry in update["weights"]]
        assert found == pytest.approx(case.expected(update), rel=1e-4)


@pytest.mark.parametrize("case", ONE_LAYOUT, ids=lambda case: case.name)
def test_recording_leaves_the_losses_alone(case: Case) -> None:
    with TemporaryDirectory() as name:
        done = run([*case.launcher, *case.command], Path(name))
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(done.stdout) == recorded(case).losses


@each_case
def test_audit_finds_these_weights(case: Case, table: list[tuple[str, ...]], tmp_path: Path) -> None:
    known = recorded(case)
    path = tmp_path / "audit.json"
    procs = ["--procs", str(case.replicas)]
    command = [sys.executable, "-m", "isostep", "audit", "--updates", "all", "--json", str(path), *procs]
    done = run([*command, *case.command], tmp_path)
    assert path.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    document = json.loads(path.read_text())
    kinds = sorted({finding["kind"] for finding in document["findings"]})
    low, high = extremes(known.measured)
    library = case.recipe.package
    table.append(
        (
            library, version(library), case.recipe.name, str(case.accumulate), str(case.replicas),
            f"{low:.3g}" if high - low < CLOSE * high else f"{low:.3g} to {high:.3g}", document["verdict"],
            ", ".join(kinds) or "none",
        )
    )  # fmt: skip
    assert document["world"] == case.replicas
    assert (done.returncode == 0) == (document["verdict"] in ("exact", "exact-up-to-factor") and not kinds)
    assert losses(done.stdout) == pytest.approx(known.losses, rel=SAME_LOSS)
    assert ("duplicate-example" in kinds) == bool(known.measured["repeated"])
    if case.recipe.fused and not document["updates"]:
        assert document["not_observed"]
        assert not set(kinds) - {"duplicate-example"}
        return
    assert document["verdict"] in allowed_verdicts(known.measured), document["not_observed"]
    if document["verdict"] == "exact":
        assert not kinds

    theirs = {update["update"]: update for update in document["updates"]}
    seen = 0
    for update in known.measured["updates"]:
        if update["update"] not in theirs:
            continue
        seen += 1
        found = {(e["rank"], e["microbatch_index"]): e for e in theirs[update["update"]]["weights"]}
        for entry in update["weights"]:
            other = found[entry["rank"], entry["microbatch_index"]]
            assert other["tokens"] == entry["tokens"]
            assert other["weight"] == pytest.approx(entry["weight"], rel=CLOSE)
            assert other["min"] == pytest.approx(entry["weight"], rel=CLOSE)
            assert other["max"] == pytest.approx(entry["weight"], rel=CLOSE)
    assert seen >= OBSERVED * len(known.measured["updates"])
