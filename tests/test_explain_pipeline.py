"""`isostep explain pipeline`: its golden numbers, its closed form, its drawing, and what it does with bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isostep import cli
from isostep.errors import InputError
from isostep.explain.pipeline import Pipeline, Training, closed_form, pipeline

WORKED = Path(__file__).parent.parent / "examples" / "worked" / "pipeline_forward.py"
GPIPE, ONE_F_ONE_B = range(2)


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["explain", "pipeline", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rows(model: Pipeline) -> list[str]:
    """The wave as text: 0 1 2 3 . ."""
    return [" ".join("." if cell is None else str(cell) for cell in row) for row in model.forward.wave]


# ---- the model


def test_four_microbatches_through_three_stages_take_six_ticks() -> None:
    model = pipeline()
    assert (model.stages, model.num_microbatches, model.forward.ticks) == (3, 4, 6)
    assert model.forward.busy_share == model.closed_form == Fraction(2, 3)
    assert rows(model) == ["0 1 2 3 . .", ". 0 1 2 3 .", ". . 0 1 2 3"]


def test_training_of_four_microbatches_on_three_stages() -> None:
    """By hand: 6 ticks of forward and 12 of backward; gpipe's microbatch 0 comes back last but three."""
    gpipe, one_f_one_b = pipeline().training
    assert gpipe == Training("gpipe", 18, Fraction(2, 3), (4, 4, 4), 13.5, 15)
    assert one_f_one_b == Training("1f1b", 18, Fraction(2, 3), (3, 2, 1), 10, 13)


def test_worked_example_prints_the_same_wave_and_numbers() -> None:
    result = subprocess.run([sys.executable, WORKED], capture_output=True, text=True, timeout=100, check=True)
    forward = pipeline().forward
    right = [line.split("  ")[-1] for line in result.stdout.split("right:")[1].splitlines()[1:]]
    assert right == rows(pipeline())
    assert f"right: {forward.ticks} ticks, busy {float(forward.busy_share):.3f}" in result.stdout
    alone = f"{forward.ticks_one_at_a_time} ticks, busy {float(forward.busy_share_one_at_a_time):.3f}"
    assert f"fault: {alone}" in result.stdout


@given(st.integers(1, 12), st.integers(1, 40))
@settings(max_examples=40)
def test_simulation_agrees_with_the_closed_form(stages: int, num_microbatches: int) -> None:
    model = pipeline(stages, num_microbatches)
    ticks = num_microbatches + stages - 1
    assert model.forward.ticks == ticks
    assert model.forward.busy_share == model.closed_form == Fraction(num_microbatches, ticks)
    for choice in model.choices:
        m = choice.num_microbatches
        for training in choice.schedules:
            assert training.busy_share == choice.closed_form == Fraction(m, m + stages - 1)
            assert training.ticks == 3 * (m + stages - 1)
        assert choice.schedules[GPIPE].in_flight == (m,) * stages
        assert choice.schedules[ONE_F_ONE_B].in_flight == tuple(min(m, stages - stage) for stage in range(stages))
        assert choice.schedules[ONE_F_ONE_B].latency_worst <= choice.schedules[GPIPE].latency_worst


def test_control_the_closed_form_of_one_stage_more_does_not_agree() -> None:
    model = pipeline(5, 7)
    assert model.forward.busy_share == closed_form(5, 7)
    assert model.forward.busy_share not in (closed_form(6, 7), closed_form(4, 7), closed_form(5, 8))


@given(st.integers(1, 8), st.integers(1, 20))
@settings(max_examples=20)
def test_wave_runs_every_microbatch_once_on_every_stage_one_tick_later(stages: int, num_microbatches: int) -> None:
    for stage, row in enumerate(pipeline(stages, num_microbatches).forward.wave):
        assert row == (None,) * stage + tuple(range(num_microbatches)) + (None,) * (stages - 1 - stage)


