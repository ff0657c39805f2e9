"""Each worked example runs by itself and prints the right number beside the fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "worked"

LINES = {
    "replicas.py": [
        "fault: each replica alone reaches w = [0.9, 1.1, 1.3]",
        "right: all replicas reach w = 1.1",
    ],
    "unequal_portions.py": [
        "fault: mean of replica means, gradient -1, w = 1.1",
        "right: sums / 6 examples, gradient -2, w = 1.2",
    ],
    "vector_average.py": [
        "fault: sum of gradients, weights [4.6, 4.6]",
        "right: average of gradients, weights [4.8, 4.8]",
    ],
    "token_mean.py": [
        "fault: mean of means, loss 3, token weights 1/1024 and 1/3072",
        "right: sums / tokens, loss 3.5, token weights 1/2048 and 1/2048",
    ],
    "batch_sizes.py": [
        "fault: 4 ranks taken for replicas, 64 examples per update, gradient 0.5",
        "right: 2 replicas of 16 examples, 32 examples per update, gradient 1",
    ],
    "pipeline_forward.py": [
        "fault: 12 ticks, busy 0.333",
        "right: 6 ticks, busy 0.667",
        "  stage 0  0 1 2 3 . .",
        "  stage 2  . . 0 1 2 3",
    ],
}


def test_every_worked_example_has_its_lines_here() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.py")) == sorted(LINES)


@pytest.mark.parametrize("name", LINES)
def test_worked_example(name: str) -> None:
    result = subprocess.run(
        [sys.executable, str(FOLDER / name)], capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    printed = result.stdout.splitlines()
    assert [line for line in LINES[name] if line not in printed] == []
