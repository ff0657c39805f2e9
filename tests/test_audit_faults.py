"""Training scripts as people write them, under an audit: a fault is named with its size, a right loop is left alone.

Every faulty script runs as it is and mended. The scripts, and what is right to say of them, are in audit_scripts.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from audit_harness import Auditors, auditors  # noqa: F401
from audit_scripts.table import AROUND, CASES, WEIGHTS, Case
from isostep.audit.document import KINDS, VERDICTS
from isostep.audit.text import report_text

SCRIPTS = Path(__file__).parent / "audit_scripts"
FACTOR_TOLERANCE = 0.01

QUIET_IN_SUBSET = {
    "ok_clip_norm",
    "ok_gan",
    "ok_scaler_accumulate",
    "ok_warmup_from_zero",
    "ok_ddp_global_count",
    "ok_per_example example",
    "ok_lbfgs",
    "mean_of_means_two_lengths --mended",
}


def _subset() -> set[str]:
    """The first script of each kind, if possible of that alone, and some in which nothing is wrong."""
    first: dict[str, str] = {}
    for case in sorted(CASES, key=lambda case: len(case.kinds)):
        for kind in case.kinds:
            first.setdefault(kind, case.name)
    return {*first.values(), *QUIET_IN_SUBSET}


def _parameters() -> list:
    subset = _subset()
    return [pytest.param(case, id=case.name, marks=() if case.name in subset else pytest.mark.grid) for case in CASES]


def test_the_table_has_every_kind_and_every_script() -> None:
    assert {kind for case in CASES for kind in case.kinds} == set(KINDS)
    assert {case.file for case in CASES} == {path.name for path in SCRIPTS.glob("*.py")} - {"table.py"}
    assert all(case.verdict in VERDICTS for case in CASES)
    assert {case.name for case in CASES} >= _subset()
    assert len({case.name for case in CASES}) == len(CASES)
    for case, mended in WEIGHTS + AROUND:
        assert case.kinds
        assert not mended.kinds


@pytest.mark.parametrize("case", _parameters())
def test_faults_are_named_and_right_loops_are_left_alone(auditors: Auditors, case: Case) -> None:  # noqa: F811
    report = auditors.audited(case.file, case.args, case.ranks, case.updates, case.weighting)
    findings = report["findings"]
    kinds = {finding["kind"] for finding in findings}
    assert kinds == case.kinds, findings
    assert report["verdict"] == case.verdict, report["not_observed"]
    if case.factor is not None:
        factors = [finding["factor"] for finding in findings if finding["kind"] in case.kinds]
        assert factors == [pytest.approx(case.factor, rel=FACTOR_TOLERANCE)] * len(factors)


def test_readme_shows_what_the_command_prints(auditors: Auditors) -> None:  # noqa: F811
    root = Path(__file__).parent.parent
    shown = (root / "README.md").read_text().split("prints:\n\n```text\naudit\n")[1].split("\n```")[0]
    printed = report_text(auditors.audited(root / "examples" / "accumulated_means.py", updates="2"), 88)

    def without_rounding(text: str) -> list[str]:
        return [re.sub(r"residual \S+", "residual", line) for line in text.splitlines()]

    assert without_rounding("audit\n" + shown) == without_rounding(printed)