def test_more_microbatches_buy_busy_time_and_cost_gpipe_alone_memory_and_latency() -> None:
    choices = pipeline(4, 8).choices
    assert [choice.num_microbatches for choice in choices] == [1, 2, 4, 8, 16, 32]
    assert [choice.num_microbatches for choice in pipeline(16, 5).choices] == [1, 2, 4, 5, 8, 16, 32, 64]
    for few, more in pairwise(choices):
        assert more.closed_form > few.closed_form
        assert max(more.schedules[GPIPE].in_flight) > max(few.schedules[GPIPE].in_flight)
        assert more.schedules[GPIPE].latency_worst > few.schedules[GPIPE].latency_worst
    full = [choice.schedules[ONE_F_ONE_B] for choice in choices if choice.num_microbatches >= 4]
    assert {training.in_flight for training in full} == {(4, 3, 2, 1)}
    assert len({training.latency_worst for training in full}) == 1


@pytest.mark.parametrize(("stages", "num_microbatches"), [(0, 1), (65, 1), (1, 0), (1, 257)])
def test_model_refuses_what_it_does_not_draw(stages: int, num_microbatches: int) -> None:
    with pytest.raises(InputError, match="a whole number from 1 to"):
        pipeline(stages, num_microbatches)


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], ["6 ticks, busy 2/3", "stage 1   .  0  1  2  3  .", "12 ticks, busy 1/3", "rank 0", "2/3 = 0.667"]),
        (["--stages", "1", "--microbatches", "1"], ["1 stage, 1 microbatch; forward: 1 tick, busy 1"]),
        (["--stages", "4", "--microbatches", "16"], ["4 3 2 1", "16/19 = 0.842", "rank 3"]),
        (["--microbatches", "23"], ["isostep simulate --schedule 1f1b --stages 3 --microbatches 23"]),
        (["--stages", "13"], ["... and 1 stage more, not drawn", "4 to 1"]),
        (["--stages", "64", "--microbatches", "256"], ["stages more, not drawn", "ticks more, not drawn", "64 to 1"]),
    ],
)
def test_drawing_fits_80_columns(
    arguments: list[str], shown: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        code, out, err = explain(capsys, *arguments)
        assert (code, err) == (0, "")
        assert [text for text in shown if text not in out] == []
        assert [line for line in out.splitlines() if len(line.rstrip()) > 80] == []
        assert "The update is the same whatever M is" in out
        assert "Not shown: speed, quality, optimizer state" in out


@pytest.mark.parametrize("stages", [1, 3, 8])
def test_charts_that_are_drawn_are_whole(stages: int, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = explain(capsys, "--stages", str(stages), "--microbatches", str(25 - stages))
    assert out.count("rank 0") == 2
    assert "zoom" not in out


def test_table_shows_the_simulation_beside_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = explain(capsys)
    table = dict(re.findall(r"^ *(\d+) +\d+ +([\d/]+) +[\d.]+ ", out, re.MULTILINE))
    assert table == {"1": "1/3", "2": "1/2", "4": "2/3", "8": "4/5", "16": "8/9", "32": "16/17"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--stages", "0"], "--stages"),
        (["--stages", "65"], "stages: got 65"),
        (["--microbatches", "257"], "microbatches: got 257"),
        (["--microbatches=-1"], "-1"),
        (["--microbatches", "1.5"], "1.5"),
        (["--stages", "9" * 5000], "--stages"),
        (["--replicas", "2"], "--replicas"),
        (["--json", "/nowhere/file.json"], "/nowhere/file.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = explain(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("isostep")
    assert named in err
    assert len(err) < 300


def test_json_alone_on_stdout_and_the_same_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = explain(capsys, "--json", "-")
    document = json.loads(out)
    assert (code, document["schema"], document["explain"]) == (0, 1, "pipeline")
    assert document["forward"]["wave"][1] == [None, 0, 1, 2, 3, None]
    assert document["forward"]["busy_share"] == pytest.approx(2 / 3)
    assert document["training"][ONE_F_ONE_B]["in_flight"] == [3, 2, 1]
    file = tmp_path / "explain.json"
    _, drawn, _ = explain(capsys, "--json", str(file))
    assert "Not shown" in drawn
    assert json.loads(file.read_text(encoding="utf-8")) == document


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = explain(capsys, "--help")
    assert code == 0
    assert "  isostep explain pipeline" in out


def test_needs_no_torch_and_draws_in_plain_ascii() -> None:
    script = (
        "import sys; from isostep import cli\n"
        "assert cli.main(['explain', 'pipeline']) == 0 and 'torch' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii"},
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout.isascii()
