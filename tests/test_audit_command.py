"""`isostep audit` as a user runs it: what reaches the script, what comes back, and that nothing hangs or stays behind.

The commands mostly import torch or wait, so those that the selected tests need are started beside each other.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from command import assert_nothing_alive, run, start, torchrun
from isostep.cli import main

AT_ONCE = 4
ENVIRONMENT = {"PYTHONUNBUFFERED": "", "OMP_NUM_THREADS": "1"}
"""Output to a pipe is kept in a buffer, as it is for most users."""

HEAD = """
import os, sys, time
import torch, torch.nn.functional as F
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)

def microbatch(size):
    inputs = torch.randn(size, 4, generator=generator)
    return F.cross_entropy(model(inputs), torch.randint(3, (size,), generator=generator), reduction="sum")

def update(*sizes, count=4):
    optimizer.zero_grad()
    for size in sizes:
        (microbatch(size) / count).backward()
    optimizer.step()
"""

REPLICAS = """
import os, sys, time
import torch, torch.distributed as dist, torch.nn.functional as F
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)

def update():
    optimizer.zero_grad()
    inputs = torch.randn(2, 4, generator=generator)
    F.cross_entropy(model(inputs), torch.randint(3, (2,), generator=generator)).backward()
    optimizer.step()
"""

SCRIPTS = {
    "told.py": HEAD + """
import pickle
import beside

class Thing:
    pass

assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
for k in range(7):
    update(1, 3)
    main = sys.modules["__main__"]
    print("update", k, sys.argv, __name__, os.path.basename(__file__), beside.VALUE, main.Thing is Thing)
""",
    "noisy.py": HEAD + """
import subprocess
print("by print")
sys.__stdout__.write("by the first stdout\\n")
subprocess.run(["echo", "by another process"], check=True)
os.write(1, b"by the descriptor\\n")
for k in range(3):
    optimizer.zero_grad()
    for size in (1, 3):
        (microbatch(size) / size / 2).backward()
    optimizer.step()
""",
    "replicas.py": REPLICAS + """
for k in range(int(sys.argv[1])):
    update()
    print(f"rank {rank} update {k}", flush=True)
dist.destroy_process_group()
""",
    "fails.py": HEAD + """
for k in range(10):
    if k == int(sys.argv[1]):
        raise ValueError("a bad batch") if sys.argv[2] == "raise" else SystemExit(int(sys.argv[2]))
    update(1, 3)
""",
    "syntax.py": "import torch\nfor k in range(3)\n    pass\n",
    "stubborn.py": HEAD + """
while True:
    try:
        update(1, 3)
    except BaseException:
        pass
""",
    "hangs.py": HEAD + """
for k in range(2):
    update(1, 3)
time.sleep(1000)
""",
    "thread.py": HEAD + """
import queue, threading
waiting = queue.Queue()
threading.Thread(target=waiting.get).start()
for k in range(10):
    optimizer.zero_grad()
    for size in (1, 3):
        (microbatch(size) / size / 2).backward()
    optimizer.step()
waiting.put(None)
""",
    "dies.py": REPLICAS + """
for k in range(10):
    if k == 2 and rank == 1:
        os._exit(7)
    update()
""",
    "raises.py": REPLICAS + """
for k in range(10):
    if k == 2 and rank == 1:
        raise ValueError("rank one only")
    update()
""",
    "hangs_two.py": REPLICAS + """
for k in range(10):
    if k == 2 and rank == 1:
        time.sleep(1000)
    update()
""",
    "endless.py": REPLICAS + """
open(f"{sys.argv[1]}/{rank}", "w").close()
while True:
    update()
    time.sleep(0.05)
""",
    "no_optimizer.py": HEAD + """
del optimizer
for k in range(3):
    (microbatch(4) / 4).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
""",
    "no_loss.py": HEAD + """
for k in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
""",
    "spawns.py": """
import torch, torch.nn.functional as F, torch.multiprocessing as mp

