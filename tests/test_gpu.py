"""What needs a CUDA device: the sections of benchmarks/gpu.py, on all GPUs there are. On a CPU, its dry run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


def report_of(folder: Path, *flags: str) -> dict[str, Any]:
    """The report of a run in which every check passed."""
    file = folder / "gpu.json"
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--json", str(file), *flags],
        capture_output=True, text=True, timeout=1700,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return json.loads(file.read_text())


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("section", ["parity", "precision", "memory", "overhead"])
def test_on_the_gpus(tmp_path: Path, section: str) -> None:
    report = report_of(tmp_path, "--only", section)
    assert report["passed"]
    assert report["sections"][section]["checks"]


@pytest.mark.grid
@pytest.mark.timeout(600)
def test_dry_run_on_a_cpu(tmp_path: Path) -> None:
    report = report_of(tmp_path, "--device", "cpu", "--only", "parity", "precision", "memory")
    assert all(report["sections"][name]["checks"] for name in ("parity", "precision", "memory"))
    assert "a real out-of-memory error" in report["sections"]["memory"]["left_out"]
