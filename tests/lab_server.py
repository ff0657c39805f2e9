"""The lab under test: as a real process, as an application asked directly, and requests that mean it harm."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from command import command
from isostep.lab.app import VIEWS, build_app
from isostep.lab.fields import Choice, Field, Grid, Real, Reals, Switch, Whole
from isostep.lab.files import WRITERS
from isostep.schedule.costs import Costs
from isostep.schedule.generate import generate
from isostep.schedule.simulate import Simulation, simulate

APP = build_app()
LINE = re.compile(r"isostep lab: (http://127\.0\.0\.1:(\d+)) \(Ctrl-C ends it\)\n")
THREAD = ThreadPoolExecutor(1)
PATHS = ("/", *(f"/{view.name}" for view in VIEWS), *(f"/pipeline/{name}" for name in WRITERS), "/gantt.css",
         "/static/lab.css", "/static/lab.js", "/static/icon.svg", "/worked/replicas.py")  # fmt: skip
"""Every kind of address that answers."""


@dataclass(frozen=True)
class Running:
    """A real `isostep lab`."""

    process: subprocess.Popen[str]
    base: str
    port: int

    def end(self, with_signal: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """Exit code and stderr after a signal."""
        self.process.send_signal(with_signal)
        _, errors = self.process.communicate(timeout=10)
        return self.process.returncode, errors


@contextmanager
def running(*args: str, marker: str = "lab") -> Iterator[Running]:
    """A lab on a free port, ended in any case; its process carries the marker."""
    process = subprocess.Popen(
        command("lab", "--port", "0", *args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "ISOSTEP_TEST_MARKER": marker}, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        said = LINE.fullmatch(line)
        assert said, (line, process.stderr and process.stderr.read())
        yield Running(process, said[1], int(said[2]))
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@dataclass(frozen=True)
class Asked:
    """One request."""

    path: str
    query: bytes = b""
    method: str = "GET"
    host: bytes = b"127.0.0.1:8642"
    fragment: bool = False

    @property
    def raw(self) -> bytes:
        return self.query + (b"&fragment=1" if self.fragment else b"")


@dataclass
class Answer:
    """What came back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    seconds: float = 0.0

    @property
    def text(self) -> str:
        return self.body.decode()


async def ask(app: Any, asked: Asked) -> Answer:
    """Ask an ASGI application, with any bytes in the query. An exception counts as status 500, as a server has it."""
    answer, asked_for = Answer(), asyncio.Event()
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": asked.method, "scheme": "http",
        "path": asked.path, "raw_path": quote(asked.path).encode(), "root_path": "", "query_string": asked.raw,
        "headers": [(b"host", asked.host)], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8642), "state": {},
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        if asked_for.is_set():
            await asyncio.Event().wait()  # nobody hangs up
        asked_for.set()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    begin = time.perf_counter()
    try:
        await app(scope, receive, send)
    except Exception:
        answer.status = 500
    answer.seconds = time.perf_counter() - begin
    return answer


def answer(app: Any, path: str, query: str = "", **others: Any) -> Answer:
    """The answer to one request. In a thread of its own, where no loop runs yet."""
    return THREAD.submit(asyncio.run, ask(app, Asked(path, query.encode(), **others))).result()


def page(path: str, query: str = "") -> str:
    """A page that is answered."""
    got = answer(APP, path, query)
    assert got.status == 200, got.text[-900:]
    return got.text


def simulated(name: str, stages: int, num_microbatches: int, chunks: int | None = None, **costs: Any) -> Simulation:
    """A schedule as the library has it, under costs of whole stages."""
    schedule = generate(name, stages, num_microbatches, chunks)
    return simulate(schedule, Costs.of_stages(schedule, **costs))


def numbers(text: str) -> dict[str, float]:
    """The numbers on a page, by their keys, with all digits."""
    return {key: float(value) for key, value in re.findall(r'data-key="([^"]+)" value="([^"]+)"', text)}


def faults(app: Any, requests: Sequence[Asked], seconds: float = 2.0) -> list[str]:
    """What is wrong with the answers: a fault of the server, an answer that came late, a page with a script let in."""

    async def all_of_them() -> list[str]:
        found = []
        for asked in requests:
            got = await ask(app, asked)
            if got.status >= 500 or got.status < 200:
                found.append(f"status {got.status}: {asked}")
            if got.seconds > seconds:
                found.append(f"{got.seconds:.2f} s: {asked}")
            if b"<script>" in got.body or b"<img" in got.body:
                found.append(f"not escaped: {asked}")
        return found

    return asyncio.run(all_of_them())


