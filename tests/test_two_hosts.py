"""`isostep train` over two hosts: the same run as on one, and no wait for a host that a silent link has cut off.

The hosts are network namespaces that share nothing but a veth pair and the file system. What two hosts need:

- GLOO_SOCKET_IFNAME, the interface that the others reach a host at: gloo looks up the host's own name otherwise, and
  many systems give that the loopback address.
- with the c10d rendezvous, `--local-addr`, and `--rdzv-conf is_host=1` on the host of the endpoint (0 on the others)
  where its name is not what its address resolves to, as here.
- `--node-rank` and `--master-addr` (static rendezvous) rather than c10d where a link may go silent. isostep's workers
  end after `run.timeout` either way. But torchrun's agent asks the c10d rendezvous over and over, some of its questions
  without any limit (torch 2.13): on the host that does not hold it, the agent hangs until the kernel gives up, after 15
  minutes with the usual net.ipv4.tcp_retries2 of 15.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from command import SMALL, alive, assert_nothing_alive, events_of, run, wait_for_updates
from isostep.ledger import CheckpointAnnounced, Resumed, UpdateDone, standing_events

INTERFACE = "eth0"
PORT = 29511
TIMEOUT = 10
ENDING = 25
"""Seconds in which everything ends after a cut: the timeout, 3 of reports, and the agents' own shutdown."""


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True, timeout=20)


@dataclass(frozen=True)
class Hosts:
    """Two namespaces, and the mark of every process that is started in them."""

    names: tuple[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    @property
    def marker(self) -> str:
        return self.names[0]

    def torchrun(self, host: int, rendezvous: str, first: int, *args: str) -> subprocess.Popen[str]:
        """The command under torchrun on one host. first: the host of the endpoint, and of rank 0 where static."""
        if rendezvous == "static":
            places = ["--node-rank", str(host ^ first), "--master-addr", self.address(first)]
            places += ["--master-port", str(PORT)]
        else:
            places = ["--rdzv-backend", "c10d", "--rdzv-id", "run", "--rdzv-endpoint", f"{self.address(first)}:{PORT}"]
            places += ["--rdzv-conf", f"is_host={int(host == first)}", "--local-addr", self.address(host)]
        launcher = ["ip", "netns", "exec", self.names[host], sys.executable, "-m", "torch.distributed.run"]
        own = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "ISOSTEP_TEST_MARKER": self.marker}
        process = subprocess.Popen(
            [*launcher, "--nnodes", "2", "--nproc-per-node", "1", *places, "-m", "isostep", *args],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **own},
        )  # fmt: skip
        self.started.append(process)
        return process

    def workers(self) -> list[int]:
        """Processes of either host that train, and not the agents that have started them."""
        found = []
        for pid in alive(self.marker):
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"\0isostep\0train\0" in line and b"torch.distributed.run" not in line:
                    found.append(pid)
        return found

    def silence(self) -> None:
        """Let every packet of either host be sent, and be thrown away by the other one."""
        for host in (0, 1):
            ip("-n", self.names[host], "neigh", "replace", self.address(1 - host), "lladdr", "02:00:00:00:00:99",
               "dev", INTERFACE, "nud", "permanent")  # fmt: skip

    def unplug(self, host: int) -> None:
        ip("-n", self.names[host], "link", "set", INTERFACE, "down")

    def give_up_early(self) -> None:
        """Let the kernel of both hosts end a connection some 13 seconds after nobody acknowledges."""
        for name in self.names:
            subprocess.run(
                ["ip", "netns", "exec", name, "sh", "-c", "echo 5 > /proc/sys/net/ipv4/tcp_retries2"], check=True
            )


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    reason = "needs root and ip netns: two hosts are made of network namespaces"
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip(reason)
    unique = f"isostep-{uuid.uuid4().hex[:8]}"
    pair = Hosts((f"{unique}-a", f"{unique}-b"))
    try:
        try:
            for name in pair.names:
                ip("netns", "add", name)
            first, second = pair.names
            ip("link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{reason} ({error.stderr.strip()})")
        for host, name in enumerate(pair.names):
            ip("-n", name, "addr", "add", f"{pair.address(host)}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                ip("-n", name, "link", "set", device, "up")
        yield pair
    finally:
        for pid in alive(pair.marker):
            os.kill(pid, 9)
        for process in pair.started:
            process.communicate(timeout=20)
        for name in pair.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def updates_of(folder: Path) -> list[UpdateDone]:
    return [event for event in standing_events(events_of(folder)) if isinstance(event, UpdateDone)]


def assert_same_run(one: Path, other: Path) -> None:
    """Examples, denominators, losses and weights, all to the bit."""
    ours, theirs = updates_of(one), updates_of(other)
    assert [e.ids_hash for e in ours] == [e.ids_hash for e in theirs]
    assert [e.denominators for e in ours] == [e.denominators for e in theirs]
    assert [e.loss for e in ours] == [e.loss for e in theirs]
    a, b = (torch.load(folder / "weights.pt", weights_only=True) for folder in (one, other))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def own_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("isostep: ")]


