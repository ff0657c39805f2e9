"""What a configuration asks for is what trains. Runs in this process, as the only worker of a launcher."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from command import difference, events_of, same_bits, updates_of, weights_of, write_data
from isostep.cli import main
from isostep.config import Config, load
from isostep.distributed import checkpoint
from isostep.distributed.checkpoint import folder_of
from isostep.ledger import (
    CheckpointAnnounced,
    Evaluated,
    Event,
    Ledger,
    OutOfMemory,
    Resumed,
    RunEnded,
    UpdateDone,
)
from isostep.models.decoder import Decoder

Train = Callable[..., int]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """train(folder, *flags): the exit code of a small run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    data = write_data(tmp_path / "examples.jsonl", 40)

    def run(folder: str, *flags: str) -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        budgets = {"--update.examples-per-update": "8", "--layout.examples-per-microbatch": "8"}
        for budget in budgets.keys() - flags:
            if budget.replace("examples", "tokens", 1) not in flags:
                flags = (budget, budgets[budget], *flags)
        arguments = f"""
            --run-dir {tmp_path / folder} --data.source {data} --model.context-length 90 --model.width 16
            --model.depth 2 --model.heads 2 --run.epochs 2 --schedule.total 40 --checkpoint.every 4
            --validation.every 4
        """
        return main(["train", *arguments.split(), *flags])

    yield run
    torch.set_num_threads(threads)


def losses(folder: Path) -> list[float]:
    return [update.loss for update in updates_of(folder) if update.loss is not None]


def validations(folder: Path) -> dict[int, float | None]:
    return {event.after_applied: event.loss for event in events_of(folder) if isinstance(event, Evaluated)}


def sheet_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "sheet.json").read_text())


def test_what_make_train_runs_is_a_configuration() -> None:
    config = load(str(Path(__file__).parent.parent / "examples" / "run.toml"))
    assert config.quality.accept_if
    assert config.model_copy(update={"quality": Config().quality, "layout": Config().layout}) == Config()


# ------------------------------------------------------------------------------------ optimizers and precision


