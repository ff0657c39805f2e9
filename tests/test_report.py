"""`isostep report` and `isostep runs`: pictures of known curves, tables, exit codes, and no torch."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isostep.cli import main
from isostep.ledger import Resumed, RunEnded
from isostep.ledger.sheet import sheet, sheet_text
from isostep.report.plot import ASCII, plot, shares, sparkline
from isostep.report.text import report_text
from written_ledger import dropped, how, started, update, write, written

# ---------------------------------------------------------------------------------------------- plots


def test_sparkline_has_the_lowest_bar_for_the_lowest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([7, 7, 0, 0], width=2) == "█▁"
    assert sparkline([3, 3, 3]) == "▁▁▁"
    assert sparkline([math.nan, 0, math.inf, 7]) == "▁█"
    assert sparkline([]) == sparkline([math.nan]) == "-"


def dots(lines: list[str]) -> set[tuple[int, int]]:
    """(column, row) of every braille dot, as Unicode numbers them."""
    places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]
    found = set()
    for i, line in enumerate(lines):
        for j, character in enumerate(line):
            bits = ord(character) - 0x2800
            if 0 < bits < 256:
                found |= {(2 * j + dx, 4 * i + dy) for k, (dx, dy) in enumerate(places) if bits >> k & 1}
    return found


def canvas(lines: list[str]) -> list[str]:
    """The lines above the x axis, right of the y axis."""
    return [line[max(line.find("┤"), line.find("│")) + 1 :] for line in lines[:-2]]


def test_plot_draws_a_straight_line_straight() -> None:
    """From (0, 7) to (7, 0) on 4 x 2 characters, which are 8 x 8 dots: the diagonal."""
    lines = plot([(x, 7 - x) for x in range(8)], [], width=4 + 3 + 2, height=2, x_label="updates")
    assert [line.split()[0] for line in lines[:2]] == ["7", "0"]
    got = dots([line[-4:] for line in ("    " + c.ljust(4) for c in canvas(lines))])
    assert got >= {(0, 0), (7, 7)}
    assert {column for column, _ in got} == set(range(8))
    assert all(abs(column - row) <= 1 for column, row in got)


def test_plot_connects_and_marks() -> None:
    lines = plot([(0, 10.0), (100, 0.0)], [(50, 5.0)], width=60, height=10, x_label="examples applied")
    columns = {column for column, _ in dots(canvas(lines))}
    width = len(lines[-2]) - lines[-2].index("└") - 1
    mark = next(line.index("o") for line in canvas(lines) if "o" in line)
    assert abs(mark - width / 2) <= 1
    assert columns == set(range(2 * width)) - {2 * mark, 2 * mark + 1}
    assert lines[0].lstrip().startswith("10 ┤")
    assert lines[-3].lstrip().startswith("0 ┤")
    assert lines[-1].split() == ["0", "100", "examples", "applied"]
    assert max(map(len, lines)) <= 60


def test_plot_of_little() -> None:
    assert plot([], [], 40, 5, "x") == []
    assert plot([(1, math.nan)], [(1, math.inf)], 40, 5, "x") == []
    assert len(dots(canvas(plot([(0, 2.0)], [], 40, 5, "x")))) == 1
    assert sum(line.count("o") for line in canvas(plot([], [(3, 2.0)], 40, 5, "x"))) == 1


def test_shares_show_what_is_small_and_fill_the_bar() -> None:
    assert shares([("a", 50), ("b", 50)], 10) == "aaaaabbbbb"
    assert shares([("a", 9999), ("b", 1), ("c", 0)], 10) == "aaaaaaaaab"
    assert shares([("a", 0)], 10) == ""


# ---------------------------------------------------------------------------------------------- the report


def report(width: int = 90) -> str:
    events = written()
    return report_text(sheet(events), events, width)


def test_report_is_the_sheet_and_pictures() -> None:
    text = report()
    document = sheet(written())
    assert text.startswith(sheet_text(document, 90))
    assert "\x1b" not in text
    pictures = text[len(sheet_text(document, 90)) :]
    assert "4 updates applied" in pictures
    assert sum(line.count("o") for line in pictures.splitlines() if "│" in line or "┤" in line) == 3
    assert "learning rate   ▁▂▅█" in pictures  # updates 1, 2, 4 and 6 at 0.001 each
    assert "0.001 to 0.006, last 0.006" in pictures
    assert "0.5 to 2, last 1" in pictures


def test_superseded_updates_are_in_no_picture() -> None:
    """Losses that stand: 4.0 down to 1.5. Those that do not: 0.1 and 1.0, and a gradient norm of 9."""
    labels = [line.split("┤")[0].strip() for line in report().splitlines() if "┤" in line]
    assert labels == ["4", "2.75", "1.5"]
    assert "to 9" not in report()


def test_report_follows_the_axis_of_the_run() -> None:
    events = written()
    run = events[0].run  # type: ignore[attr-defined]
    events[0] = started(run=run | {"run": run["run"] | {"x_axis": "supervised_tokens"}})
    assert "100 supervised tokens applied" in report_text(sheet(events), events, 90)


def test_report_has_a_line_per_epoch() -> None:
    rows = [line for line in report().splitlines() if "10 of 10" in line]
    counts = [[row.count(character) for character in "█▒░x·"] for row in rows]
    assert [bool(n) for n in counts[0]] == [True, False, False, True, False]
    assert [bool(n) for n in counts[1]] == [True, True, False, True, False]
    assert [bool(n) for n in counts[2]] == [True, False, True, True, False]
    assert len({sum(n) for n in counts}) == 1
    unfinished = written()[:5]
    row = report_text(sheet(unfinished), unfinished, 90).splitlines()[-1]
    assert row.endswith("8 of 10")
    assert row.count("·") == pytest.approx(sum(map(row.count, "█·")) / 5, abs=1)


def test_report_of_many_epochs_shows_the_last() -> None:
    events: list[Any] = [started()]
    for epoch in range(30):
        events += [update(1, 2 * epoch + g, "applied", 2, 1, 4, 0, 1.0, 1.0, 1.0) for g in (1, 2)]
        events.append(dropped(1, epoch))
    text = report_text(sheet(events), events, 80)
    assert "... 18 epochs before" in text
    assert text.splitlines()[-1].startswith("  epoch 29 ")


@pytest.mark.parametrize(("asked", "given"), [(20, 80), (80, 80), (90, 90), (300, 100)])
def test_report_fits_the_width(asked: int, given: int) -> None:
    longest = max(map(len, report(asked).splitlines()))
    assert given - 6 <= longest <= given


def test_report_before_the_first_update() -> None:
    events = written()[:1]
    assert report_text(sheet(events), events, 80) == sheet_text(sheet(events), 80)


def test_everything_drawn_has_an_ascii_form() -> None:
    assert report().translate(ASCII).isascii()
    assert not report().isascii()


# ---------------------------------------------------------------------------------------------- isostep report


def isostep(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own that cannot import torch."""
    code = "import sys; sys.modules['torch'] = None; from isostep.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
    )