def fuzzed(seed: int, count: int) -> list[Asked]:
    """Requests: good, nearly good, and nothing but noise."""
    rng = random.Random(seed)
    makers: Sequence[Callable[[random.Random], Asked]] = (_good, _good, _near, _near, _near, _noise, _other)
    return [rng.choice(makers)(rng) for _ in range(count)]


WORDS = (
    "", " ", "0", "-1", "1", "1.5", "nan", "inf", "-inf", "1e308", "1e-320", "1e999", "9" * 400, "-" + "9" * 30, "0x10",
    "1_000", "\u0663", "\u00b2", "1,2", "1,2,3,4", ",", ",,", "1,", "a", "true", "<script>alert(1)</script>",
    '"><img src=x onerror=x>', "'", "%", "%00", "\x00", "\n", "\u202e", "\U0001f600", "None", "{{7*7}}", "{%",
    "../../etc/passwd", "1 2 3", "1" + ",1" * 300, " ".join("1" * 50), "1e5", "1000000", "2147483648",
    "18446744073709551616", "+5", "5.", ".5", "1e", "--1", "1;2", "gpipe,1f1b",
)  # fmt: skip
"""Texts that some parser takes for what they are not."""


def _text(rng: random.Random, control: Field) -> str:
    """A text that a field takes, mostly."""
    if isinstance(control, Choice):
        return rng.choice(control.options)[0]
    if isinstance(control, Switch):
        return rng.choice(("0", "1", ""))
    if isinstance(control, Whole):
        most = min(control.most, rng.choice((8, 40, control.most)))
        return (
            "" if control.optional and rng.random() < 0.6 else str(rng.randint(control.least, max(control.least, most)))
        )
    if isinstance(control, Real):
        return "" if control.optional and rng.random() < 0.6 else f"{rng.uniform(max(control.least, -9), 9):.3g}"
    if isinstance(control, Reals):
        return ",".join(f"{rng.uniform(0, 3):.2f}" for _ in range(rng.choice((1, 1, 1, 4))))
    assert isinstance(control, Grid)
    columns = rng.randint(1, 4)
    return " ".join(",".join(str(rng.randint(0, 9)) for _ in range(columns)) for _ in range(rng.randint(1, 3)))


def _pairs(rng: random.Random) -> tuple[str, list[tuple[str, str]]]:
    view = rng.choice(VIEWS)
    controls = rng.sample(view.fields, rng.randint(0, min(6, len(view.fields))))
    path = f"/{view.name}"
    if view.name == "pipeline" and rng.random() < 0.3:
        path = f"/pipeline/{rng.choice(tuple(WRITERS))}"
    return path, [(control.name, _text(rng, control)) for control in controls]


def _encoded(pairs: Sequence[tuple[str, str]]) -> bytes:
    return "&".join(f"{quote(name)}={quote(text)}" for name, text in pairs).encode()


def _good(rng: random.Random) -> Asked:
    path, pairs = _pairs(rng)
    return Asked(path, _encoded(pairs), fragment=rng.random() < 0.5)


def _near(rng: random.Random) -> Asked:
    """One thing wrong."""
    path, pairs = _pairs(rng)
    pairs = pairs or [("stages", "3")]
    place = rng.randrange(len(pairs))
    name, text = pairs[place]
    spoiled = rng.choice(
        (
            [(name, rng.choice(WORDS))],
            [(name, text + rng.choice(WORDS))],
            [(name, text), (name, text)],
            [(rng.choice(WORDS), text)],
            [(name.upper(), text)],
            [(name, text * rng.choice((10, 200, 2000)))],
        )
    )
    return Asked(path, _encoded([*pairs[:place], *spoiled, *pairs[place + 1 :]]), fragment=rng.random() < 0.5)


def _noise(rng: random.Random) -> Asked:
    length = rng.choice((1, 10, 100, 1000, 5000, 60_000))
    alphabet = rng.choice((range(256), b"&=%;+,#?<>\"'/\\.0123456789abcdef"))
    return Asked(rng.choice(PATHS), bytes(rng.choices(list(alphabet), k=length)))


def _other(rng: random.Random) -> Asked:
    """Wrong paths, methods and hosts."""
    path = rng.choice((*PATHS, "/" + rng.choice(WORDS), "/static/" + rng.choice(WORDS), "/worked/" + rng.choice(WORDS),
                       "//replicas", "/replicas/", "/static/../app.py", "/worked/..%2fapp.py"))  # fmt: skip
    method = rng.choice(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "X" * 50))
    host = rng.choice((b"127.0.0.1:8642", b"localhost", b"[::1]:9", b"evil.example", b"", b"127.0.0.1.evil.example",
                       b"127.0.0.1:8642@evil.example", b"\xff\xfe"))  # fmt: skip
    return Asked(path, rng.choice((b"", b"a=1", b"w=2")), method, host)
