"""Bad input to `isostep train`: an exit code, one line that names the value, nothing left alive, the run still good."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bad_input import (
    LAUNCHER,
    SOLO,
    Case,
    Outcome,
    cut,
    flipped,
    killed_run,
    killed_while_starting,
    locked,
    nothing,
    outcome_of,
    port_free,
    port_taken,
    removed,
    replaced,
    room_for,
    signalled,
)

CHECKPOINT = "run/checkpoints/update-00000008"
LEDGER = "run/ledger.jsonl"
LONG = '{"text": "' + "a" * 100 + '"}'


def given(identity: str, args: str, named: str) -> Case:
    """Flags that are refused before torch is imported."""
    return Case(id=identity, args=args, named=named, needs_torch=False)


def file(identity: str, content: str | bytes, named: str) -> Case:
    """A configuration that is refused before torch is imported."""
    return Case(id=identity, config="bad.toml", files={"bad.toml": content}, named=named, needs_torch=False)


def data(identity: str, content: str | bytes, named: str) -> Case:
    return Case(id=identity, args="--data.source bad.jsonl", files={"bad.jsonl": content}, named=named)


CONFIGURATION = [
    Case(id="no such configuration", config="none.toml", named="'none.toml'", needs_torch=False),
    Case(id="configuration is a folder", config="f.toml", files={"f.toml": None}, named="'f.toml'", needs_torch=False),
    file("malformed TOML", "[run]\ndir = = 1", "bad.toml: got malformed TOML, expected key = value; mend it: Inv"),
    file("TOML nested too deep", "x = " + "[" * 5000, "bad.toml: got malformed TOML"),
    file("number of too many digits", f"[run]\nepochs = {'9' * 5000}", "bad.toml: got malformed TOML"),
    file("configuration not UTF-8", b'[run]\ndir = "\xff"', "bad.toml: got 'byte 13 that is not UTF-8'"),
    file("unknown section", "[runs]\ndir = 'x'", "'runs'"),
    file("unknown key", "[run]\nepoch = 3", "'run.epoch'"),
    file("section is no table", "run = 7", "run: got 7, expected a section"),
    file("text for a number", "[run]\nepochs = 'three'", "run.epochs: got 'three', expected whole number"),
    file("fraction for a whole number", "[run]\nepochs = 1.5", "run.epochs: got 1.5, expected whole number"),
    file("true for a number", "[run]\nepochs = true", "run.epochs: got True, expected whole number"),
    file("number for text", "[data]\nsource = 3", "data.source: got 3, expected text"),
    file("both budgets in the file", "[update]\nexamples_per_update = 8\ntokens_per_update = 9", "tokens_per_update"),
    given(
        "both budgets as flags", "--update.examples-per-update 8 --update.tokens-per-update 9", "examples_per_update"
    ),
    given("zero", "--run.epochs 0", "run.epochs: got 0, expected greater than 0"),
    given("zero per microbatch", "--layout.examples-per-microbatch 0", "examples_per_microbatch: got 0"),
    given("negative", "--update.examples-per-update -3", "update.examples_per_update: got -3"),
    given("huge", f"--run.updates 1{'0' * 40}", "run.updates: got 10000000000"),
    given("NaN", "--optimizer.learning-rate nan", "optimizer.learning_rate: got nan, expected a finite number"),
    given("infinite", "--optimizer.learning-rate inf", "optimizer.learning_rate: got inf, expected a finite number"),
    given("one beta", "--optimizer.betas [0.9]", "optimizer.betas: got [0.9], expected 2 numbers"),
    given("none of the choices", "--optimizer.name adam", "optimizer.name: got 'adam', expected 'adamw', 'sgd' or"),
    given("unknown flag", "--optimizer.adam 1", "--optimizer.adam"),
    given("shortened flag", "--run.epoch 3", "--run.epoch"),
    given("flag without a value", "--run.epochs", "--run.epochs: expected one argument"),
    given("two lines in a flag", "--run.epochs '1\ny = 2'", r"run.epochs: got '1\ny = 2', expected whole number"),
    given("no quality rule", "--quality.accept-if good", "quality.accept_if: got 'good', expected a rule such as"),
    given("unknown tracker", "--run.track mlflow", "run.track: got 'mlflow'"),
    given("no workers", "--procs 0", "--procs: got '0'"),
    given("no folder for --json", "--json none/x.json", "--json: got 'none/x.json'"),
]

SIZES = [
    Case(
        id="width not divisible by heads", args="--model.heads 3", named="heads: got 3, expected a divisor of width 16"
    ),
    Case(
        id="more workers than fit",
        config="bad.toml",
        files={"bad.toml": "[layout]\nreplicas = 100000"},
        named="layout.replicas: got 100000, expected at most 64 local workers",
        launcher=True,
    ),
    Case(id="odd width of a head", args="--model.width 6", named="width / heads: got 3, expected an even number"),
    Case(id="model larger than memory", args="--model.width 1048576", named="model: got 'width 1048576, depth 1'"),
    Case(id="warm-up longer than the run", args="--schedule.warmup 100", named="the 100 updates of schedule.warmup"),
    Case(id="no total for the schedule", args="--update.tokens-per-update 300", named="schedule.total: got None"),
    Case(
        id="dropped last group is the only one",
        args="--update.last-group drop --update.examples-per-update 900 --schedule.total 50",
        named="examples_per_update: got 900",
    ),
    Case(
        id="tracker is not installed",
        args="--run.track tensorboard",
        files={"stub/tensorboard.py": "raise ImportError('hidden')"},
        named="run.track: got 'no tensorboard (hidden)', expected an installed package",
    ),
]

DATA = [
    Case(id="no such data", args="--data.source none.jsonl", named="data file: got 'none.jsonl'"),
    Case(id="data of an unknown kind", args="--data.source good.toml", named="'good.toml', expected a name in .jsonl"),
    data("empty data", "", "bad.jsonl: got 'no example'"),
    data("data not JSON", '{"text": "good"}\n{"text"\n', "bad.jsonl, line 2: got '{\"text\"', expected JSON"),
    data("data with other keys", '{"txt": "a"}\n', "bad.jsonl, line 1: got ['txt'], expected an object with"),
    data("data not UTF-8", b'{"text": "\xff"}\n', "bad.jsonl, line 1: got 'byte 11 that is not UTF-8'"),
    data("all targets masked", '{"messages": [{"role": "user", "content": "a"}]}\n', "'no supervised token in all"),
    data("example longer than the context", f'{{"text": "a"}}\n{LONG}\n', "length of bad.jsonl, line 2: got 102"),
    data("nothing held out", '{"text": "a"}\n', "data.validation_percent: got 20.0, expected a share that leaves"),
    Case(
        id="bad data under the launcher",
        args="--procs 2 --data.source none.jsonl",
        named="data file: got 'none.jsonl'",
        launcher=True,
    ),
    Case(
        id="non-finite gradients",
        args="--optimizer.learning-rate 1e30",
        named="got nan, expected finite gradients; every loss was finite; example ids of the group: [",
        code=1,
    ),
]

PLACES = [
    Case(id="run below a file", args="--run-dir good.toml/run", named="'good.toml/run', expected one that can be made"),
    Case(id="run in /proc", args="--run-dir /proc/run", named="run directory: got '/proc/run'"),
    Case(id="ledger is a folder", files={LEDGER: None}, named="'run/ledger.jsonl'"),
    Case(id="run in use", held=locked, named="'run, which another process is training in'"),
    Case(
        id="no folder for checkpoints",
        files={"run/checkpoints": ""},
        named="Not a directory: 'run/checkpoints/update-00000004.partial'",
        code=1,
        mend=removed("run/checkpoints"),
    ),
    Case(
        id="no room for weights",
        files={"run/weights.partial": None},
        named="run/weights.pt: got",
        code=1,
        mend=removed("run/weights.partial"),
    ),
    Case(
        id="no room for the sheet",
        files={"run/sheet.json": None},
        named="run/sheet.json: got Is a directory",
        code=1,
    ),
    Case(
        id="disk too full for a checkpoint",
        attack=room_for(60_000),
        named="checkpoint after update 4: got no room for the whole file, expected room",
        code=1,
        mend=nothing,
    ),
    Case(
        id="disk too full for the ledger",
        args="--checkpoint.every 0",
        attack=room_for(6_000),
        named="'run/ledger.jsonl', expected room",
        code=1,
        mend=nothing,
    ),
    Case(
        id="disk full under the launcher",
        args=LAUNCHER,
        attack=room_for(6_000),
        named="'run/ledger.jsonl', expected room",
        code=1,
        launcher=True,
    ),
    Case(id="disk too full for --json", args="--json /dev/full", named="--json: got '/dev/full'", code=1),
]

RESUMES = [
    Case(
        id="another WHAT",
        args="--optimizer.learning-rate 0.1",
        named="optimizer.learning_rate: got 0.1, expected 0.003, which this run has trained with",
        resumes=True,
        mend=nothing,
    ),
    Case(
        id="another model in spite of WHAT",
        args="--allow-changed-what --model.width 32",
        named="model.width: got 32, expected 16, which this run has trained with",
        resumes=True,
    ),
    Case(
        id="another quality rule",
        args="--quality.accept-if '< 1 at 5'",
        named="quality.accept_if: got '< 1 at 5', expected None, fixed when the run began",
        resumes=True,
    ),
    Case(
        id="other data",
        damage=replaced("data.jsonl", b"abc", b"xyz"),
        named="data: got 'content ",
        resumes=True,
        mend=replaced("data.jsonl", b"xyz", b"abc"),
    ),
    *(
        Case(id=identity, damage=damage, named=f"checkpoint {CHECKPOINT}: got", resumes=True, mend=mend)
        for identity, damage, mend in (
            ("flipped bit in a tensor", flipped(f"{CHECKPOINT}/__0_0.distcp"), removed(CHECKPOINT)),
            ("flipped bit in a manifest", flipped(f"{CHECKPOINT}/manifest.json"), None),
            ("half a checkpoint", removed(f"{CHECKPOINT}/.metadata"), removed(CHECKPOINT)),
            ("half a manifest", cut(f"{CHECKPOINT}/manifest.json", 300), None),
            ("empty manifest", cut(f"{CHECKPOINT}/manifest.json", 0), None),
        )
    ),
    Case(
        id="corrupt line in the ledger",
        damage=replaced(LEDGER, b'\n{"event": "update_done"', b'\n{"event": "update_dine"'),
        named="run/ledger.jsonl line",
        resumes=True,
        mend=replaced(LEDGER, b"update_dine", b"update_done"),
    ),
    Case(
        id="ledger of another schema",
        damage=replaced(LEDGER, b'"schema": 1', b'"schema": 2'),
        named="run/ledger.jsonl line 1: schema: got 2",
        resumes=True,
    ),
    Case(id="checkpoints without a ledger", damage=removed(LEDGER), named=f"{CHECKPOINT[:22]}", resumes=True),
]

WORKERS = [
    *(
        Case(
            id=f"worker {rank} hung",
            args=f"{LAUNCHER} --run.timeout 5",
            launcher=True,
            attack=signalled(signal.SIGSTOP, which),
            named=f"lost replica {rank}",
            code=1,
            mend=nothing,
        )
        for rank, which in enumerate((min, max))
    ),
    Case(id="wrong world size", args="--procs 2", named="layout.replicas: got 2, expected 1, the workers that"),
    Case(id="RANK not below WORLD_SIZE", env={"RANK": "1"}, named="RANK: got 1, expected below WORLD_SIZE 1"),
    Case(id="RANK is no number", env={"RANK": "²"}, named="RANK: got '²', expected a whole number"),
    Case(id="port taken", held=port_taken, named="address already in use"),
    Case(
        id="silent program at the port",
        args="--run.timeout 1",
        env={**SOLO, "RANK": "1", "WORLD_SIZE": "2"},
        held=port_taken,
        named="a connection and no answer (rank 1 at 127.0.0.1:",
    ),
    Case(
        id="nobody else comes",
        args="--run.timeout 3",
        env={"RANK": "1", "WORLD_SIZE": "2"},
        held=port_free,
        named="expected all 2 workers to meet there in 3 s",
    ),
    Case(
        id="worker killed",
        args=LAUNCHER,
        launcher=True,
        attack=signalled(signal.SIGKILL, max),
        named="lost replica 1",
        code=1,
        mend=nothing,
    ),
    Case(
        id="worker killed while it starts",
        args=LAUNCHER,
        launcher=True,
        attack=killed_while_starting,
        named="worker 1 ended with signal 9",
        code=1,
        mend=nothing,
    ),
]

CASES = [*WORKERS, *CONFIGURATION, *SIZES, *DATA, *PLACES, *RESUMES]
"""First those that mostly wait."""

GRID = {
    "worker 0 hung", "worker 1 hung", "worker killed", "worker killed while it starts", "silent program at the port",
    "odd width of a head", "model larger than memory", "data of an unknown kind",
    "bad data under the launcher", "run in /proc", "ledger is a folder", "no room for weights",
    "disk too full for the ledger", "disk full under the launcher", "another model in spite of WHAT",
    "ledger of another schema", "checkpoints without a ledger",
}  # fmt: skip
"""Cases of a kind that another one covers in `make test`."""


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Case], Outcome]]:
    """The outcome of each selected case. Three are under way at a time, or waiting."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    cases = [call.params["case"] for call in calls if call is not None]
    base = killed_run(tmp_path_factory.mktemp("base"))
    with ThreadPoolExecutor(3) as pool:
        started = {case.id: pool.submit(outcome_of, case, tmp_path_factory.mktemp("case"), base) for case in cases}
        yield lambda case: started[case.id].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.id, marks=[pytest.mark.grid] * (case.id in GRID)) for case in CASES]
)
def test_bad_input(case: Case, outcomes: Callable[[Case], Outcome]) -> None:
    outcome = outcomes(case)
    assert outcome.code == case.code, outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1, outcome.stderr
    assert case.named in outcome.stderr
    assert "expected" in outcome.stderr or "; see `isostep" in outcome.stderr
    assert len(outcome.stderr) < 600
    assert "Traceback" not in outcome.stdout + outcome.stderr
    assert not outcome.left
    assert outcome.proved
    if case.code == 2:
        assert outcome.after == outcome.before
    if outcome.again is not None:
        assert outcome.again.returncode == 0, outcome.again.stderr
        assert "each exactly once" in outcome.again.stdout


def test_there_are_enough_cases() -> None:
    assert len({case.id for case in CASES}) == len(CASES) >= 40
    assert {case.id for case in CASES} > GRID
