"""`isostep verify` finds every fault that is put into the engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from isostep.cli import build_parser
from isostep.commands import verify
from isostep.verification.grid import Options, verify_worker
from mutants import MUTANTS, apply_for_good
from pool import Pool

LAYOUTS = ((2, 1), (2, 2), (3, 2), (1, 3))


def _verify(_: Any, name: str | None, overlap: bool = False) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            MUTANTS[name](patch)
        return verify_worker(Options(layouts=LAYOUTS, overlap=overlap))


@pytest.mark.parametrize("overlap", [False, True])
def test_engine_without_fault_passes(pool: Pool, overlap: bool) -> None:
    document = pool.run(pool.size, _verify, None, overlap)[0]
    assert document["passed"], document
    assert document["control"]["factor"] > 1e6


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_found(pool: Pool, name: str) -> None:
    document = pool.run(pool.size, _verify, name)[0]
    assert not document["passed"]
    assert any(report["problems"] for report in document["layouts"])


@pytest.mark.grid
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_makes_the_command_exit_1(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = build_parser(["verify"]).parse_args(["verify", "--procs", "2", "--timeout", "20"])
    assert verify.run(args, setup=partial(apply_for_good, name)) == 1
    assert "FAILED" in capsys.readouterr().out


def test_float32_within_its_bound(pool: Pool) -> None:
    document = pool.run(pool.size, _float32)[0]
    assert document["passed"], document
    assert document["tolerance"] < 1e-4


def _float32(_: Any) -> dict[str, Any]:
    return verify_worker(Options(layouts=LAYOUTS, dtype=torch.float32))
