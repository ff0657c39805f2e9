"""The lab: its numbers are the library's, its files the repository's; a thousand requests that mean harm."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from isostep.explain.batch import batch_sizes
from isostep.explain.replicas import Replica, replica_update
from isostep.explain.tokens import token_weights
from isostep.lab.replicas import targets_text
from lab_server import APP, Asked, answer, faults, fuzzed, numbers, page

# ------------------------------------------------------------------------------------------- numbers on the pages


def test_replicas_golden_numbers() -> None:
    shown = numbers(page("/replicas"))
    update = replica_update([[0.0], [2.0], [4.0]])
    assert shown["exact.w_after"] == update.exact.w_after == pytest.approx(1.1, abs=1e-12)
    assert [shown[f"alone.{i}"] for i in range(3)] == pytest.approx([0.9, 1.1, 1.3], abs=1e-12)
    assert shown["mean_of_means.w_after"] == pytest.approx(1.1, abs=1e-12)


def test_replicas_unequal_portions() -> None:
    shown = numbers(page("/replicas", "unequal=1"))
    update = replica_update([[0.0], [2.0], [4.0]], [1, 1, 4])
    assert shown["exact.gradient"] == update.exact.gradient == -2
    assert shown["exact.w_after"] == pytest.approx(1.2, abs=1e-12)
    assert shown["mean_of_means.gradient"] == update.mean_of_means.gradient == -1


def test_replicas_other_state() -> None:
    text = page("/replicas", "replicas=2&w=-3&lr=0.5&y0=0,1&y1=2,4,6&fragment=1")
    update = replica_update([[0.0, 1.0], [2.0, 4.0, 6.0]], None, -3.0, 0.5)
    shown = numbers(text)
    assert shown["exact.w_after"] == update.exact.w_after
    assert shown["mean_of_means.gradient"] == update.mean_of_means.gradient != update.exact.gradient
    assert text.count('<g class="column">') == 2
    assert "<html" not in text


def test_a_replica_without_examples() -> None:
    text = page("/replicas", "unequal=1&n0=2&n1=0&n2=2")
    assert "no example" in text
    assert "NaN in torch" in text
    assert "mean.1" not in numbers(text)


def test_tokens_numbers() -> None:
    shown = numbers(page("/tokens"))
    loops = token_weights([[512, 1536]], [[2.0, 4.0]]).loops
    assert [shown[f"loss.{i}"] for i in range(6)] == [loop.loss for loop in loops]
    assert (shown["loss.0"], shown["loss.1"]) == (3.5, 3)
    for row in range(2):
        assert [shown[f"ratio.{row}.{i}"] for i in range(6)] == [float(loop.ratios[0][row] or 0) for loop in loops]


def test_the_tiles_of_tokens_are_multiples_of_the_exact_weight() -> None:
    """A scaled loop shows its scale, and not the 1 that its heaviest token has to its lightest."""
    text = page("/tokens", "counts=8,8+8,8&losses=")
    shown = numbers(text)
    for index, loop in enumerate(token_weights([[8, 8], [8, 8]]).loops):
        assert shown[f"least.{index}"] == float(loop.ratios[0][0] or 0)
        assert (shown[f"least.{index}"] == 1) == (loop.verdict == "exact"), loop.name
        assert f"most.{index}" not in shown
    uneven = numbers(page("/tokens"))
    assert (uneven["least.1"], uneven["most.1"]) == (pytest.approx(2 / 3), 2)


def test_default_losses_of_another_shape_are_left_out() -> None:
    for query in ("counts=1,7+3,5", "counts=1,7+3,5&losses=2,4"):
        text = page("/tokens", query)
        assert "The mean losses 2,4 are left out" in text
        assert "loss.0" not in numbers(text)
    text = page("/tokens", "counts=3,5")
    assert numbers(text)["loss.0"] == pytest.approx((3 * 2 + 5 * 4) / 8)
    assert "left out" not in text
    assert answer(APP, "/tokens", "counts=1,7+3,5&losses=2,5").status == 400


def test_replicas_that_coincide_share_a_label() -> None:
    text = page("/replicas", "replicas=8&y0=0&y1=2&y2=4&y3=1&y4=3&y5=5&y6=2&y7=0")
    labels = re.findall(r'<g class="dot alone">.*?<text[^>]*>([^<]*)</text>', text)
    assert labels == ["0, 7", "3", "1, 6", "4", "2", "5"]
    assert "<title>replica 0: w = 0.9, replica 7: w = 0.9</title>" in text
    one = page("/replicas", "replicas=4&y0=1&y1=1&y2=1&y3=1")
    assert "<text" in one
    assert re.findall(r'<g class="dot alone">.*?<text[^>]*>([^<]*)</text>', one) == ["0\N{EN DASH}3"]


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        ((0.0, 2.0), "y = 0, 2"),
        ((4.0,) * 4, "y = 4 (4 times)"),
        ((), "no example"),
        ((1.0, 1.0, 2.0, 3.0, 4.0), "y = 1 (2 times), …"),
        ((-1234.5678,) * 64, "y: 64 targets"),
        ((0.5, 1.25, 2.125, 3.0), "y = 0.5, 1.25, …"),
    ],
)
def test_targets_fit_their_box(targets: tuple[float, ...], text: str) -> None:
    assert targets_text(Replica(targets, 0.0, None, 0.0)) == text


def test_tokens_with_an_empty_microbatch() -> None:
    text = page("/tokens", "counts=0,8+4,4&losses=")
    assert "NaN" in text
    assert "ratio.0.0" not in numbers(text)


def test_batch_numbers() -> None:
    shown = numbers(page("/batch", "context=2048&examples=10000"))
    sizes = batch_sizes(2, 8, 2, 2, 1, 2048, 10_000)
    assert shown["examples.3"] == sizes.examples_per_update == 32
    assert shown["examples.2"] == sizes.examples_per_replica == 16
    assert shown["tokens.3"] == sizes.tokens_per_update
    assert shown["world_size"] == 4
    assert (shown["believed"], shown["gradient_scale"]) == (64, 0.5)


def test_worked_examples_are_the_files_of_the_repository() -> None:
    folder = Path(__file__).parents[1] / "examples" / "worked"
    index = page("/")
    names = sorted(path.name for path in folder.glob("*.py"))
    assert re.findall(r'href="/worked/([^"]+)" download', index) == names
    for name in names:
        content = (folder / name).read_text()
        assert page(f"/worked/{name}") == content
        assert content.splitlines()[0].strip('"') in index.replace("&#39;", "'")


# ------------------------------------------------------------------------------------------------- fuzz and bounds


def test_a_thousand_hostile_requests() -> None:
    requests = fuzzed(seed=20261130, count=1000)
    assert faults(APP, requests) == []
    statuses = {answer(APP, r.path, r.query.decode("latin-1"), method=r.method).status for r in requests[:60]}
    assert {200, 400} <= statuses, "the requests reach the pages, and are refused"


def test_control_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Asked("/replicas", b"w=5.5"), Asked("/tokens", b"counts=3&losses="), Asked("/batch", b"m=<script>")]
    assert faults(APP, requests) == []

    async def faulty(scope: Any, receive: Any, send: Any) -> None:
        if b"w=5.5" in scope["query_string"]:
            raise KeyError("planted")
        if b"counts=3" in scope["query_string"]:
            time.sleep(0.06)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["query_string"]})

    found = faults(faulty, requests, seconds=0.05)
    assert [fault.split(":")[0] for fault in found] == ["status 500", found[1].split(":")[0], "not escaped"]
    assert found[1].startswith("0.0")
