"""A start of a run that must fail: what is wrong with it, and what came of it."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fcntl import LOCK_EX, flock
from pathlib import Path

from command import alive, events_of, run, start, wait_for_updates, workers, write_data
from isostep.ledger.sheet import sheet

GOOD = """
[run]
dir = "run"
[data]
source = "data.jsonl"
validation_percent = 20
[model]
context_length = 90
width = 16
depth = 1
heads = 2
[update]
examples_per_update = 8
[layout]
examples_per_microbatch = 4
[schedule]
warmup = 2
[checkpoint]
every = 4
keep = 3
[validation]
every = 5
"""
"""A run of 12 updates."""

SOLO = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
"""Lets the command train in its own process: starts in half the time."""

LAUNCHER = "--procs 2 --run.epochs 40 --checkpoint.every 20 --validation.every 0"
"""Two workers that train for some seconds."""

Attack = Callable[[subprocess.Popen[str], Path, str], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A start that must fail, in a folder with good.toml and data.jsonl.

    args: behind `isostep train good.toml`, of which `config` takes the place. named: what the error must contain.
    files: written before; None is a folder. resumes: there is a run already, killed behind its second checkpoint.
    damage: done to the folder before. held: a context around the start, which gives more of the environment.
    attack: done to the command under way, its run and its marker. mend: after it a good command must do.
    """

    id: str
    args: str = ""
    named: str
    code: int = 2
    config: str = "good.toml"
    files: Mapping[str, str | bytes | None] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    needs_torch: bool = True
    launcher: bool = False
    resumes: bool = False
    damage: Callable[[Path], None] | None = None
    held: Callable[[Path], AbstractContextManager[Mapping[str, str]]] | None = None
    attack: Attack | None = None
    mend: Callable[[Path], None] | None = None

    def environment(self, folder: Path) -> dict[str, str]:
        if not self.needs_torch:
            write(folder, {"stub/torch.py": "raise RuntimeError('torch was imported')"})
        surroundings = {} if self.launcher else SOLO
        return {"PYTHONPATH": str(folder / "stub"), "PYTHONDONTWRITEBYTECODE": "1", **surroundings, **self.env}


@dataclass(frozen=True)
class Outcome:
    """What came of a case. proved: coverage, where there is a ledger. again: the good command after it."""

    code: int
    stdout: str
    stderr: str
    left: Sequence[int]
    before: Mapping[str, bytes]
    after: Mapping[str, bytes]
    proved: bool
    again: subprocess.CompletedProcess[str] | None


def outcome_of(case: Case, folder: Path, base: Path) -> Outcome:
    """Prepare a case, start it, look at what it left, and start a good one after it."""
    write(folder, {"good.toml": GOOD})
    write_data(folder / "data.jsonl")
    if case.resumes:
        shutil.copytree(base / "run", folder / "run")
    write(folder, case.files)
    if case.damage:
        case.damage(folder)
    before = contents(folder / "run")
    marker = f"<bad input: {case.id}>"
    with case.held(folder) if case.held else nullcontext({}) as more:
        process = start(
            marker, "train", case.config, *shlex.split(case.args), folder=folder,
            env={**case.environment(folder), **more},
        )  # fmt: skip
        try:
            if case.attack:
                case.attack(process, folder / "run", marker)
            stdout, stderr = process.communicate(timeout=100)
        finally:
            left = left_after(5, marker)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    after = contents(folder / "run")
    proved = not after.get("ledger.jsonl") or case.code == 2 or sheet(events_of(folder / "run"))["coverage"]["proved"]
    again = None
    if case.mend:
        case.mend(folder)
        again = good_run(folder, *shlex.split(LAUNCHER.removeprefix("--procs 2") if case.launcher else ""))
    return Outcome(process.returncode, stdout, stderr, left, before, after, proved, again)


def good_run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return run("train", "good.toml", *more, folder=folder, env=SOLO)


def killed_run(folder: Path) -> Path:
    """A run as a kill leaves it that comes when its second checkpoint has been announced."""
    write(folder, {"good.toml": GOOD})
    write_data(folder / "data.jsonl")
    finished = good_run(folder)
    assert finished.returncode == 0, finished.stderr
    lines = (folder / "run/ledger.jsonl").read_bytes().splitlines(keepends=True)
    second = [i for i, line in enumerate(lines) if b'"checkpoint_announced"' in line][1]
    (folder / "run/ledger.jsonl").write_bytes(b"".join(lines[: second + 1]))
    for late in sorted((folder / "run/checkpoints").glob("update-*"))[2:]:
        shutil.rmtree(late)
    for name in ("weights.pt", "sheet.json", "sheet.txt"):
        (folder / "run" / name).unlink()
    return folder


def write(folder: Path, files: Mapping[str, str | bytes | None]) -> None:
    """Write files by name; None makes a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by name; but not its lock, and not a ledger that holds nothing."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: data for name, data in files.items() if name != "lock" and (data or name != "ledger.jsonl")}


def left_after(seconds: float, marker: str) -> list[int]:
    """Processes with the marker that are alive after so many seconds; returns at once when there is none."""
    deadline = time.monotonic() + seconds
    while (left := alive(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


# ------------------------------------------------------------------------------------------- damage and its repair


def nothing(folder: Path) -> None:
    """For runs that need no mending."""


def flipped(name: str) -> Callable[[Path], None]:
    """Flip one bit in the middle of a file."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(bytes(content))

    return damage


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def removed(name: str) -> Callable[[Path], None]:
    """Remove a file or a folder."""

    def remove(folder: Path) -> None:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()

    return remove


def replaced(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    """Replace bytes that a file holds."""

    def replace(folder: Path) -> None:
        content = (folder / name).read_bytes()
        assert old in content
        (folder / name).write_bytes(content.replace(old, new, 1))

    return replace


# -------------------------------------------------------------------------------- what others hold, and what they do


@contextmanager
def locked(folder: Path) -> Iterator[Mapping[str, str]]:
    """Another process trains in the run directory."""
    (folder / "run").mkdir(exist_ok=True)
    with open(folder / "run/lock", "w") as lock:
        flock(lock, LOCK_EX)
        yield {}


@contextmanager
def port_taken(folder: Path) -> Iterator[Mapping[str, str]]:
    """Somebody listens at the port where the workers meet, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {"MASTER_PORT": str(server.getsockname()[1])}


@contextmanager
def port_free(folder: Path) -> Iterator[Mapping[str, str]]:
    """Nobody listens there."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield {"MASTER_PORT": str(unused.getsockname()[1])}


def room_for(num_bytes: int) -> Attack:
    """No file can hold more than these: as on a full disk."""
    return lambda process, run_dir, marker: resource.prlimit(
        process.pid, resource.RLIMIT_FSIZE, (num_bytes, num_bytes)
    )  # fmt: skip


def signalled(number: int, which: Callable[[list[int]], int]) -> Attack:
    """Send a signal to one of the workers when they are training."""

    def attack(process: subprocess.Popen[str], run_dir: Path, marker: str) -> None:
        wait_for_updates(process, run_dir, more_than=22)
        os.kill(which(workers(marker)), number)

    return attack


def killed_while_starting(process: subprocess.Popen[str], run_dir: Path, marker: str) -> None:
    """Kill one worker when there are two, which takes long before they train."""
    while process.poll() is None and len(workers(marker)) < 2:
        time.sleep(0.05)
    os.kill(max(workers(marker)), signal.SIGKILL)
