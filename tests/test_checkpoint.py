"""Checkpoints: what goes in comes out, whole or not at all, and only what is durable is announced."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from isostep import InputError, IsostepError, Updater, groups, mse
from isostep.distributed import checkpoint as module
from isostep.distributed.checkpoint import CheckpointWriter, folder_of, load_tensors, manifest_of
from isostep.recipe.state import Held, capture, restore
from pool import Pool


def _model(width: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def _data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, generator=generator), torch.randn(1, generator=generator)) for _ in range(24)]


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda m: [torch.optim.AdamW(m.parameters(), lr=0.1)],
    "sgd": lambda m: [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)],
    "two": lambda m: [torch.optim.SGD(m[0].parameters(), lr=0.1), torch.optim.Adam(m[2].parameters(), lr=0.1)],
    "muon": lambda m: [
        torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=0.1),
        torch.optim.AdamW([p for p in m.parameters() if p.dim() != 2], lr=0.1),
    ],
}


def _training(kind: str, process_group: Any) -> tuple[nn.Module, list[Any], Updater]:
    model = _model()
    optimizers = OPTIMIZERS[kind](model)
    return model, optimizers, Updater(model, optimizers, mse, process_group=process_group)


def _run(updater: Updater, stop: int) -> None:
    plan = groups(_data(), examples_per_update=4, examples_per_microbatch=2, start=updater.cursor)  # type: ignore[arg-type]
    for group in plan:
        if updater.totals.attempted >= stop:
            return
        updater.update(group)


def _resumed(group: Any, kind: str, folder: str, with_state: bool) -> tuple[list[Any], list[Any], list[str]]:
    """Weights of a run that never stopped, and of one that went through a checkpoint after its third update."""
    whole, _, updater = _training(kind, group)
    _run(updater, 6)
    model, optimizers, updater = _training(kind, group)
    _run(updater, 3)
    tensors, state = capture(Held.whole({"model": model}), optimizers, updater)
    announced: list[str] = []
    writer = CheckpointWriter(Path(folder), 2, group, lambda after, path, digest: announced.append(path))
    writer.start(tensors, {"state": state}, 3)
    _run(updater, 4)  # what is written must not see it
    writer.finish()
    path = Path(folder, folder_of(3))
    document = json.loads(json.dumps(manifest_of(path)["state"]))
    model, optimizers, updater = _training(kind, group)
    tensors = load_tensors(path, torch.device("cpu"), group)
    if not with_state:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}
    restore(Held.whole({"model": model}), optimizers, updater, tensors, document)
    assert updater.totals.attempted == 3
    _run(updater, 6)
    return [p.detach().clone() for p in whole.parameters()], [p.detach().clone() for p in model.parameters()], announced


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_resume_gives_the_same_bits(pool: Pool, tmp_path: Path, kind: str) -> None:
    ((whole, resumed, announced),) = pool.run(1, _resumed, kind, str(tmp_path), True)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    assert announced == [folder_of(3)]


@pytest.mark.parametrize("kind", ["adamw", "sgd", "two", "muon"])
def test_control_without_optimizer_state_the_bits_differ(pool: Pool, tmp_path: Path, kind: str) -> None:
    ((whole, resumed, _),) = pool.run(1, _resumed, kind, str(tmp_path), False)
    assert not all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def _written(group: Any, folder: str, keep: int, numbers: list[int]) -> list[int]:
    announced: list[int] = []
    writer = CheckpointWriter(Path(folder), keep, group, lambda after, path, digest: announced.append(after))
    for number in numbers:
        writer.start({"x": torch.full((3,), float(number))}, {}, number)
    writer.finish()
    return announced


def test_the_last_ones_are_kept(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(1, _written, str(tmp_path), 2, [1, 2, 3, 4]) == [[1, 2, 3, 4]]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["update-00000003", "update-00000004"]


def _announced_when(group: Any, folder: str) -> tuple[list[str], list[str]]:
    """What is announced, and what exists, while the last rename is held up and after it."""
    held, go = threading.Event(), threading.Event()
    rename = Path.rename

    def slow(self: Path, target: Any) -> Path:
        held.set()
        go.wait(20)
        return rename(self, target)

    Path.rename = slow  # type: ignore[method-assign]
    try:
        announced: list[str] = []
        writer = CheckpointWriter(Path(folder), 2, group, lambda after, path, digest: announced.append(path))
        writer.start({"x": torch.ones(3)}, {}, 1)
        assert held.wait(20)
        writer.poll()
        before = [*announced, *(p.name for p in Path(folder, "checkpoints").iterdir())]
        go.set()
        writer.finish()
        return before, [*announced, *(p.name for p in Path(folder, "checkpoints").iterdir())]
    finally:
        go.set()
        Path.rename = rename  # type: ignore[method-assign]


def test_announced_only_when_it_has_its_name(pool: Pool, tmp_path: Path) -> None:
    ((before, after),) = pool.run(1, _announced_when, str(tmp_path))
    assert before == ["update-00000001.partial"]
    assert after == [folder_of(1), "update-00000001"]


def _on_a_full_disk(group: Any, folder: str) -> tuple[str, list[int], list[str]]:
    announced: list[int] = []
    writer = CheckpointWriter(Path(folder), 2, group, lambda after, path, digest: announced.append(after))
    writer.start({"x": torch.ones(3)}, {}, 1)
    writer.finish()
    digest = module._digest

    def full(path: Path) -> str:
        raise OSError(28, "No space left on device")

    module._digest = full
    try:
        writer.start({"x": torch.ones(3)}, {}, 2)
        writer.finish()
    except IsostepError as error:
        return str(error), announced, [p.name for p in Path(folder, "checkpoints").iterdir()]
    finally:
        module._digest = digest
    raise AssertionError("no error")


def test_a_failed_save_is_one_line_and_leaves_the_last_one(pool: Pool, tmp_path: Path) -> None:
    ((text, announced, left),) = pool.run(1, _on_a_full_disk, str(tmp_path))
    assert "No space left on device" in text
    assert "\n" not in text
    assert announced == [1]
    assert left == ["update-00000001"]


def _cleared(group: Any, folder: str) -> list[str]:
    for name in ("update-00000001", "update-00000002", "update-00000003.partial"):
        Path(folder, "checkpoints", name).mkdir(parents=True)
    writer = CheckpointWriter(Path(folder), 2, group, lambda after, path, digest: None)
    writer.clear([folder_of(1)])
    return [p.name for p in Path(folder, "checkpoints").iterdir()]


def test_what_was_not_announced_is_removed_at_the_next_start(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(1, _cleared, str(tmp_path)) == [["update-00000001"]]


def _foreign(group: Any) -> list[str]:
    """Messages of restoring another model, another optimizer, and a checkpoint that lacks a tensor."""
    model, optimizers, updater = _training("adamw", group)
    _run(updater, 2)
    tensors, state = capture(Held.whole({"model": model}), optimizers, updater)
    messages = []
    wide = _model(5)
    wide_optimizers = OPTIMIZERS["adamw"](wide)
    other, other_optimizers, other_updater = _training("adamw", group)
    cases: list[Any] = [
        ({"model": wide}, wide_optimizers, Updater(wide, wide_optimizers, mse, process_group=group), tensors),
        ({"model": other}, other_optimizers, other_updater, {k: v for k, v in tensors.items() if "0.bias" not in k}),
        ({"model": other}, other_optimizers, other_updater, tensors | {"optimizer.1.0.bias.x": torch.ones(1)}),
    ]
    for modules, foreign_optimizers, foreign_updater, held in cases:
        try:
            restore(Held.whole(modules), foreign_optimizers, foreign_updater, dict(held), json.loads(json.dumps(state)))
        except InputError as error:
            messages.append(str(error))
    return messages


def test_a_checkpoint_of_another_model_is_one_line(pool: Pool) -> None:
    (messages,) = pool.run(1, _foreign)
    assert len(messages) == 3
    assert all("\n" not in message for message in messages)
    assert "0.bias" in messages[1]
    assert "optimizer.1" in messages[2]