@pytest.mark.grid
def test_two_hosts_give_the_run_of_one(hosts: Hosts, tmp_path: Path) -> None:
    arguments = (*SMALL, "--run.updates", "6", "--validation.every", "0")
    started = [
        hosts.torchrun(host, "c10d", 0, "train", "--run-dir", str(tmp_path / "two"), *arguments) for host in (0, 1)
    ]
    for process in started:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    finished = run("train", "--procs", "2", "--run-dir", str(tmp_path / "one"), *arguments)
    assert finished.returncode == 0, finished.stderr
    assert len(updates_of(tmp_path / "two")) == 6
    assert_same_run(tmp_path / "two", tmp_path / "one")


LONG = (*SMALL, "--run.epochs", "8", "--checkpoint.every", "4")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers on one host that nothing happens to."""
    folder = tmp_path_factory.mktemp("unbroken")
    finished = run("train", "--procs", "2", "--run-dir", str(folder), *LONG)
    assert finished.returncode == 0, finished.stderr
    return folder


CUTS = [
    pytest.param("static", 0, "silent", False, id="static-silent"),
    pytest.param("static", 1, "unplug", False, id="static-unplug-rank-0"),
    pytest.param("c10d", 1, "silent", False, id="c10d-silent"),
    pytest.param("c10d", 0, "unplug", True, id="c10d-unplug-rank-1-with-fewer-retries"),
]


@pytest.mark.grid
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("rendezvous", "first", "cut", "fewer_retries"), CUTS)
def test_a_host_that_is_cut_off(
    hosts: Hosts, unbroken: Path, tmp_path: Path, rendezvous: str, first: int, cut: str, fewer_retries: bool
) -> None:
    """Both hosts end in time and in one line each; the run goes on elsewhere as if nothing had happened.

    Host 1 is unplugged; under the static rendezvous `first` has rank 0, under c10d host 0 has, whose address is lower.
    """
    if fewer_retries:
        hosts.give_up_early()
    arguments = ("train", "--run-dir", str(tmp_path), *LONG, "--run.timeout", str(TIMEOUT))
    started = [hosts.torchrun(host, rendezvous, first, *arguments) for host in (0, 1)]
    wait_for_updates(started[0], tmp_path, more_than=10)
    begin = time.monotonic()
    hosts.silence() if cut == "silent" else hosts.unplug(1)
    while hosts.workers() and time.monotonic() < begin + ENDING:
        time.sleep(0.1)
    assert not hosts.workers()
    if rendezvous == "c10d" and not fewer_retries:
        started[0].kill()  # the agent that hangs, as described above
    errors = [process.communicate(timeout=max(1, begin + ENDING - time.monotonic()))[1] for process in started]
    assert all(process.returncode for process in started)
    assert_nothing_alive(hosts.marker)
    for host, text in enumerate(errors):
        rank = host ^ first if rendezvous == "static" else host
        assert len(own_lines(text)) == 1, text
        assert f"lost replica {1 - rank}, expected all 2 to answer" in own_lines(text)[0]

    saved = [event for event in events_of(tmp_path) if isinstance(event, CheckpointAnnounced)][-1]
    finished = run(*arguments[:-2], "--procs", "2")
    assert finished.returncode == 0, finished.stderr
    resumed = next(event for event in events_of(tmp_path) if isinstance(event, Resumed))
    assert resumed.from_update == saved.after_attempted
    assert_same_run(tmp_path, unbroken)