def work(rank):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(2, 4)), torch.tensor([0, 1])).backward()
        optimizer.step()
    print("trained", rank, flush=True)

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
""",
}  # fmt: skip


@dataclass
class Finished:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    folder: Path

    @property
    def page(self) -> str:
        """The report."""
        found = re.search(r"^audit\n  verdict .*", self.stdout, re.MULTILINE | re.DOTALL)
        assert found, f"no report on stdout: {self}"
        return found.group()

    @property
    def reasons(self) -> str:
        """What was not observed, on one line."""
        return " ".join(self.page.partition("\nnot observed\n")[2].partition("\n\n")[0].split())


def commands(folder: Path) -> dict[str, Callable[[], subprocess.CompletedProcess[str]]]:
    """Every command, by name."""

    def audit(*args: str, env: dict[str, str] | None = None) -> Callable[[], subprocess.CompletedProcess[str]]:
        return lambda: run("audit", *args, folder=folder, env=ENVIRONMENT | (env or {}), timeout=70)

    def script(name: str) -> str:
        return str(folder / name)

    return {
        "told": audit("--updates", "3", "--json", "told.json", "--weighting", "token", script("told.py"),
                      "--updates", "9", "--flag", "x y"),
        "noisy": audit("--json", "-", script("noisy.py")),
        "procs": audit("--procs", "2", "--updates", "all", "--json", "procs.json", script("replicas.py"), "3"),
        "torchrun": lambda: torchrun("audit", "--updates", "2", script("replicas.py"), "5"),
        "fails": audit(script("fails.py"), "2", "raise"),
        "syntax": audit(script("syntax.py")),
        "stubborn": audit(script("stubborn.py")),
        "hangs": audit("--timeout", "5", "--json", "hangs.json", script("hangs.py")),
        "thread": audit("--weighting", "microbatch", script("thread.py")),
        "dies": audit("--procs", "2", script("dies.py"), env={"ISOSTEP_TEST_MARKER": f"dies-{folder.name}"}),
        "interrupted": lambda: interrupted(folder, "procs", "--procs", "2"),
        "spawns": audit(script("spawns.py")),
        "no_optimizer": audit(script("no_optimizer.py")),
        "no_loss": audit(script("no_loss.py")),
        "fails at once": audit(script("fails.py"), "0", "raise"),
        "exits": audit(script("fails.py"), "2", "3"),
        "exits at once": audit(script("fails.py"), "0", "3"),
        "exits well": audit(script("fails.py"), "2", "0"),
        "example": audit("--weighting", "example", script("noisy.py")),
        "noisy procs": audit("--procs", "2", "--json", "-", script("noisy.py")),
        "hangs json": audit("--timeout", "5", "--json", "-", script("hangs.py")),
        "hangs two": audit("--procs", "2", "--timeout", "8", script("hangs_two.py"),
                           env={"ISOSTEP_TEST_MARKER": f"hangs-{folder.name}"}),
        "raises": audit("--procs", "2", script("raises.py"), env={"ISOSTEP_TEST_MARKER": f"raises-{folder.name}"}),
        "interrupted alone": lambda: interrupted(folder, "alone"),
    }  # fmt: skip


def interrupted(folder: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """An endless script, and Ctrl-C once all its ranks train."""
    flags = folder / name
    flags.mkdir()
    count = int(options[-1]) if options else 1
    alone = {} if options else {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    process = start(
        f"{name}-{folder.name}", "audit", "--updates", "all", *options, str(folder / "endless.py"), str(flags),
        folder=folder, env=ENVIRONMENT | alone,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(list(flags.iterdir())) < count and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def needs(*names: str) -> Any:
    """The commands that a test needs; they start when the first test does."""

    def mark(test: Any) -> Any:
        test.needs = names
        return test

    return mark


class Outcomes:
    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._known = commands(folder)
        self._running: dict[str, Future[Finished]] = {}
        for name in sorted(dict.fromkeys(names), key=lambda n: n not in ("hangs", "stubborn", "hangs two", "raises")):
            self._running[name] = self._pool.submit(self._finish, name)

    def __getitem__(self, name: str) -> Finished:
        return self._running[name].result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _finish(self, name: str) -> Finished:
        begin = time.monotonic()
        try:
            done = self._known[name]()
        except subprocess.TimeoutExpired as late:
            output = [part.decode() if isinstance(part, bytes) else part or "" for part in (late.stdout, late.stderr)]
            return Finished(-999, *output, time.monotonic() - begin, self.folder)
        return Finished(done.returncode, done.stdout, done.stderr, time.monotonic() - begin, self.folder)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
    (folder / "beside.py").write_text("VALUE = 'imported'\n")
    names = [name for item in request.session.items for name in getattr(getattr(item, "obj", None), "needs", ())]
    running = Outcomes(folder, names)
    yield running
    running.close()


def assert_page_says(finished: Finished, verdict: str) -> None:
    """The verdict, and the exit code, which the page names too."""
    last = finished.page.strip().splitlines()[-1]
    assert last.startswith(f"verdict: {verdict}, "), finished.page
    assert f"exit code {finished.returncode}:" in last, (finished.returncode, last)
    assert finished.stdout.count("\nverdict: ") == 1, "one report"


# ------------------------------------------------------------------------------------------------ what goes in and out


@needs("told")
def test_script_runs_as_python_runs_it_and_stops_after_k_updates(outcomes: Outcomes) -> None:
    """Its arguments, its name, its folder; options behind the script are the script's."""
    told = outcomes["told"]
    assert told.stderr == ""
    assert_page_says(told, "exact")
    assert told.returncode == 0
    lines = [line for line in told.stdout.splitlines() if line.startswith("update ")]
    argv = [str(told.folder / "told.py"), "--updates", "9", "--flag", "x y"]
    assert [line for line in lines if "[" in line] == [
        f"update {k} {argv} __main__ told.py imported True" for k in range(3)
    ]
    assert "tail not observed" in told.reasons
    document = json.loads((told.folder / "told.json").read_text())
    assert (document["schema"], document["verdict"], document["weighting"]) == (1, "exact", "token")
    assert [update["tokens"] for update in document["updates"]] == [4, 4, 4]
    weights = document["updates"][0]["weights"]
    assert [(w["tokens"], w["weight"], w["ratio"]) for w in weights] == [
        (1, pytest.approx(0.25), pytest.approx(1)), (3, pytest.approx(0.25), pytest.approx(1)),
    ]  # fmt: skip
    assert {w["site"] for w in weights} == {"told.py:11"}


