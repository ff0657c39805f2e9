"""`isostep simulate` as a user runs it: what it prints and writes, what it refuses, with which exit code."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from isostep import cli
from isostep.commands import simulate as command
from isostep.schedule import csv_file, gantt_svg, trace
from isostep.schedule.costs import Costs
from isostep.schedule.generate import NAMES, generate
from isostep.schedule.simulate import Simulation, simulate

SIZES = ("--stages", "4", "--microbatches", "8")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = cli.main(["simulate", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def simulated(name: str, **costs: Any) -> Simulation:
    schedule = generate(name, 4, 8)
    return simulate(schedule, Costs.of(schedule, **costs))


def row(out: str, name: str) -> list[str]:
    """The cells of the line of a table that begins with `name`."""
    line = next(line for line in out.splitlines() if line.startswith(name))
    return re.split(r" {2,}", line.strip())


# ---- one schedule


def test_numbers_stand_beside_their_closed_forms(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *SIZES)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "1f1b, 4 stages, 8 microbatches"
    assert row(out, "makespan") == ["makespan", "33", "= closed form"]  # (M + P - 1)(f + b + w)
    assert row(out, "busy share")[1:] == ["72.7 %", "= closed form"]
    assert row(out, "bubble, global")[1:] == ["9", "27.3 % of the makespan, = closed form"]
    assert row(out, "peak in flight")[1] == "4 3 2 1"
    assert "rank 3  ......F0B0─ F1B1─ " in out
    _, transferred, _ = run(capsys, *SIZES, "--transfer", "0.5")
    assert row(transferred, "makespan") == ["makespan", "41"]  # no closed form with transfers
    assert row(transferred, "peak in flight")[1] == "4 3 2 1"


def test_a_closed_form_that_differs_is_written_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isostep.schedule.closed_form.busy_share", lambda *args, **options: 0.5)
    _, out, _ = run(capsys, *SIZES)
    assert row(out, "makespan")[2] == "closed form 48"
    assert row(out, "busy share")[1:] == ["72.7 %", "closed form 50.0 %"]


def test_the_slowest_stage_sets_the_cadence(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *SIZES, "--forward", "1,1,3,1")
    assert row(out, "critical stage")[:2] == ["critical stage", "2"]
    sim = simulated("1f1b", forward=[1, 1, 3, 1])
    share = sum(span.end - span.start for span in sim.critical_path if span.stage == 2) / sim.makespan
    assert f"{100 * share:.1f} % of the longest chain" in out
    assert share > 0.5


@pytest.mark.parametrize("name", NAMES)
def test_json_is_the_document_of_the_simulation(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sim = simulated(name, forward=1.5, transfer=0.25, recompute=0.0, blocking=True)
    costs = ["--forward", "1.5", "--transfer", "0.25", "--recompute", "--blocking"]
    code, out, err = run(capsys, "--schedule", name, *SIZES, *costs, "--json", "-")
    assert (code, err) == (0, "")
    assert json.loads(out) == sim.document()
    assert json.loads(out)["spans"] == []
    file = tmp_path / "numbers.json"
    _, drawn, _ = run(capsys, "--schedule", name, *SIZES, *costs, "--json", str(file), "--spans")
    assert json.loads(file.read_text()) == sim.document(spans=True)
    assert len(json.loads(file.read_text())["spans"]) == sim.schedule.size
    assert "makespan" in drawn


def test_forwards_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--schedule", "gpipe", "--stages", "3", "--microbatches", "4", "--forward-only")
    assert code == 0
    assert "rank 2  .. .. F0 F1 F2 F3\n" in out
    assert row(out, "makespan")[1:] == ["6", "= closed form"]
    assert row(out, "busy share")[1:] == ["66.7 %", "= closed form"]
    assert "backward" not in out.split("\n\n")[0]


def test_files_are_those_of_the_library(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sim = simulated("dualpipe-v", transfer=0.5)
    paths = {kind: str(tmp_path / f"drawn.{kind}") for kind in ("svg", "csv", "trace")}
    flags = [part for kind, path in paths.items() for part in (f"--{kind}", path)]
    code, out, _ = run(capsys, "--schedule", "dualpipe-v", *SIZES, "--transfer", "0.5", *flags)
    assert code == 0
    assert out.startswith("dualpipe-v")
    svg = Path(paths["svg"]).read_text()
    assert svg == gantt_svg.draw(sim)
    ElementTree.fromstring(svg)
    assert Path(paths["csv"]).read_text() == csv_file.text(sim.schedule)
    assert "OVERLAP_F_B" in Path(paths["csv"]).read_text()
    assert json.loads(Path(paths["trace"]).read_text()) == trace.document(sim)


def test_a_schedule_from_a_file_is_the_same_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    run(capsys, "--schedule", "zb-h1", *SIZES, "--csv", str(path))
    code, out, _ = run(capsys, "--schedule", str(path), "--json", "-")
    assert code == 0
    document = json.loads(out)
    assert document == {**simulated("zb-h1").document(), "schedule": str(path)}
    _, drawn, _ = run(capsys, "--schedule", str(path))
    assert drawn.startswith("mine.csv, 4 stages, 8 microbatches\n")
    assert "closed form" not in drawn
    with path.open() as file:
        cells = list(csv.reader(file))
    cells[2][3] = "2X0"
    path.write_text("\n".join(",".join(line) for line in cells))
    code, _, err = run(capsys, "--schedule", str(path))
    assert code == 2
    assert "row 3, column 4" in err


def test_the_window_is_that_of_the_picture_and_of_the_svg(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "part.svg"
    _, out, _ = run(capsys, *SIZES, "--from", "10", "--to", "20", "--svg", str(path))
    assert "from 10 to 20 of 33; zoom with --from and --to" in out
    assert path.read_text() == gantt_svg.draw(simulated("1f1b"), 10, 20)


def test_the_memory_limit_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--schedule", "gpipe", *SIZES, "--memory-limit", "7")
    assert (code, err) == (1, "")
    assert out.splitlines()[-1] == ("above the memory limit: rank 0 holds 8 stage activations, the limit is 7")
    assert run(capsys, "--schedule", "gpipe", *SIZES, "--memory-limit", "8")[0] == 0
    code, out, err = run(capsys, "--schedule", "gpipe", *SIZES, "--memory-limit", "7", "--json", "-")
    assert (code, json.loads(out)["peak_in_flight"]) == (1, [8, 8, 8, 8])
    assert err.startswith("above the memory limit")
    assert run(capsys, "--schedule", "gpipe", *SIZES, "--memory-limit", "7", "--recompute")[0] == 0


@pytest.mark.parametrize(("given", "shares"), [("0.5,none,0,-", [0.5, None, 0.0, None]), ("none", None), ("1", 1.0)])
def test_recompute_is_for_all_or_for_each_chunk(given: str, shares: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SIZES, "--recompute", given, "--json", "-")
    assert code == 0
    assert json.loads(out) == simulated("1f1b", recompute=shares).document()
    for schedule in ("zb-v", "auto", "all"):
        whole = ["--whole-stages"] if schedule == "zb-v" else []
        code, _, err = run(capsys, "--schedule", schedule, *SIZES, "--recompute", given, *whole)
        assert (code, err) == (0, "")


def test_recompute_says_where_it_is_on(capsys: pytest.CaptureFixture[str]) -> None:
    mixed = " ".join(run(capsys, *SIZES, "--recompute", "0.5,none,0,-")[1].split())
    assert "recompute on 2 of 4 chunks, 0.0 % to 50.0 % kept" in mixed
    assert "recompute, 50.0 % kept" in run(capsys, *SIZES, "--recompute", "0.5")[1]
    assert "recompute" not in run(capsys, *SIZES)[1]
    for given, words in (("1,2", "got '2', expected a share from 0 to 1"), ("1,none", "expected 1 number, or 4: one")):
        code, out, err = run(capsys, *SIZES, "--recompute", given)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_auto_is_never_worse_than_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    costs = ["--forward", "1,2,1,1", "--memory-limit", "4"]
    code, out, _ = run(capsys, "--schedule", "auto", *SIZES, *costs, "--json", "-")
    document = json.loads(out)
    assert (code, document["schedule"]) == (0, "auto")
    assert max(document["peak_memory"]) <= 4
    _, table, _ = run(capsys, "--schedule", "all", *SIZES, *costs, "--json", "-")
    fitting = [one["makespan"] for one in json.loads(table)["schedules"] if max(one["peak_memory"]) <= 4]
    assert fitting
    assert document["makespan"] <= min(fitting)
    _, drawn, _ = run(capsys, "--schedule", "auto", *SIZES, *costs)
    assert "the best of " in drawn


# ---- all schedules


def test_all_is_a_row_per_schedule_over_equal_work(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--schedule", "all", *SIZES, "--memory-limit", "4")
    assert (code, err) == (0, "")
    lines = {
        line.split()[0]: line.split() for line in out.splitlines() if line.split()[:1] and line.split()[0] in NAMES
    }
    assert set(lines) == set(NAMES)
    makespans = [float(cells[2]) for cells in lines.values()]
    assert makespans == sorted(makespans)
    assert lines["1f1b"][1:] == ["1", "33", "72.7", "9", "27.3", "27.3", "4", "18", "yes"]
    assert lines["zb-v"][1:4] == ["2", "25.5", "94.1"]  # 24 of work, and an idle time of 3 half stages
    assert lines["gpipe"][-1] == "no"
    _, document, _ = run(capsys, "--schedule", "all", *SIZES, "--json", "-")
    work = {one["schedule"]: sum(one["busy"]) for one in json.loads(document)["schedules"]}
    assert set(work.values()) == {4 * 8 * 3.0}


def test_all_says_what_cannot_be_built(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--schedule", "all", "--stages", "4", "--microbatches", "7")
    assert code == 0
    below = out.split("Cannot be built for these sizes:")[1]
    assert below.split()[0] == "dualpipe-v:"
    _, text, _ = run(capsys, "--schedule", "all", "--stages", "4", "--microbatches", "7", "--json", "-")
    document = json.loads(text)
    assert document["schema"] == 1
    assert [one["schedule"] for one in document["left_out"]] == ["dualpipe-v"]
    assert "got 7" in document["left_out"][0]["reason"]
    assert len(document["schedules"]) == len(NAMES) - 1


def test_all_where_nothing_fits_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--schedule", "all", *SIZES, "--memory-limit", "0.5")[0] == 1


# ---- manners


@pytest.mark.parametrize("name", [*NAMES, "all", "auto"])
@pytest.mark.parametrize("more", [[], ["--forward", "1234.5678", "--transfer", "0.123", "--recompute"]])
def test_no_line_is_wider_than_80_columns(
    name: str, more: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        for sizes in (SIZES, ("--stages", "12", "--microbatches", "48"), ("--stages", "45", "--microbatches", "90")):
            if name == "auto" and sizes != SIZES:
                continue
            code, out, err = run(capsys, "--schedule", name, *sizes, *more, "--memory-limit", "100000")
            assert (code, err) == (0, "")
            assert [line for line in out.splitlines() if len(line.rstrip()) > 80] == []


def test_it_needs_no_torch_and_draws_in_plain_ascii(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None; from isostep import cli\n"
        "for name in ('zb-v', 'all', 'auto'):\n"
        "    assert cli.main(['simulate', '--schedule', name, '--stages', '2', '--microbatches', '4']) == 0\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env={"PYTHONIOENCODING": "ascii"}, timeout=60, check=False
    )
    assert finished.returncode == 0, finished.stderr.decode()
    assert finished.stdout.isascii()
    assert b"F0F1F2f0" in finished.stdout


def test_help_has_examples_and_names_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert out.count("  isostep simulate ") >= 5
    assert [name for name in (*NAMES, "all", "auto", ".csv") if name not in out] == []


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "--stages: got None"),
        (["--stages", "4"], "--microbatches: got None"),
        (["--stages", "0", "--microbatches", "8"], "'0'"),
        (["--stages", "4.5", "--microbatches", "8"], "'4.5'"),
        (["--stages", "5000", "--microbatches", "8"], "--stages: got 5000, expected at most 4,096"),
        (["--stages", "1000", "--microbatches", "1000000"], "16,666,666"),
        (["--stages", "4", "--microbatches", "9" * 5000], "999"),
        ([*SIZES, "--schedule", "nothing"], "'nothing'"),
        ([*SIZES, "--schedule", "no/such.csv"], "no/such.csv"),
        ([*SIZES, "--schedule", "x" * 9000], "xxx..."),
        ([*SIZES, "--chunks", "2"], "chunks: got 2"),
        ([*SIZES, "--schedule", "auto", "--chunks", "2"], "--chunks: got 2"),
        ([*SIZES, "--schedule", "auto", "--forward-only"], "--forward-only"),
        ([*SIZES, "--schedule", "auto", "--memory-limit", "0.1"], "memory-limit: got 0.1"),
        (["--schedule", "dualpipe-v", "--stages", "4", "--microbatches", "7"], "microbatches: got 7"),
        ([*SIZES, "--forward", "1,2"], "forward: got '2 numbers', expected 1 number, or 4"),
        ([*SIZES, "--input-grad", "1,2,3,4,5"], "input-grad: got '5 numbers'"),
        ([*SIZES, "--transfer", "1,2"], "transfer: got '2 numbers', expected 1 number, or 3: one for each link"),
        ([*SIZES, "--forward", ""], "''"),
        ([*SIZES, "--forward", "1,,2"], "'1,,2'"),
        ([*SIZES, "--forward", "nan"], "nan"),
        ([*SIZES, "--weight-grad", "inf"], "inf"),
        ([*SIZES, "--forward=-1"], "-1"),
        ([*SIZES, "--transfer=-1,2,2"], "-1"),
        ([*SIZES, "--schedule", "all", "--forward", "1,2,3,4,5,6,7,8"], "forward: got '8 numbers'"),
        ([*SIZES, "--memory-limit", "0"], "'0'"),
        ([*SIZES, "--memory-limit", "nan"], "'nan'"),
        ([*SIZES, "--from", "99"], "from: got 99"),
        ([*SIZES, "--from", "x"], "'x'"),
        ([*SIZES, "--from", "nan"], "from: got nan"),
        ([*SIZES, "--from", "5", "--to", "5"], "to: got 5"),
        ([*SIZES, "--width", "39"], "width: got 39"),
        ([*SIZES, "--width", "99999"], "width: got 99999"),
        ([*SIZES, "--json", "/no/such/folder/x"], "/no/such"),
        ([*SIZES, "--svg", "/no/such/folder/x"], "/no/such"),
        ([*SIZES, "--csv", "/"], "'/'"),
        ([*SIZES, "--trace", "-"], "'-'"),
        ([*SIZES, "--spans"], "--spans"),
        ([*SIZES, "--json", "x.json", "--trace", "x.json"], "x.json"),
        ([*SIZES, "--schedule", "all", "--svg", "x.svg"], "--svg"),
        ([*SIZES, "--schedule", "all", "--csv", "x.csv"], "--csv"),
        (["--stages", "64", "--microbatches", "9000", "--trace", "x.json"], "--trace: got '1,152,000 actions'"),
        (["--stages", "64", "--microbatches", "9000", "--spans", "--json", "x.json"], "--spans: got"),
        ([*SIZES, "more"], "more"),
        ([*SIZES, "--no-such-flag"], "--no-such-flag"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_2(
    args: list[str], named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert named in err
    assert len(err) < 500
    assert list(tmp_path.iterdir()) == [], "something was written before the refusal"


def test_what_contradicts_the_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(csv_file.text(generate("gpipe", 2, 3)))
    assert run(capsys, "--schedule", str(path), "--stages", "2", "--microbatches", "3", "--chunks", "1")[0] == 0
    for flag, got in (("--stages", "3"), ("--microbatches", "2"), ("--chunks", "2")):
        code, _, err = run(capsys, "--schedule", str(path), flag, got)
        assert code == 2
        assert f"{flag}: got {got}, expected" in err


def test_a_disk_that_is_full_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *SIZES, "--svg", "/dev/full")
    assert code == 1
    assert err.count("\n") == 1


def test_long_work_is_announced_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PATIENCE", 0.0)
    assert run(capsys, *SIZES)[2] == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
    seen = [run(capsys, "--stages", "64", "--microbatches", "512")[2] for _ in range(3)]
    assert any("simulating 1f1b" in err for err in seen)


def test_readme_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    shown = readme.split("--schedule zb-h1 --stages 4 --microbatches 6` prints:\n\n```text\n")[1].split("```")[0]
    code, out, _ = run(capsys, "--schedule", "zb-h1", "--stages", "4", "--microbatches", "6")
    assert code == 0
    assert [line.rstrip() for line in out.splitlines()] == shown.splitlines()


def test_whole_stages_are_the_numbers_of_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    costs = ["--forward", "1,2,1,3", "--transfer", "0.5", "--memory-limit", "4"]
    assert run(capsys, "--schedule", "all", *SIZES, *costs, "--json", str(file))[0] == 0
    documents = {document["schedule"]: document for document in json.loads(file.read_text())["schedules"]}
    for name in ("zb-v", "interleaved-1f1b", "1f1b"):
        one = tmp_path / "one.json"
        run(capsys, "--schedule", name, *SIZES, *costs, "--whole-stages", "--json", str(one))
        assert json.loads(one.read_text()) == documents[name]
    code, out, _ = run(capsys, "--schedule", "zb-v", *SIZES)
    assert (code, "of one chunk:" in out) == (0, True)


def test_the_cut_by_cost_under_other_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    layers = str(Path(__file__).parents[1] / "examples" / "layers.json")
    _, out, _ = run(capsys, "--layers", layers, *SIZES)
    command = out.split("under other schedules:\n")[1].split("\n\n")[0].replace("\\\n", " ")
    assert command.startswith("isostep simulate --schedule all")
    assert run(capsys, *command.split()[2:])[0] == 0


def test_layers_by_cost(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    layers = str(Path(__file__).parents[1] / "examples" / "layers.json")
    file = tmp_path / "cut.json"
    code, out, _ = run(capsys, "--layers", layers, *SIZES, "--json", str(file))
    assert code == 0
    assert "The slowest stage sets the cadence" in out
    document = json.loads(file.read_text())
    assert document["by_cost"]["cadence"] < document["equal_counts"]["cadence"]
    for more, named in (
        (["--forward", "2"], "--forward: got [2.0], expected not to be given with --layers"),
        (["--memory", "1"], "memory"),
        (["--from", "3"], "--from"),
    ):
        code, out, err = run(capsys, "--layers", layers, *SIZES, *more)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert named in err
    assert run(capsys, *SIZES, "--memory", "5")[0] == 2
    assert run(capsys, *SIZES, "--objective", "own-span")[0] == 2
