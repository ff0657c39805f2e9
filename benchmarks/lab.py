"""How fast `isostep lab` answers while 8 people drag sliders at 10 Hz: a table of median, 95th percentile and worst.

Each client keeps a connection and sends the state of its slider every 100 ms, whether or not the last answer has come
back; as a page does, it asks for the newest state only, one at a time. The time of an answer runs from the moment when
the slider was moved there. Clients are threads of another process than the lab.
"""

from __future__ import annotations

import argparse
import http.client
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

RATE = 10.0
CLIENTS = 8
STATES: dict[str, Callable[[int], str]] = {
    "replicas": lambda k: f"/replicas?replicas=3&w={k / 1000}&lr=0.1&y0=0&y1=2&y2=4&fragment=1",
    "tokens": lambda k: f"/tokens?counts={1 + k},1536&losses=2,4&fragment=1",
    "pipeline, 1f1b, P = 8, M = 32": lambda k: f"/pipeline?stages=8&microbatches=32&forward={1 + k / 1e5}&fragment=1",
    "pipeline, interleaved-1f1b, P = 8, M = 32, v = 2": lambda k: (
        f"/pipeline?schedule=interleaved-1f1b&stages=8&microbatches=32&forward={1 + k / 1e5}&fragment=1"
    ),
    "pipeline, 1f1b beside zb-h1, P = 8, M = 32, transfers": lambda k: (
        f"/pipeline?stages=8&microbatches=32&compare=zb-h1&transfer={(1 + k) / 1e5}&fragment=1"
    ),
}
"""Addresses by the number of a move, different for every number, so that no answer is a kept one."""


@contextmanager
def lab() -> Iterator[int]:
    """The port of a real lab."""
    command = [sys.executable, "-m", "isostep", "lab", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = re.search(r":(\d+) ", process.stdout.readline())
        assert said is not None
        yield int(said[1])
    finally:
        process.terminate()
        process.wait()


def drag(port: int, state: Callable[[int], str], first: int, seconds: float, times: list[float]) -> None:
    """One client: `times` gets the seconds from each move that was asked for to its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    begin = time.perf_counter()
    move = 0
    while (due := begin + move / RATE) < begin + seconds:
        time.sleep(max(0.0, due - time.perf_counter()))
        connection.request("GET", state(first + move))
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, state(first + move)
        times.append(time.perf_counter() - due)
        move = max(move + 1, int((time.perf_counter() - begin) * RATE))  # of moves that came meanwhile, the newest
    connection.close()


def measure(port: int, state: Callable[[int], str], seconds: float) -> list[float]:
    """Seconds of all answers to all clients, who begin at different states."""
    times: list[list[float]] = [[] for _ in range(CLIENTS)]
    clients = [
        threading.Thread(target=drag, args=(port, state, 1000 * index, seconds, times[index]))
        for index in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return [taken for own in times for taken in own]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row (default 10)")
    seconds = parser.parse_args().seconds
    print("| state, 8 sliders at 10 Hz | answers | median | 95th percentile | worst |")
    print("|---|---|---|---|---|")
    with lab() as port:
        for name, state in STATES.items():
            times = measure(port, state, seconds)
            cuts = statistics.quantiles(times, n=20)
            shown = " | ".join(f"{1000 * taken:.0f} ms" for taken in (cuts[9], cuts[18], max(times)))
            print(f"| {name} | {len(times)} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