@needs("noisy")
def test_json_alone_on_stdout_and_exit_1_with_a_finding(outcomes: Outcomes) -> None:
    """Whatever way the script prints."""
    noisy = outcomes["noisy"]
    document = json.loads(noisy.stdout)
    assert document["verdict"] == "inexact"
    assert [finding["kind"] for finding in document["findings"]] == ["mean-of-means"] * 3
    assert noisy.returncode == 1
    for way in ("by print", "by the first stdout", "by another process", "by the descriptor"):
        assert way in noisy.stderr


@needs("procs")
def test_all_updates_of_two_ranks(outcomes: Outcomes) -> None:
    procs = outcomes["procs"]
    assert procs.stderr == ""
    assert_page_says(procs, "exact")
    assert procs.returncode == 0
    assert sorted(re.findall(r"rank \d update \d", procs.stdout)) == [
        f"rank {r} update {k}" for r in (0, 1) for k in range(3)
    ]
    assert "tail not observed" not in procs.page
    document = json.loads((procs.folder / "procs.json").read_text())
    assert (document["world"], len(document["updates"])) == (2, 3)
    assert [w["rank"] for w in document["updates"][0]["weights"]] == [0, 1]


@needs("torchrun")
def test_under_torchrun(outcomes: Outcomes) -> None:
    """Workers that a launcher has started; the first of them prints the one report."""
    finished = outcomes["torchrun"]
    assert finished.returncode == 0, finished.stderr
    assert_page_says(finished, "exact")
    assert re.search(r"ranks +2\n +seen +2 updates", finished.page)
    assert sorted(re.findall(r"rank \d update \d", finished.stdout)) == [
        f"rank {r} update {k}" for r in (0, 1) for k in range(2)
    ]


def test_symptoms_run_nothing() -> None:
    finished = run("audit", "--symptom")
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "Memory grows" in finished.stdout
    assert "mean-of-means" in finished.stdout


@pytest.mark.grid
@needs("example", "noisy procs", "exits well")
def test_more_ways_to_ask(outcomes: Outcomes) -> None:
    example = outcomes["example"]
    assert_page_says(example, "inexact")
    assert "uneven-weights" in example.page or "mean-of-means" in example.page
    assert json.loads(outcomes["noisy procs"].stdout)["world"] == 2
    well = outcomes["exits well"]
    assert_page_says(well, "exact")
    assert "tail" not in well.page, "it came to its own end"


def _bad(*args: str, names: str) -> Any:
    return pytest.param(args, names, id=" ".join(args)[:60])