def test_report_needs_no_torch(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "one", written())
    finished = isostep("report", str(run_dir), "--json", str(tmp_path / "sheet.json"), env={"COLUMNS": "90"})
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout == report() + "\n"
    assert json.loads((tmp_path / "sheet.json").read_text()) == sheet(written()) | {"timeline": None}


def test_report_on_a_terminal_without_unicode(tmp_path: Path) -> None:
    finished = isostep("report", str(write(tmp_path / "one", written())), env={"PYTHONIOENCODING": "ascii"})
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "learning rate   _.+#" in finished.stdout


def test_runs_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path / "one", written())
    finished = isostep("runs", str(tmp_path))
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.splitlines()[1].split() == [
        "one", "complete", "trial", "4/6", "2.3000", "1", "1970-01-01", "00:16", "24", "s", "accepted",
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["report", "runs"])
def test_help_has_an_example(command: str) -> None:
    finished = isostep(command, "--help")
    assert finished.returncode == 0
    assert "example:" in finished.stdout


def test_report_as_json_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(write(tmp_path / "one", written())), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == sheet(written()) | {"timeline": None}


def test_report_of_a_coverage_that_is_not_proved_is_a_finding(tmp_path: Path, capsys: Any) -> None:
    assert main(["report", str(write(tmp_path / "one", [started(seed=9), *written()[1:]]))]) == 1
    assert "NOT proved" in capsys.readouterr().out


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert len(line) < 600
    return line