@pytest.mark.parametrize(
    "flags",
    [
        ("--optimizer.name", "adamw"),
        ("--optimizer.name", "sgd", "--optimizer.learning-rate", "0.1"),
        ("--optimizer.name", "muon"),
        ("--precision.dtype", "bfloat16"),
        ("--precision.dtype", "float16"),
        ("--layout.activation-checkpointing",),
        ("--schedule.shape", "warmup-stable-decay"),
        ("--update.tokens-per-update", "300", "--schedule.unit", "examples"),
        ("--layout.tokens-per-microbatch", "128"),
    ],
    ids=lambda flags: " ".join(flags),
)
def test_it_learns_and_resumes_to_the_bit(train: Train, tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert train("whole", *flags) == 0
    updates = updates_of(tmp_path / "whole")
    assert validations(tmp_path / "whole")[len(updates)] < validations(tmp_path / "whole")[0]  # type: ignore[operator]
    assert train("parts", *flags, "--run.updates", "3") == 0
    assert train("parts", *flags) == 0
    assert same_bits(tmp_path / "whole", tmp_path / "parts")
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    saved = [event for event in events_of(tmp_path / "parts") if isinstance(event, CheckpointAnnounced)]
    assert saved[0].after_attempted == 3


def test_activation_checkpointing_changes_nothing(train: Train, tmp_path: Path) -> None:
    assert train("plain") == 0
    assert train("recomputed", "--layout.activation-checkpointing") == 0
    assert difference(tmp_path / "plain", tmp_path / "recomputed") < 1e-5


def test_float16_has_a_loss_scale_that_a_resume_keeps(train: Train, tmp_path: Path) -> None:
    assert train("half", "--precision.dtype", "float16", "--run.updates", "3") == 0
    assert train("half", "--precision.dtype", "float16", "--run.updates", "6") == 0
    scales = [update.loss_scale for update in updates_of(tmp_path / "half")]
    assert all(scale is not None for scale in scales)
    assert scales[3] == scales[2]


def test_the_learning_rate_follows_its_unit(train: Train, tmp_path: Path) -> None:
    linear = ("--schedule.shape", "linear", "--schedule.warmup", "0", "--optimizer.learning-rate", "1.0")
    assert train("tokens", *linear, "--schedule.unit", "supervised_tokens", "--schedule.total", "2000") == 0
    seen = 0
    for update in updates_of(tmp_path / "tokens"):
        assert update.learning_rates[0] == pytest.approx(1 - seen / 2000)
        seen += update.counters.supervised_tokens
    assert seen > 500


def test_the_average_of_weights_is_validated_kept_and_resumed(train: Train, tmp_path: Path) -> None:
    flags = ("--optimizer.ema-decay", "0.5")
    assert train("plain") == 0
    assert train("whole", *flags) == 0
    assert train("parts", *flags, "--run.updates", "3") == 0
    assert train("parts", *flags) == 0
    assert same_bits(tmp_path / "whole", tmp_path / "plain"), "the average changes no update"
    average = [torch.load(tmp_path / name / "average.pt", weights_only=True) for name in ("whole", "parts")]
    assert all(torch.equal(average[0][name], average[1][name]) for name in average[0])
    assert any(not torch.equal(average[0][k], w) for k, w in weights_of(tmp_path / "whole").items())
    last = len(updates_of(tmp_path / "whole"))
    assert validations(tmp_path / "whole")[last] != validations(tmp_path / "plain")[last]
    assert validations(tmp_path / "whole")[0] == validations(tmp_path / "plain")[0]


# ------------------------------------------------------------------------------------------------------- memory


def out_of_memory(monkeypatch: pytest.MonkeyPatch, *, training: int = 99, evaluation: int = 99) -> None:
    """Let forward fail above these numbers of examples."""
    forward = Decoder.forward

    def limited(self: Decoder, input_ids: torch.Tensor) -> torch.Tensor:
        if len(input_ids) > (training if self.training else evaluation):
            raise torch.OutOfMemoryError("simulated")
        return forward(self, input_ids)

    monkeypatch.setattr(Decoder, "forward", limited)


def events_of_memory(folder: Path) -> list[tuple[str, int, int]]:
    return [
        (event.during, event.examples_per_microbatch_before, event.examples_per_microbatch_after)
        for event in events_of(folder)
        if isinstance(event, OutOfMemory)
    ]


def test_out_of_memory_makes_smaller_microbatches_and_the_same_updates(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("small", "--layout.examples-per-microbatch", "2", "--layout.overlap", "false") == 0
    out_of_memory(monkeypatch, training=3)
    assert train("fallback", "--layout.overlap", "false") == 0
    assert events_of_memory(tmp_path / "fallback") == [("update", 8, 2)]
    assert same_bits(tmp_path / "small", tmp_path / "fallback")
    assert sheet_of(tmp_path / "fallback")["coverage"]["proved"]


def test_a_resume_keeps_the_size_that_fits_under_the_same_layout_alone(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_memory(monkeypatch, training=3)
    assert train("run", "--run.updates", "3") == 0
    assert train("run", "--run.updates", "5") == 0
    assert events_of_memory(tmp_path / "run") == [("update", 8, 2)]
    assert train("run", "--run.updates", "7", "--layout.examples-per-microbatch", "6") == 0
    assert events_of_memory(tmp_path / "run") == [("update", 8, 2), ("update", 6, 3)]


def test_validation_that_runs_out_of_memory_does_not_touch_training(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("plain") == 0
    out_of_memory(monkeypatch, evaluation=1)
    assert train("fallback") == 0
    assert events_of_memory(tmp_path / "fallback") == [("evaluation", 8, 1)]
    assert same_bits(tmp_path / "plain", tmp_path / "fallback")
    assert validations(tmp_path / "fallback") == pytest.approx(validations(tmp_path / "plain"), rel=1e-6)


def test_validation_that_never_fits_is_left_out(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("plain") == 0
    out_of_memory(monkeypatch, evaluation=0)
    assert train("without") == 0
    assert same_bits(tmp_path / "plain", tmp_path / "without")
    assert set(validations(tmp_path / "without").values()) == {None}
    assert "validation left out" in capsys.readouterr().out


def test_out_of_memory_in_the_optimizer_ends_the_run_and_it_resumes(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("whole") == 0
    with monkeypatch.context() as patch:
        step, calls = torch.optim.AdamW.step, []

        def failing(self: Any, *args: Any) -> Any:
            calls.append(1)
            if len(calls) == 6:
                raise torch.OutOfMemoryError("simulated")
            return step(self, *args)

        patch.setattr(torch.optim.AdamW, "step", failing)
        capsys.readouterr()
        assert train("run") == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "resume from the last checkpoint with fewer examples per microbatch" in line
    ended = events_of(tmp_path / "run")[-1]
    assert isinstance(ended, RunEnded)
    assert ended.reason == "failed"
    assert train("run") == 0
    resumed = next(event for event in events_of(tmp_path / "run") if isinstance(event, Resumed))
    assert resumed.from_update == 4, "the state after a half-done step is not saved"
    assert same_bits(tmp_path / "whole", tmp_path / "run")


def test_auto_takes_what_fits_and_trains_the_same_bits(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("three", "--layout.examples-per-microbatch", "3") == 0
    out_of_memory(monkeypatch, training=3)
    assert train("auto", "--layout.examples-per-microbatch", "auto", "--run.updates", "5") == 0
    assert train("auto", "--layout.examples-per-microbatch", "auto") == 0
    assert events_of_memory(tmp_path / "auto") == []
    assert same_bits(tmp_path / "three", tmp_path / "auto")


# -------------------------------------------------------------------------------------------- errors and signals


def at_call(monkeypatch: pytest.MonkeyPatch, call: int, act: Callable[[], None], *, training: bool = True) -> None:
    """Do something in the so many-th forward of training, or of validation."""
    forward, calls = Decoder.forward, []

    def watched(self: Decoder, input_ids: torch.Tensor) -> torch.Tensor:
        if self.training is training:
            calls.append(1)
            if len(calls) == call:
                act()
        return forward(self, input_ids)

    monkeypatch.setattr(Decoder, "forward", watched)


def fail(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def checkpoints_of(folder: Path) -> list[int]:
    return [event.after_attempted for event in events_of(folder) if isinstance(event, CheckpointAnnounced)]


@pytest.mark.parametrize("keep", ["1", "2"])
@pytest.mark.parametrize(
    ("update", "error"),
    [
        (5, ConnectionError("simulated")),  # right after the checkpoint that was due
        (7, ConnectionError("simulated")),
        (7, torch.OutOfMemoryError("simulated")),
    ],
    ids=str,
)
def test_what_was_applied_before_an_error_is_saved_once(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str, update: int, error: Exception
) -> None:
    flags = ("--layout.examples-per-microbatch", "1", "--checkpoint.keep", keep, "--update.examples-per-update", "1")
    flags = (*flags, "--run.updates", "9", "--layout.overlap", "false")
    assert train("whole", *flags) == 0
    with monkeypatch.context() as patch:
        at_call(patch, update, fail(error))
        assert train("run", *flags) == 1
    saved = sorted({4, update - 1})
    assert checkpoints_of(tmp_path / "run") == saved
    folders = sorted(folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir())
    assert folders == [Path(folder_of(after)).name for after in saved[-int(keep) :]]
    assert train("run", *flags) == 0
    assert next(e for e in events_of(tmp_path / "run") if isinstance(e, Resumed)).from_update == update - 1
    assert same_bits(tmp_path / "whole", tmp_path / "run")


def test_an_update_that_the_ledger_does_not_have_is_not_saved(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        append, seen = Ledger.append, []

        def full(self: Ledger, event: Event) -> None:
            seen.extend([event] if isinstance(event, UpdateDone) else [])
            if len(seen) == 7 and event is seen[-1]:
                raise OSError(28, "No space left on device")
            append(self, event)

        patch.setattr(Ledger, "append", full)
        assert train("run") == 1
    assert checkpoints_of(tmp_path / "run") == [4]
    assert train("run") == 0
    assert sheet_of(tmp_path / "run")["coverage"]["proved"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_validation_saves_and_the_validation_is_done_later(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    flags = ("--layout.examples-per-microbatch", "1", "--run.grace", "0", "--checkpoint.every", "3")
    assert train("whole", *flags) == 0
    with monkeypatch.context() as patch:
        at_call(patch, 4, lambda: os.kill(os.getpid(), number), training=False)  # the first of the second validation
        assert train("run", *flags) == 130
    assert checkpoints_of(tmp_path / "run") == [3, 4]
    assert sorted(validations(tmp_path / "run")) == [0]
    assert train("run", *flags) == 0
    assert same_bits(tmp_path / "whole", tmp_path / "run")
    assert validations(tmp_path / "run") == validations(tmp_path / "whole")


def test_nobody_waits_for_a_slow_disk(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is due while one is under way is taken after a later update."""
    digest = checkpoint._digest

    def slow(path: Path) -> str:
        time.sleep(0.2)
        return digest(path)

    monkeypatch.setattr(checkpoint, "_digest", slow)
    assert train("run", "--checkpoint.every", "1", "--validation.every", "0") == 0
    taken = checkpoints_of(tmp_path / "run")
    assert taken[-1] == 10
    assert 2 <= len(taken) < 8


# ----------------------------------------------------------------------------------------------- what is told


def test_the_quality_rule_is_judged(train: Train, tmp_path: Path) -> None:
    rule = ("--quality.axis", "updates", "--quality.accept-if")
    assert train("good", *rule, "< 5.4 at 8") == 0
    assert train("bad", *rule, "< 0.1 at 8") == 0
    assert sheet_of(tmp_path / "good")["quality"]["verdict"] == "accepted"
    assert sheet_of(tmp_path / "bad")["quality"]["verdict"] == "rejected"


def test_the_ledger_has_the_configuration_of_the_run(train: Train, tmp_path: Path) -> None:
    assert train("run", "--run.purpose", "accepted") == 0
    document = sheet_of(tmp_path / "run")
    assert document["purpose"] == "accepted"
    assert document["what"]["update"]["examples_per_update"] == 8
    assert document["facts"]["schedule"].startswith("cosine to 0 over")


def test_a_changed_what_that_is_allowed_is_recorded(train: Train, tmp_path: Path) -> None:
    assert train("run", "--run.updates", "3") == 0
    assert train("run", "--run.updates", "5", "--optimizer.learning-rate", "0.001") == 2
    assert train("run", "--run.updates", "5", "--optimizer.learning-rate", "0.001", "--allow-changed-what") == 0
    resumed = next(event for event in events_of(tmp_path / "run") if isinstance(event, Resumed))
    assert resumed.what_override
    assert resumed.changes["optimizer.learning_rate"] == [0.003, 0.001]
    assert "optimizer.learning_rate" in (tmp_path / "run" / "sheet.txt").read_text()


def test_a_schedule_that_follows_the_length_is_said_aloud(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--schedule.total", "none")
    assert train("run", *flags, "--run.epochs", "1") == 0
    capsys.readouterr()
    assert train("run", *flags, "--run.epochs", "2") == 0
    said = capsys.readouterr().out
    assert "changed: facts.schedule was 'cosine to 0 over 5 updates" in said
    assert "is 'cosine to 0 over 9 updates, after 1 of warm-up'" in said
    assert sheet_of(tmp_path / "run")["facts"]["schedule"] == "cosine to 0 over 9 updates, after 1 of warm-up"
    assert train("run", *flags, "--run.epochs", "3") == 0
    assert "facts.schedule was 'cosine to 0 over 9" in capsys.readouterr().out


def test_what_may_not_be_meant_is_said(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("short", "--schedule.total", "4") == 0
    assert "note: the schedule ends before the run: after 4 of 10 updates" in capsys.readouterr().out
    assert train("far", "--quality.axis", "updates", "--quality.accept-if", "< 1 at 99") == 0
    said = capsys.readouterr().out
    assert "note: the run ends before the schedule: after 10 of 40 updates" in said
    assert "note: the quality rule '< 1 at 99' lies beyond the run's end at 10 updates" in said
    assert train("plain", "--schedule.total", "10") == 0
    assert "note:" not in capsys.readouterr().out


def test_last_group_drop_is_recorded_once_per_epoch(train: Train, tmp_path: Path) -> None:
    assert train("run", "--update.last-group", "drop", "--run.updates", "5") == 0
    assert train("run", "--update.last-group", "drop") == 0
    document = sheet_of(tmp_path / "run")
    assert document["coverage"]["proved"]
    assert document["updates"]["attempted"] == 8
    assert document["last_group"]["partial_groups"] == 2