@pytest.mark.parametrize(
    ("args", "names"),
    [
        _bad(names="SCRIPT"),
        _bad("nowhere.py", names="nowhere.py"),
        _bad("folder", names="folder"),
        _bad("secret.py", names="secret.py"),
        _bad("--updates", "0", "good.py", names="'0'"),
        _bad("--updates", "-3", "good.py", names="--updates"),
        _bad("--updates", "x", "good.py", names="'x'"),
        _bad("--weighting", "sentence", "good.py", names="sentence"),
        _bad("--timeout", "0", "good.py", names="'0'"),
        _bad("--timeout", "nan", "good.py", names="'nan'"),
        _bad("--procs", "0", "good.py", names="'0'"),
        _bad("--json", "no/such/folder/x.json", "good.py", names="no/such"),
        _bad("--json", "folder", "good.py", names="folder"),
        _bad("--procs", "2", "nowhere.py", names="nowhere.py"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    args: Sequence[str], names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "good.py").write_text("print('I ran')\n")
    (tmp_path / "secret.py").write_text("print('I ran')\n")
    (tmp_path / "secret.py").chmod(0)
    if "secret.py" in args and os.geteuid() == 0:
        pytest.skip("root reads everything")
    monkeypatch.chdir(tmp_path)
    assert main(["audit", *args]) == 2
    output, errors = capfd.readouterr()
    assert len(errors.strip().splitlines()) == 1, errors
    assert names in errors
    assert output == "", "nothing has run"


# ------------------------------------------------------------------------------------------------ scripts that fail


def assert_traceback_is_the_scripts(finished: Finished, script: str, error: str) -> None:
    """As Python prints it: it begins in the script, and ends with the error."""
    lines = finished.stderr.strip().splitlines()
    assert lines[-1].startswith(error), finished.stderr
    frames = re.findall(r'^  File "([^"]+)"', finished.stderr, re.MULTILINE)
    assert any(frame.endswith(script) for frame in frames), finished.stderr
    assert not any("isostep" in Path(frame).parts or "runpy" in frame for frame in frames), "our own frames"


@needs("fails")
def test_error_after_two_updates(outcomes: Outcomes) -> None:
    """What was seen stands in the report, and is not called exact."""
    fails = outcomes["fails"]
    assert_page_says(fails, "not observed")
    assert re.search(r"seen +2 updates, 8 supervised tokens", fails.page)
    assert "the script failed: ValueError: a bad batch" in fails.reasons
    assert_traceback_is_the_scripts(fails, "fails.py", "ValueError: a bad batch")


@pytest.mark.grid
@needs("syntax")
def test_syntax_error(outcomes: Outcomes) -> None:
    syntax = outcomes["syntax"]
    assert_page_says(syntax, "not observed")
    assert "the script failed: SyntaxError" in syntax.reasons
    assert "for k in range(3)" in syntax.stderr
    assert_traceback_is_the_scripts(syntax, "syntax.py", "SyntaxError: expected ':'")


@pytest.mark.grid
@needs("fails at once", "exits", "exits at once")
def test_more_failures(outcomes: Outcomes) -> None:
    once = outcomes["fails at once"]
    assert_page_says(once, "not observed")
    assert "ValueError: a bad batch" in once.reasons
    assert_traceback_is_the_scripts(once, "fails.py", "ValueError: a bad batch")
    for name, seen in (("exits", "2 updates"), ("exits at once", "0 updates")):
        exits = outcomes[name]
        assert_page_says(exits, "not observed")
        assert exits.stderr == ""
        assert "ended by itself with exit code 3" in exits.reasons
        assert seen in exits.page


@needs("no_optimizer")
def test_script_without_an_optimizer_is_not_observed(outcomes: Outcomes) -> None:
    alone = outcomes["no_optimizer"]
    assert_page_says(alone, "not observed")
    assert alone.returncode == 3
    assert "no optimizer of torch.optim ran (3 backward passes)" in alone.reasons


@pytest.mark.grid
@needs("no_loss")
def test_script_without_a_known_loss_is_not_observed(outcomes: Outcomes) -> None:
    unknown = outcomes["no_loss"]
    assert_page_says(unknown, "not observed")
    assert unknown.returncode == 3
    assert "no known loss function" in unknown.reasons


@pytest.mark.grid
@needs("spawns")
def test_processes_that_the_script_starts_are_not_seen_and_run_on(outcomes: Outcomes) -> None:
    spawns = outcomes["spawns"]
    assert sorted(re.findall(r"trained \d", spawns.stdout)) == ["trained 0", "trained 1"], spawns.stderr
    assert_page_says(spawns, "not observed")
    assert spawns.returncode == 3
    assert "no optimizer of torch.optim ran" in spawns.reasons


# ------------------------------------------------------------------------------------------- scripts that do not end


@needs("stubborn")
def test_script_that_catches_everything_is_ended(outcomes: Outcomes) -> None:
    stubborn = outcomes["stubborn"]
    assert stubborn.seconds < 60
    assert "did not end when it was asked to" in stubborn.reasons
    assert re.search(r"seen +4 updates", stubborn.page)
    assert_page_says(stubborn, "exact")


@needs("hangs")
def test_script_that_hangs_is_ended_with_a_report(outcomes: Outcomes) -> None:
    hangs = outcomes["hangs"]
    assert hangs.seconds < 60
    assert "stopped after 5 s" in hangs.reasons
    assert re.search(r"seen +2 updates", hangs.page)
    last = hangs.page.strip().splitlines()[-1]
    assert f"exit code {hangs.returncode}:" in last, (hangs.returncode, last)
    assert len(json.loads((hangs.folder / "hangs.json").read_text())["updates"]) == 2


@pytest.mark.grid
@needs("hangs json")
def test_report_of_a_script_that_hangs_as_json(outcomes: Outcomes) -> None:
    assert len(json.loads(outcomes["hangs json"].stdout)["updates"]) == 2


@needs("thread")
def test_thread_of_the_script_that_would_never_end_keeps_nothing(outcomes: Outcomes) -> None:
    """A stopped script cannot tell its threads to end; the command ends all the same."""
    thread = outcomes["thread"]
    assert thread.seconds < 60, "it hung"
    assert_page_says(thread, "exact")
    assert thread.returncode == 0


@needs("dies")
def test_rank_that_dies(outcomes: Outcomes) -> None:
    """The other one reports what it saw, and who is missing, soon."""
    dies = outcomes["dies"]
    assert dies.seconds < 60
    assert_nothing_alive(f"dies-{dies.folder.name}")
    assert dies.returncode not in (0, -999)
    assert "isostep: worker 1 ended with exit code 7" in dies.stderr
    assert "rank 1 of 2 did not report" in dies.reasons
    assert dies.page.strip().splitlines()[-1].startswith("verdict: not observed")


@pytest.mark.grid
@needs("hangs two", "raises")
@pytest.mark.parametrize("name", ["hangs", "raises"])
def test_rank_that_hangs_or_fails(outcomes: Outcomes, name: str) -> None:
    """The other one waits for it in a collective, and neither waits for ever."""
    finished = outcomes["hangs two" if name == "hangs" else name]
    assert finished.seconds < 60
    assert_nothing_alive(f"{name}-{finished.folder.name}")
    assert re.search(r"seen +2 updates", finished.page)
    if name == "raises":
        assert finished.returncode not in (0, -999)
        assert finished.page.strip().splitlines()[-1].startswith("verdict: not observed")
        assert "ValueError: rank one only" in finished.stderr
        assert "ValueError: rank one only" in finished.reasons
    else:
        assert f"exit code {finished.returncode}:" in finished.page
        assert "did not end when it was asked to" in finished.reasons
        assert "Traceback" not in finished.stderr


@needs("interrupted")
def test_interrupt_of_two_ranks_is_one_line(outcomes: Outcomes) -> None:
    stopped = outcomes["interrupted"]
    assert stopped.returncode == 130
    assert stopped.stderr.strip().splitlines() == ["isostep: interrupted; nothing is left running"]
    assert_nothing_alive(f"procs-{stopped.folder.name}")


@pytest.mark.grid
@needs("interrupted alone")
def test_interrupt_of_one_process_is_one_line(outcomes: Outcomes) -> None:
    stopped = outcomes["interrupted alone"]
    assert stopped.returncode == 130
    assert stopped.stderr.strip().splitlines() == ["isostep: interrupted; nothing is left running"]
    assert_nothing_alive(f"alone-{stopped.folder.name}")


@pytest.mark.grid
@pytest.mark.parametrize("seconds", [1.0, 2.0, 3.0, 4.0])
def test_interrupt_while_workers_start_is_one_line(tmp_path: Path, seconds: float) -> None:
    """Whatever is being imported when the user changes their mind."""
    (tmp_path / "script.py").write_text(SCRIPTS["endless.py"])
    marker = f"start-{tmp_path.name}"
    process = start(marker, "audit", "--procs", "2", "--updates", "all", "script.py", ".", folder=tmp_path)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip().splitlines() == ["isostep: interrupted; nothing is left running"]
    assert_nothing_alive(marker)