@pytest.mark.parametrize("case", ["missing", "no ledger", "corrupt", "no folder for json", "json is a folder"])
def test_bad_input_is_one_line_and_exit_2(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write(tmp_path / "one", written())
    match case:
        case "missing":
            args, named = [str(tmp_path / "nothing")], "nothing"
        case "no ledger":
            args, named = [str(tmp_path)], "ledger.jsonl"
        case "corrupt":
            with open(run_dir / "ledger.jsonl", "a") as file:
                file.write('{"event": "update_done"}\n')
            args, named = [str(run_dir)], f"line {len(written()) + 1}"
        case "no folder for json":
            args, named = [str(run_dir), "--json", "/no/such/folder/x"], "/no/such"
        case _:
            args, named = [str(run_dir), "--json", str(tmp_path)], "--json"
    assert main(["report", *args]) == 2
    assert named in one_line(capsys)


def test_a_run_that_died_before_it_began_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ledger.jsonl").touch()
    assert main(["report", str(tmp_path)]) == 1
    assert "died before it began" in one_line(capsys)


# ---------------------------------------------------------------------------------------------- isostep runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four runs, of which two are broken, and two folders that are not to be looked into."""
    write(tmp_path / "complete", written())
    write(tmp_path / "deep" / "er" / "killed", [started(time=9e8), *written()[1:7]])
    write(tmp_path / "complete" / "checkpoints" / "copy", written())
    write(tmp_path / ".trash" / "old", written())
    (tmp_path / "corrupt").mkdir()
    (tmp_path / "corrupt" / "ledger.jsonl").write_text("not a ledger\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "ledger.jsonl").touch()
    for name, seconds in (("corrupt", 8e8), ("empty", 7e8)):
        os.utime(tmp_path / name / "ledger.jsonl", (seconds, seconds))
    return tmp_path


def test_runs_lists_the_newest_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(folder), "--json", str(folder / "runs.json")]) == 0
    document = json.loads((folder / "runs.json").read_text())
    rows = document["runs"]
    assert document["schema"] == 1
    assert [(row["name"], row["state"]) for row in rows] == [
        ("deep/er/killed", "unfinished"), ("corrupt", "broken"), ("empty", "broken"), ("complete", "complete"),
    ]  # fmt: skip
    killed, complete = rows[0], rows[3]
    assert (killed["applied"], killed["planned"], killed["replicas"], killed["verdict"]) == (2, 6, 2, "not reached")
    assert (complete["validation_loss"], complete["wall_seconds"]) == (2.3, 24.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["run", "deep/er/killed", "corrupt", "empty", "complete"]
    assert lines[2].split()[1] == lines[3].split()[1] == "broken"
    (corrupt, empty) = lines[5:]
    assert corrupt.startswith("corrupt is broken: ")
    assert "line 1" in corrupt
    assert empty.startswith("empty is broken: ")


def test_runs_proves_nothing_and_is_quick(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isostep.ledger.sheet.prove_coverage", lambda *_: pytest.fail("coverage was proved"))
    assert main(["runs", str(folder)]) == 0


def test_the_folder_may_be_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(folder / "complete"), "--json", "-"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["runs"]] == [str(folder / "complete")]


def test_no_runs_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for args in ([], [str(tmp_path)]):
        assert main(["runs", *args]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("no runs in ")


@pytest.mark.parametrize("args", [["nothing"], [".", "--json", "/no/such/folder/x"]])
def test_bad_input_of_runs(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", *args]) == 2
    assert args[-1] in one_line(capsys)


def test_runs_shows_the_layout_that_came_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [*written()[:7], Resumed(time=2000, from_update=2, how=how(3)), RunEnded(time=2001, reason="stopped")]
    write(tmp_path / "one", events)
    assert main(["runs", str(tmp_path), "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert (row["replicas"], row["state"]) == (3, "stopped")
