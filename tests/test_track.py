"""Trackers, on stand-ins for the two packages that record how they are called."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from isostep.errors import InputError
from isostep.report.track import trackers

CONFIG = {"optimizer": {"learning_rate": 0.003}, "run": {"epochs": 2}}
PLACE = {"updates": 3, "examples": 96, "supervised_tokens": 7000}
Calls = list[tuple[str, Any]]


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls: Calls = []

    class SummaryWriter:
        def __init__(self, log_dir: str, purge_step: int | None) -> None:
            calls.append(("init", (log_dir, purge_step)))

        def add_text(self, tag: str, text: str, global_step: int) -> None:
            calls.append(("text", (tag, text, global_step)))

        def add_scalar(self, tag: str, value: float, global_step: int) -> None:
            calls.append(("scalar", (tag, value, global_step)))

        def close(self) -> None:
            calls.append(("close", None))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return calls


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls: Calls = []

    class Run:
        def define_metric(self, name: str, **kwargs: Any) -> None:
            calls.append(("define", (name, kwargs)))

        def log(self, values: dict[str, Any]) -> None:
            calls.append(("log", values))

        def finish(self) -> None:
            calls.append(("finish", None))

    def init(**kwargs: Any) -> Run:
        calls.append(("init", kwargs))
        return Run()

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def named(calls: Calls, name: str) -> list[Any]:
    return [value for called, value in calls if called == name]


@pytest.mark.parametrize(("axis", "x"), PLACE.items())
def test_tensorboard_is_told_at_the_axis(axis: str, x: int, tensorboard: Calls, tmp_path: Path) -> None:
    (tracker,) = trackers(["tensorboard"], tmp_path, axis, CONFIG)
    tracker.log({"loss": 2.5, "norm": None, "rate": 0.1}, **PLACE)
    tracker.close()
    assert named(tensorboard, "init") == [(str(tmp_path / "tensorboard"), None)]
    assert named(tensorboard, "scalar") == [("loss", 2.5, x), ("rate", 0.1, x)]
    assert tensorboard[-1] == ("close", None)
    ((tag, text, _),) = named(tensorboard, "text")
    assert tag == "configuration"
    assert "| optimizer.learning_rate | 0.003 |" in text


def test_tensorboard_hides_what_a_resume_does_again(tensorboard: Calls, tmp_path: Path) -> None:
    """What was told of the checkpoint's own place stands; the next place is the first that is hidden."""
    trackers(["tensorboard"], tmp_path, "examples", CONFIG, resumed_at=64)
    assert named(tensorboard, "init") == [(str(tmp_path / "tensorboard"), 65)]
    trackers(["tensorboard"], tmp_path, "examples", CONFIG, resumed_at=0)
    assert named(tensorboard, "init")[1][1] == 1


@pytest.mark.parametrize("axis", PLACE)
def test_wandb_is_told_the_axis_and_the_place(axis: str, wandb: Calls, tmp_path: Path) -> None:
    run_dir = tmp_path / "first"
    run_dir.mkdir()
    (tracker,) = trackers(["wandb"], str(run_dir), axis, CONFIG)
    tracker.log({"loss": 2.5, "norm": None}, **PLACE)
    tracker.close()
    (init,) = named(wandb, "init")
    assert (init["dir"], init["name"], init["resume"], init["config"]) == (str(run_dir), "first", "allow", CONFIG)
    assert ("*", {"step_metric": axis}) in named(wandb, "define")
    assert named(wandb, "log") == [{"loss": 2.5, **PLACE}]
    assert wandb[-1] == ("finish", None)


def test_wandb_continues_under_the_id_in_the_run_directory(wandb: Calls, tmp_path: Path) -> None:
    for name in ("one", "one", "two"):
        (tmp_path / name).mkdir(exist_ok=True)
        trackers(["wandb"], tmp_path / name, "updates", CONFIG)
    first, again, other = (init["id"] for init in named(wandb, "init"))
    assert first == again == (tmp_path / "one" / "wandb-id.txt").read_text().strip()
    assert first != other


def test_wandb_that_cannot_be_reached_is_one_line(
    wandb: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("api_key not configured\n(no-tty)")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(InputError, match=r"^wandb: got 'RuntimeError: api_key [^\n]*; run `wandb login`[^\n]*$"):
        trackers(["wandb"], tmp_path, "updates", CONFIG)


def test_several_trackers_in_order(tensorboard: Calls, wandb: Calls, tmp_path: Path) -> None:
    made = trackers(["wandb", "tensorboard"], tmp_path, "updates", CONFIG)
    for tracker in made:
        tracker.log({"loss": 1.0}, **PLACE)
    assert len(made) == 2
    assert named(wandb, "log")
    assert named(tensorboard, "scalar")
    assert trackers([], tmp_path, "updates", CONFIG) == []


def test_a_tracker_is_closed_if_the_next_one_fails(tensorboard: Calls, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tracker: got 'nothing', expected one of tensorboard, wandb"):
        trackers(["tensorboard", "nothing"], tmp_path, "updates", CONFIG)
    assert tensorboard[-1] == ("close", None)


def test_an_unknown_axis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="x_axis: got 'hours'"):
        trackers([], tmp_path, "hours", CONFIG)


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_named_with_its_install(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError) as caught:
        trackers([name], tmp_path, "updates", CONFIG)
    assert f"no {name}" in str(caught.value)
    assert "pip install isostep[track]" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="tensorboard is installed")
def test_torch_without_tensorboard_is_a_missing_package(tmp_path: Path) -> None:
    """The real import, through torch, which fails in its own way."""
    with pytest.raises(InputError, match="pip install isostep"):
        trackers(["tensorboard"], tmp_path, "updates", CONFIG)


def test_importing_the_module_imports_neither_package() -> None:
    assert "isostep.report.track" in sys.modules
    assert "wandb" not in sys.modules
