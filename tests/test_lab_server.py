"""`isostep lab` as a process: its line, its ends, what it listens to, what it says where it cannot start."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command import assert_nothing_alive, run
from lab_server import running


def http(port: int, request: bytes) -> bytes:
    """The whole answer to raw bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(request)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def get(port: int, host: str = "127.0.0.1", path: str = "/") -> bytes:
    return http(port, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())


def test_server_says_where_it_listens_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    with running(marker=tmp_path.name) as lab:
        assert get(lab.port).startswith(b"HTTP/1.1 200")
        assert get(lab.port, "evil.example").startswith(b"HTTP/1.1 400")
        assert get(lab.port, path="/pipeline?stages=2").startswith(b"HTTP/1.1 200")
        assert http(lab.port, b"\x00\xff nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
        assert http(lab.port, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 400")
        code, errors = lab.end()
    assert code == 130
    assert errors == "isostep: interrupted; nothing is left running\n"
    assert_nothing_alive(tmp_path.name)


def test_server_ends_with_connections_open(tmp_path: Path) -> None:
    """One that is idle, one that has sent half a request."""
    with running(marker=tmp_path.name) as lab:
        with (
            socket.create_connection(("127.0.0.1", lab.port)) as idle,
            socket.create_connection(("127.0.0.1", lab.port)) as half,
        ):
            idle.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert idle.recv(12) == b"HTTP/1.1 200"
            half.sendall(b"GET / HTTP/1.1\r\nHo")
            begin = time.monotonic()
            code, errors = lab.end(signal.SIGTERM)
        assert time.monotonic() - begin < 4
    assert (code, errors) == (0, "")
    assert_nothing_alive(tmp_path.name)


def test_only_this_machine_is_listened_to() -> None:
    with running() as lab:
        table = Path("/proc/net/tcp").read_text()
        addresses = [line.split()[1] for line in table.splitlines() if line.split()[1].endswith(f":{lab.port:04X}")]
        assert set(addresses) == {f"0100007F:{lab.port:04X}"}
        six = Path("/proc/net/tcp6")
        assert not six.exists() or f":{lab.port:04X} 0000" not in six.read_text()


def test_a_taken_port_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finished = run("lab", "--port", str(port), timeout=20)
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr == (
        f"isostep: --port: got {port}, expected a port that is free; choose another, or 0 for any free one\n"
    )


@pytest.mark.parametrize("port", ["65536", "-1", "x", "1e3", "9" * 100])
def test_a_bad_port_is_one_line(port: str) -> None:
    finished = run("lab", f"--port={port}", timeout=20)
    assert finished.returncode == 2
    assert len(finished.stderr.splitlines()) == 1
    assert port[:60] in finished.stderr


def without(modules: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command where some modules cannot be imported."""
    code = f"import sys\nfor name in {modules.split()!r}: sys.modules[name] = None\n"
    code += f"from isostep.cli import main; sys.exit(main({list(arguments)!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("module", ["starlette", "uvicorn", "jinja2"])
def test_without_the_extra_it_says_what_to_install(module: str) -> None:
    finished = without(module, "lab", "--port", "0")
    assert finished.returncode == 2
    assert finished.stderr.splitlines() == [finished.stderr.strip()]
    assert 'pip install "PATH_OF_THIS_CLONE[lab]"' in finished.stderr
    assert module in finished.stderr


def test_help_has_an_example_and_needs_no_library() -> None:
    finished = without("torch starlette uvicorn jinja2", "lab", "--help")
    assert finished.returncode == 0
    assert "isostep lab --port 0" in finished.stdout


def test_starts_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import isostep.lab.server"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
