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

from command import assert_nothing_alive, run, start, torchrun

# ---------------------------------------------------------------------------------------------------- verify


def test_verify_passes_and_writes_its_document(tmp_path: Path) -> None:
    path = tmp_path / "verify.json"
    finished = run("verify", "--procs", "2", "--examples-per-microbatch", "1", "4", "--json", str(path))
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    assert "passed: 4 of 4 layouts" in finished.stdout
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert document["passed"] is True
    assert document["tolerance"] == 1e-12
    whole = {"stages": 1, "schedule": None}
    assert [entry["layout"] for entry in document["layouts"]] == [
        {"examples_per_microbatch": 1, "accumulate": 13, "replicas": 1, **whole},
        {"examples_per_microbatch": 4, "accumulate": 4, "replicas": 1, **whole},
        {"examples_per_microbatch": 1, "accumulate": 7, "replicas": 2, **whole},
        {"examples_per_microbatch": 4, "accumulate": 2, "replicas": 2, **whole},
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


@pytest.mark.grid
def test_verify_json_alone_on_stdout() -> None:
    finished = run("verify", "--procs", "1", "--examples-per-microbatch", "5", "--json", "-")
    assert json.loads(finished.stdout)["passed"] is True


@pytest.mark.grid
def test_verify_undertorchrun() -> None:
    """The same command joins workers that a launcher has started."""
    finished = torchrun("verify", "--procs", "2", "--examples-per-microbatch", "3")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("passed: 2 of 2 layouts") == 1


@pytest.mark.parametrize("seconds", [2.0, pytest.param(3.0, marks=pytest.mark.grid)])
def test_interrupt_while_workers_start_is_one_line(tmp_path: Path, seconds: float) -> None:
    """Whatever is being imported, and wherever, when the user changes their mind."""
    marker = f"start-{tmp_path.name}"
    process = start(marker, "verify", "--procs", "2")
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip().splitlines() == ["isostep: interrupted; nothing is left running"]
    assert_nothing_alive(marker)


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
    ],
)
def test_bad_input_is_one_line_and_exit_2(args: Sequence[str], names: str, tmp_path: Path) -> None:
    finished = run(*args, folder=tmp_path)
    assert finished.returncode == 2, finished.stderr
    assert len(finished.stderr.strip().splitlines()) == 1, finished.stderr
    assert names in finished.stderr
    assert len(finished.stderr) < 500


@pytest.mark.parametrize("command", ["train", "verify", "explain", "inspect", "report", "runs"])
def test_help_has_an_example_and_needs_no_torch(command: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; from isostep.cli import main; main(['{command}', '--help'])"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert f"isostep {command}" in finished.stdout
    assert "example" in finished.stdout
