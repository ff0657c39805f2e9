"""Running the `isostep` command as a user does, and finding what it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from isostep.ledger import Event, UpdateDone, read, standing_events

SMALL = (
    "--model.context-length", "90", "--update.examples-per-update", "8", "--layout.examples-per-microbatch", "4",
    "--validation.every", "5", "--run.epochs", "1", "--model.width", "32", "--model.depth", "2",
)  # fmt: skip
"""A run of some 36 updates of a model so small that starting the workers takes longest."""


def write_data(path: Path, num_examples: int = 60) -> Path:
    """A small JSONL file with very unequal supervised counts; loads much faster than the embedded data."""
    lines = [
        {"prompt": f"{i} " * (i % 7), "completion": "abcdefghij"[: 1 + i % 10] * (1 + i % 5)}
        for i in range(num_examples)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def updates_of(folder: Path) -> list[UpdateDone]:
    """The updates that stand."""
    return [event for event in standing_events(events_of(folder)) if isinstance(event, UpdateDone)]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "weights.pt", weights_only=True)


def same_bits(a: Path, b: Path) -> bool:
    ours, theirs = weights_of(a), weights_of(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def difference(a: Path, b: Path) -> float:
    """Largest difference of two runs' weights, relative to the largest weight of each tensor."""
    ours, theirs = weights_of(a), weights_of(b)
    return max(float((ours[k] - theirs[k]).abs().max() / theirs[k].abs().max()) for k in theirs)


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "isostep", *args]


def run(
    *args: str, folder: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 100
) -> subprocess.CompletedProcess[str]:
    """The finished command."""
    environment = {**os.environ, "COLUMNS": "100", **(env or {})}
    return subprocess.run(
        command(*args), capture_output=True, text=True, timeout=timeout, env=environment, cwd=folder
    )  # fmt: skip


def torchrun(*args: str) -> subprocess.CompletedProcess[str]:
    """The finished command under torchrun with two workers."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
                "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "-m", "isostep", *args]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.run(launcher, capture_output=True, text=True, timeout=100, env=env)


def start(
    marker: str, *args: str, folder: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """The command under way, in a session of its own; it and all that it starts carry the marker."""
    environment = {**os.environ, "COLUMNS": "100", "ISOSTEP_TEST_MARKER": marker, **(env or {})}
    return subprocess.Popen(
        command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder,
        start_new_session=True,
    )  # fmt: skip


def events_of(folder: Path) -> list[Event]:
    path = folder / "ledger.jsonl"
    return read(path) if path.exists() else []


def wait_for_updates(process: subprocess.Popen[str], folder: Path, more_than: int = 0, seconds: float = 90) -> None:
    """Return when the ledger holds more updates than these."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if sum(isinstance(event, UpdateDone) for event in events_of(folder)) > more_than:
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no update in {seconds} s: {process.communicate()}")


def alive(marker: str) -> list[int]:
    """Processes whose environment holds a marker: the command and all that it started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes() and (folder / "stat").read_text().split()[2] != "Z":
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def workers(marker: str) -> list[int]:
    """Those of them that are training."""
    return [pid for pid in alive(marker) if b"spawn_main" in _read(Path(f"/proc/{pid}/cmdline"))]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def assert_nothing_alive(marker: str, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while alive(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(marker)
