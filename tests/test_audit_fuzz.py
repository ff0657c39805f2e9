"""Random training loops under an audit: weights, verdict and findings against weights that are measured without it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from audit_fuzz import FAULTS, Batch, Case, Runners, Truth, case, complaints

CHUNK = 20
CHUNKS = 25
ORDINARY = 3
"""Chunks that `make test` runs."""


@pytest.fixture(scope="module")
def runners() -> Iterator[Runners]:
    workers = Runners()
    yield workers
    workers.close()


def _answer(runners: Runners, loop: Case) -> tuple[dict[str, Any], list[Truth]]:
    answer = runners.run([loop])[loop.seed]
    assert not isinstance(answer, str), answer
    return answer


@pytest.mark.parametrize(
    "chunk", [*range(ORDINARY), *(pytest.param(n, marks=pytest.mark.grid) for n in range(ORDINARY, CHUNKS))]
)
def test_fuzz(chunk: int, runners: Runners) -> None:
    cases = [case(seed) for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK)]
    failed, updates, observed = [], 0, 0
    for seed, answer in runners.run(cases).items():
        if isinstance(answer, str):
            failed.append(f"seed {seed}: {answer}")
            continue
        loop = cases[seed - chunk * CHUNK]
        document, truths = answer
        updates += len(truths[0].weights)
        observed += len(document["updates"])
        wrong = complaints(loop, document, truths)
        if wrong:
            failed.append("\n  ".join([f"seed {seed} ({loop.fault}, {loop.idiom}, {loop.sync}):", *wrong]))
    assert not failed, "\n".join(failed)
    assert observed >= 0.98 * updates


def test_every_fault_and_none_is_drawn() -> None:
    ordinary = [case(seed) for seed in range(ORDINARY * CHUNK)]
    assert {loop.fault for loop in ordinary} == {"none", *FAULTS}
    assert {loop.replicas for loop in ordinary} == {1, 2}
    assert case(7) == case(7)


FAULTY = Case(0, replicas=1, accumulate=2, classes=3, idiom="mean", sync="none", fault="mean-of-means", groups=())
"""Two updates of microbatches with 2 and 6 targets."""


def _faulty() -> Case:
    group = ((Batch(2, 4, (0, 5)), Batch(2, 4, (0, 1, 2, 4, 5, 7))),)
    return replace(FAULTY, groups=(group, group))


def test_the_checker_takes_a_right_report(runners: Runners) -> None:
    document, truths = _answer(runners, _faulty())
    assert complaints(_faulty(), document, truths) == []


def test_the_checker_complains_of_findings_where_there_is_no_fault(runners: Runners) -> None:
    document, truths = _answer(runners, _faulty())
    assert "finding mean-of-means" in complaints(replace(_faulty(), fault="none"), document, truths)


def test_the_checker_complains_of_a_fault_that_is_not_found(runners: Runners) -> None:
    document, truths = _answer(runners, _faulty())
    silent = document | {"findings": [], "verdict": "exact"}
    assert complaints(_faulty(), silent, truths) == ["verdict exact, true: inexact", "no finding of mean-of-means"]


def test_the_checker_complains_of_weights_of_another_loop(runners: Runners) -> None:
    sound = replace(_faulty(), fault="none", idiom="sum-global")
    document, truths = _answer(runners, _faulty())
    right, true = _answer(runners, sound)
    assert complaints(sound, right, true) == []
    assert any("weight 0.25, true 0.125" in text for text in complaints(sound, document, true))
    assert any("weight 0.125, true 0.25" in text for text in complaints(_faulty(), right, truths))


def test_the_checker_complains_of_a_weight_that_is_off_by_a_hundredth(runners: Runners) -> None:
    document, truths = _answer(runners, _faulty())
    bent = copy.deepcopy(document)
    bent["updates"][1]["weights"][0]["weight"] *= 1.01
    assert len(complaints(_faulty(), bent, truths)) == 1
    bent = copy.deepcopy(document)
    del bent["updates"][1]["weights"][0]
    assert complaints(_faulty(), bent, truths) == ["update 1, rank 0, microbatch 0, tokens: not reported"]
