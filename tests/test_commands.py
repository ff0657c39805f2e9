"""The commands as a user runs them: exit codes, one line for bad input, clean ends, nothing left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from isostep.ledger import RunEnded, UpdateDone, read

SMALL = ("--context-length", "90", "--examples-per-update", "8", "--evaluate-every", "5")


def _command(*args: str) -> list[str]:
    return [sys.executable, "-m", "isostep", *args]


def _run(*args: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(_command(*args), capture_output=True, text=True, timeout=100, env=env, cwd=folder)


def _alive(marker: str) -> list[int]:
    """Processes whose environment holds a marker: the command and all that it started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes() and (folder / "stat").read_text().split()[2] != "Z":
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _assert_nothing_alive(marker: str, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while _alive(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _alive(marker)


# ---------------------------------------------------------------------------------------------------- verify


def test_verify_passes_and_writes_its_document(tmp_path: Path) -> None:
    path = tmp_path / "verify.json"
    finished = _run("verify", "--procs", "2", "--examples-per-microbatch", "1", "4", "--json", str(path))
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    assert "passed: 4 of 4 layouts" in finished.stdout
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert document["passed"] is True
    assert document["tolerance"] == 1e-12
    assert [entry["layout"] for entry in document["layouts"]] == [
        {"examples_per_microbatch": 1, "accumulate": 13, "replicas": 1},
        {"examples_per_microbatch": 4, "accumulate": 4, "replicas": 1},
        {"examples_per_microbatch": 1, "accumulate": 7, "replicas": 2},
        {"examples_per_microbatch": 4, "accumulate": 2, "replicas": 2},
    ]
    for entry in document["layouts"]:
        assert entry["ok"] is True
        assert entry["gradient_error"]["max"] <= 1e-12
        assert entry["ids_hash"] == document["reference"]["ids_hash"]
        assert entry["num_examples"] == 13
        assert entry["num_supervised_tokens"] == document["reference"]["num_supervised_tokens"]
        assert entry["reduced_bytes_ratio"] == (entry["layout"]["replicas"] > 1)
        assert (entry["attempted"], entry["applied"]) == (1, 1)
    assert document["control"]["factor"] == document["control"]["gradient_error"]["max"] / 1e-12


def test_verify_json_alone_on_stdout() -> None:
    finished = _run("verify", "--procs", "1", "--examples-per-microbatch", "5", "--json", "-")
    assert json.loads(finished.stdout)["passed"] is True


def test_verify_under_torchrun() -> None:
    """The same command joins workers that a launcher has started."""
    finished = _torchrun("verify", "--procs", "2", "--examples-per-microbatch", "3")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("passed: 2 of 2 layouts") == 1


def _torchrun(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "-m", "isostep", *args]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)


# ----------------------------------------------------------------------------------------------------- train


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A complete run of two workers, and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    finished = _run("train", "--procs", "2", "--run-dir", str(folder), *SMALL)
    assert finished.returncode == 0, finished.stderr
    return folder, finished.stdout


def test_train_learns_and_proves_coverage(small_run: tuple[Path, str]) -> None:
    folder, text = small_run
    losses = [
        float(line.split()[2]) for line in text.splitlines() if line.startswith("validation loss ") and "->" not in line
    ]
    assert losses[-1] < losses[0] - 1
    assert "each exactly once" in text
    assert "updates per" in text or "updates" in text
    assert (folder / "weights.pt").exists()
    assert isinstance(read(folder / "ledger.jsonl")[-1], RunEnded)


def test_train_again_says_complete_and_changes_nothing(small_run: tuple[Path, str]) -> None:
    folder, _ = small_run
    before = (folder / "ledger.jsonl").read_bytes()
    finished = _run("train", "--procs", "2", "--run-dir", str(folder), *SMALL)
    assert finished.returncode == 0
    assert "is complete; nothing to do" in finished.stderr
    assert (folder / "ledger.jsonl").read_bytes() == before


def test_another_layout_trains_on_the_same_examples(small_run: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = small_run
    other = ("--examples-per-microbatch", "3", "--overlap")
    assert _run("train", "--procs", "1", "--run-dir", str(tmp_path / "one"), *SMALL, *other).returncode == 0
    one, two = (
        [e for e in read(path / "ledger.jsonl") if isinstance(e, UpdateDone)] for path in (folder, tmp_path / "one")
    )
    assert [e.ids_hash for e in one] == [e.ids_hash for e in two]
    assert [e.denominators for e in one] == [e.denominators for e in two]
    assert one[0].loss == pytest.approx(two[0].loss, rel=1e-5)
    assert one[0].counters.microbatches != two[0].counters.microbatches


def test_train_under_torchrun_gives_the_same_run(small_run: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = small_run
    finished = _torchrun("train", "--run-dir", str(tmp_path / "two"), "--json", "-", *SMALL)
    assert finished.returncode == 0, finished.stderr
    document = json.loads(finished.stdout)
    assert document["schema"] == 1
    assert document["coverage"]["proved"] is True
    assert document["updates"]["attempted"] == document["updates"]["applied"] > 5
    ours, theirs = (
        [e.loss for e in read(path / "ledger.jsonl") if isinstance(e, UpdateDone)]
        for path in (folder, tmp_path / "two")
    )
    assert ours == theirs


def _start(folder: Path, marker: str) -> subprocess.Popen[str]:
    command = _command("train", "--procs", "2", "--epochs", "50", "--run-dir", str(folder), *SMALL)
    env = {**os.environ, "ISOSTEP_TEST_MARKER": marker}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    )
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if (folder / "ledger.jsonl").exists() and any(isinstance(e, UpdateDone) for e in read(folder / "ledger.jsonl")):
            return process
        time.sleep(0.1)
    process.kill()
    raise AssertionError("no update in 90 s")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("everybody", [True, False])
def test_interrupt_ends_the_run_between_updates(tmp_path: Path, everybody: bool) -> None:
    """Ctrl-C reaches every process of a terminal; a scheduler's signal may reach the first one alone."""
    marker = f"interrupt-{everybody}-{tmp_path.name}"
    process = _start(tmp_path, marker)
    if everybody:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip().splitlines() == ["isostep: interrupted; nothing is left running"]
    _assert_nothing_alive(marker)
    assert read(tmp_path / "ledger.jsonl")[-1].reason == "stopped"  # type: ignore[union-attr]


@pytest.mark.parametrize("seconds", [2.0, 3.0])
def test_interrupt_while_workers_start_is_one_line(tmp_path: Path, seconds: float) -> None:
    """Whatever is being imported, and wherever, when the user changes their mind."""
    marker = f"start-{tmp_path.name}"
    env = {**os.environ, "ISOSTEP_TEST_MARKER": marker}
    process = subprocess.Popen(
        _command("verify", "--procs", "2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        start_new_session=True,
    )  # fmt: skip
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip().splitlines() == ["isostep: interrupted; nothing is left running"]
    _assert_nothing_alive(marker)


@pytest.mark.timeout(240)
def test_killed_worker_is_one_line(tmp_path: Path) -> None:
    marker = f"killed-{tmp_path.name}"
    process = _start(tmp_path, marker)
    workers = [pid for pid in _alive(marker) if pid != process.pid]
    workers = [pid for pid in workers if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(max(workers), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert len(errors.strip().splitlines()) == 1, errors
    assert "expected" in errors
    _assert_nothing_alive(marker)
    assert any(isinstance(e, UpdateDone) for e in read(tmp_path / "ledger.jsonl"))


# ------------------------------------------------------------------------------------------------- bad input


def _bad(*args: str, names: str) -> Any:
    return pytest.param(args, names, id=" ".join(args)[:60])


@pytest.mark.parametrize(
    ("args", "names"),
    [
        _bad("nothing", names="nothing"),
        _bad("verify", "--procs", "0", names="'0'"),
        _bad("verify", "--procs", "two", names="'two'"),
        _bad("verify", "--procs", "9" * 5000, names="999"),
        _bad("verify", "--dtype", "float16", names="float16"),
        _bad("verify", "--timeout", "-1", names="-1"),
        _bad("verify", "--examples-per-microbatch", "2", "0", names="'0'"),
        _bad(
            "verify", "--procs", "1", "--examples-per-microbatch", "13", "--json", "/no/such/folder/x", names="/no/such"
        ),
        _bad("verify", "--examples", "1", names="'1'"),
        _bad("verify", "--examples", "100000000", names="100000000"),
        _bad("verify", "--seed", "99999999999999999999", names="99999999999999999999"),
        _bad("train", "--epochs", "0", names="'0'"),
        _bad("train", "--context-length", "3", names="3"),
        _bad("train", "--learning-rate", "nan", names="nan"),
        _bad("train", "--learning-rate", "-1", names="-1"),
        _bad("train", "--run-dir", "/proc/nothing", names="/proc/nothing"),
        _bad("train", "--examples-per-update", "1000000", "--last-group", "drop", names="1000000"),
        _bad("train", "--unknown", names="--unknown"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(args: Sequence[str], names: str, tmp_path: Path) -> None:
    finished = _run(*args, folder=tmp_path)
    assert finished.returncode == 2, finished.stderr
    assert len(finished.stderr.strip().splitlines()) == 1, finished.stderr
    assert names in finished.stderr
    assert len(finished.stderr) < 500


def test_complete_run_with_other_settings_is_not_taken_for_this_one(small_run: tuple[Path, str]) -> None:
    finished = _run("train", "--procs", "1", "--run-dir", str(small_run[0]), *SMALL, "--learning-rate", "0.001")
    assert finished.returncode == 2
    assert "other settings" in finished.stderr


def test_unfinished_run_is_not_overwritten(tmp_path: Path, small_run: tuple[Path, str]) -> None:
    lines = (small_run[0] / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "ledger.jsonl").write_bytes(b"".join(lines[:4]))
    finished = _run("train", "--run-dir", str(tmp_path), *SMALL)
    assert finished.returncode == 2
    assert "unfinished run" in finished.stderr
    assert (tmp_path / "ledger.jsonl").read_bytes() == b"".join(lines[:4])


@pytest.mark.parametrize("command", ["train", "verify", "explain", "inspect"])
def test_help_has_an_example_and_needs_no_torch(command: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; from isostep.cli import main; main(['{command}', '--help'])"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert f"isostep {command}" in finished.stdout
    assert "example" in finished.stdout
