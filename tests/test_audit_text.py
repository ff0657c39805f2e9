"""The page of an audit, and its symptoms, on documents written by hand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from isostep.audit import text as page
from isostep.audit.document import (
    EXACT,
    EXACT_UP_TO_FACTOR,
    INEXACT,
    KINDS,
    NOT_OBSERVED,
    VERDICTS,
    WEIGHTINGS,
    Finding,
    Report,
    Update,
    Weight,
)
from isostep.audit.remedies import IDEAS, LIBRARIES, remedy
from isostep.audit.symptoms import SYMPTOMS, symptoms_markdown, symptoms_text
from isostep.audit.text import report_text

NAN = math.nan
WIDTH = 80
PAGE = Path(__file__).parent.parent / "docs" / "audit.md"


def weight(rank: int, index: int, tokens: int, of_one: float, exact: float, **others: Any) -> Weight:
    """A weight whose tokens weigh alike, unless told otherwise."""
    given = {"site": "/home/someone/project/train.py:41", "min": of_one, "max": of_one} | others
    return Weight(rank, index, given["site"], tokens, of_one, given["min"], given["max"], exact, of_one / exact)


def document(
    verdict: str = EXACT,
    updates: Sequence[Update] = (),
    findings: Sequence[Finding] = (),
    not_observed: Sequence[str] = (),
    **others: Any,
) -> dict[str, Any]:
    """A document as it comes back from a file."""
    given = {"weighting": "declared", "world": 1, "library": "pytorch"} | others
    report = Report(verdict, given["weighting"], given["world"], updates, findings, not_observed, given["library"])
    return json.loads(json.dumps(report.document(), allow_nan=False))


def mean_of_means(update: int = 0) -> Update:
    rows = [weight(0, 0, 10, 1 / 20, 1 / 110), weight(0, 1, 100, 1 / 200, 1 / 110)]
    return Update(update, 110, 3e-8, rows)


def lines_of(doc: dict[str, Any], width: int = WIDTH, **others: Any) -> list[str]:
    """The lines of a page: none too wide but those to paste, none with a trailing space."""
    lines = report_text(doc, width, **others).splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert all(len(line) <= width for line in lines), max(lines, key=len)
    return lines


def squeezed(lines: Sequence[str]) -> list[str]:
    return [" ".join(line.split()) for line in lines]


# --------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("verdict", "ending"),
    [
        (EXACT, "verdict: exact, 0 findings; exit code 0: nothing was found"),
        (EXACT_UP_TO_FACTOR, "verdict: exact up to factor, 0 findings; exit code 0: nothing was found"),
        (INEXACT, "verdict: inexact, 0 findings; exit code 1: something was found"),
        (NOT_OBSERVED, "verdict: not observed, 0 findings; exit code 3: not observed"),
    ],
)
def test_each_verdict_has_its_words_and_its_exit_code(verdict: str, ending: str) -> None:
    lines = lines_of(document(verdict))
    assert lines[-1] == ending
    assert page.VERDICTS[verdict] in " ".join(squeezed(lines))


def test_words_for_every_verdict_and_weighting() -> None:
    assert set(page.VERDICTS) == set(VERDICTS)
    assert set(page.JUDGED_BY) == set(WEIGHTINGS)
    for weighting in WEIGHTINGS:
        assert page.JUDGED_BY[weighting] in " ".join(squeezed(lines_of(document(weighting=weighting))))


def test_an_exact_page_whole() -> None:
    rows = [weight(rank, 0, tokens, 1 / 8, 1 / 8) for rank, tokens in enumerate((1, 7))]
    assert (
        report_text(document(EXACT, [Update(0, 8, 1.5e-16, rows)], world=2), WIDTH)
        == """\
audit
  verdict           exact: every token weighs what it should
  judged by         declared: what the loss calls say: a mean divides by its own
                    count, a sum by nothing, over the whole update
  ranks             2
  seen              1 update, 8 supervised tokens
  findings          0

update 0: 8 supervised tokens in 2 microbatches; residual 1.5e-16
  rank  microbatch  loss call    tokens  weight  x exact  <1 | >1
     0           0  train.py:41       1     1/8        1     |
     1           0  train.py:41       7     1/8        1     |

verdict: exact, 0 findings; exit code 0: nothing was found"""
    )


def test_an_empty_document() -> None:
    text = squeezed(lines_of(document(NOT_OBSERVED, not_observed=["no loss call was seen"])))
    assert "seen 0 updates, 0 supervised tokens" in text
    assert text[text.index("not observed") + 1] == "- no loss call was seen"
    assert "no loss call was seen" in squeezed(lines_of(document(EXACT, [Update(0, 0, NAN, [])])))


def test_a_finding_beside_exact_weights_is_exit_code_1() -> None:
    finding = Finding("scheduler-unit", None, 4.0, "the scheduler ran 16 times in 4 updates", "pass", None)
    lines = lines_of(document(EXACT, [mean_of_means()], [finding]))
    assert lines[-1] == "verdict: exact, 1 finding; exit code 1: something was found"


# --------------------------------------------------------------------------------------------- weights


def test_a_line_per_microbatch_and_marks_at_the_odd_ones() -> None:
    lines = lines_of(document(INEXACT, [mean_of_means()]))
    head = next(i for i, line in enumerate(lines) if line.startswith("  rank "))
    assert lines[head - 1] == "update 0: 110 supervised tokens in 2 microbatches; residual 3.0e-08"
    assert squeezed(lines[head + 1 : head + 3]) == [
        "0 0 train.py:41 10 1/20 5.5 |+++",
        "0 1 train.py:41 100 1/200 0.55 -|",
    ]
    assert lines[head].index("|") == lines[head + 1].index("|") == lines[head + 2].index("|")


@pytest.mark.parametrize(
    ("ratio", "marks"),
    [
        (1.0, "   |"),
        (1.0005, "   |"),
        (1.01, "   |+"),
        (2.0, "   |+"),
        (2.1, "   |++"),
        (100.0, "   |+++"),
        (0.5, "  -|"),
        (0.25, " --|"),
        (0.01, "---|"),
        (0.0, "---|"),
        (-1.0, "---|"),
        (None, "   ?"),
    ],
)
def test_marks(ratio: float | None, marks: str) -> None:
    assert page._marks(ratio) == marks


def test_numbers_that_are_none() -> None:
    row = Weight(0, 0, "train.py:1", 0, NAN, NAN, NAN, NAN, NAN)
    lines = lines_of(document(NOT_OBSERVED, [Update(0, 0, NAN, [row])]))
    assert "0 0 train.py:1 0 - - ?" in squeezed(lines)
    assert "update 0: 0 supervised tokens in 1 microbatch" in lines


def test_extremes_only_where_they_differ() -> None:
    alike = weight(0, 0, 8, 0.01234, 0.01234, min=0.01234, max=0.01234 * (1 + 1e-6))
    assert not any("min..max" in line for line in lines_of(document(EXACT, [Update(0, 8, NAN, [alike])])))
    apart = weight(0, 1, 8, 0.3, 0.3, min=0.111111, max=0.555555)
    lines = lines_of(document(INEXACT, [Update(0, 16, NAN, [alike, apart])]))
    assert any("min..max" in line for line in lines)
    assert squeezed(lines)[-4:-2] == ["0 0 train.py:41 8 0.01234 1 |", "0 1 train.py:41 8 0.3 0.111..0.556 1 |"]


def test_a_long_table_shows_the_odd_ones_and_counts_the_rest() -> None:
    """Three ranks of 40 microbatches; on rank 2 every seventh weighs a quarter."""
    rows = [
        weight(rank, i, 5, (1 / 2400 if rank == 2 and i % 7 == 0 else 1 / 600), 1 / 600)
        for rank in range(3)
        for i in range(40)
    ]
    lines = squeezed(lines_of(document(INEXACT, [Update(0, 600, NAN, rows)], world=3)))
    start = next(i for i, line in enumerate(lines) if line.startswith("rank microbatch")) + 1
    assert lines[start : start + 7] == [
        "0 0 train.py:41 5 1/600 1 |",
        "0 1 train.py:41 5 1/600 1 |",
        "0 2 train.py:41 5 1/600 1 |",
        "2 0 train.py:41 5 1/2400 0.25 --|",
        "2 7 train.py:41 5 1/2400 0.25 --|",
        "2 14 train.py:41 5 1/2400 0.25 --|",
        "... 114 more like these: 111 at 1, 3 at 0.25",
    ]


def test_a_long_table_of_different_ratios_shows_the_most_deviating() -> None:
    rows = [weight(0, i, 5, (1 + i / 100) / 600, 1 / 600) for i in range(120)]
    lines = squeezed(lines_of(document(INEXACT, [Update(0, 600, NAN, rows)]), most_rows=10))
    shown = [int(line.split()[1]) for line in lines if re.fullmatch(r"0 \d+ train.py.*", line)]
    assert shown == [0, 1, 2, *range(113, 120)]
    assert "... 110 more: ratios from 1.03 to 2.12" in lines


def test_a_table_that_fits_is_whole() -> None:
    rows = [weight(0, i, 5, 1 / 600, 1 / 600) for i in range(24)]
    text = report_text(document(EXACT, [Update(0, 120, NAN, rows)]))
    assert text.count("train.py:41") == 24
    assert "more" not in text


def test_many_updates_that_go_alike_are_counted() -> None:
    updates = [mean_of_means(k) for k in range(30)]
    updates[20] = Update(20, 110, NAN, [weight(0, 0, 110, 1 / 110, 1 / 110)])
    lines = lines_of(document(INEXACT, updates))
    titles = [line.split(":")[0] for line in lines if line.startswith("update ")]
    assert titles == ["update 0", "update 1", "update 20"]
    assert "... 27 more updates like these" in lines


def test_paths_are_cut_to_what_tells_them_apart() -> None:
    sites = ["/a/very/long/path/one/train.py:41", "/a/very/long/path/two/train.py:41", "/b/model.py:7"]
    assert sorted(page._tails(sites).values()) == ["model.py:7", "one/train.py:41", "two/train.py:41"]
    rows = [weight(0, i, 5, 1 / 15, 1 / 15, site=site) for i, site in enumerate(sites)]
    lines = squeezed(lines_of(document(EXACT, [Update(0, 15, NAN, rows)])))
    assert "0 0 one/train.py:41 5 1/15 1 |" in lines


@pytest.mark.parametrize("width", [60, 80, 120])
def test_long_names_and_numbers_stay_within_the_width(width: int) -> None:
    site = f"/{'folder/' * 20}a_file_with_a_very_long_name_indeed.py:123456"
    row = weight(7, 123, 1_234_567, 1.2345e-7, 1e-7, site=site, min=1.111e-8, max=9.999e-7)
    finding = Finding("mean-of-means", 0, 1.2345, "a word " * 40, remedy("mean-of-means", "accelerate"), site)
    lines = lines_of(document(INEXACT, [Update(0, 1_234_567, NAN, [row])], [finding]), max(width, 80))
    where = next(line for line in lines if line.startswith("  where"))
    assert where.endswith("long_name_indeed.py:123456")
    assert any("1.11e-08..1e-06" in line for line in lines)
    without = report_text(document(INEXACT, [Update(0, 1_234_567, NAN, [row])]), width)
    assert max(map(len, without.splitlines())) <= max(width, 80)


# --------------------------------------------------------------------------------------------- findings


def test_findings_of_one_kind_and_place_are_one() -> None:
    where = "/home/someone/project/train.py:41"
    lines_to_paste = remedy("mean-of-means", "ddp")
    findings = [
        Finding("mean-of-means", k, 5.5, f"update {k}: 10 tokens of 1/20", lines_to_paste, where) for k in range(4)
    ]
    findings.append(Finding("no-update", None, None, "", "", None))
    lines = lines_of(document(INEXACT, [mean_of_means(k) for k in range(4)], findings, library="ddp"))
    start = lines.index("finding 1: mean-of-means, every update, factor 5.5")
    assert squeezed(lines[start + 1 : start + 7]) == [
        "means each microbatch is averaged alone, so the tokens of a short",
        "one weigh more",
        f"where {where}",
        "seen update 0: 10 tokens of 1/20",
        "... and 3 more observations like it",
        "mend",
    ]
    pasted = lines[start + 7 : start + 7 + len(lines_to_paste.splitlines())]
    assert pasted == [f"    {line}" for line in lines_to_paste.splitlines()]
    assert "finding 2: no-update" in lines
    assert "  findings          2; remedies for ddp" in lines
    assert lines[-1].startswith("verdict: inexact, 2 findings;")


@pytest.mark.parametrize(
    ("updates", "every", "words"),
    [
        ([], [0, 1], ""),
        ([3], [3], "update 3"),
        ([0, 1], [0, 1], "every update"),
        ([1, 2], [0, 1, 2], "updates 1 to 2"),
        ([0, 2, 7], range(8), "updates 0, 2 and 7"),
        (list(range(0, 40, 2)), range(40), "20 updates from 0 to 38"),
    ],
)
def test_which_updates(updates: list[int], every: Sequence[int], words: str) -> None:
    assert page._when(updates, every) == words


def test_factors_that_differ_are_a_range() -> None:
    findings = [Finding("partial-group", k, factor, "", "pass", None) for k, factor in ((0, 0.75), (1, 0.5))]
    lines = lines_of(document(INEXACT, [mean_of_means(k) for k in range(3)], findings))
    assert "finding 1: partial-group, updates 0 to 1, factors from 0.5 to 0.75" in lines


def test_every_remedy_fits_the_page() -> None:
    for library in LIBRARIES:
        findings = [Finding(kind, 0, 2.0, "seen", remedy(kind, library, factor=2.0), None) for kind in KINDS]
        assert lines_of(document(INEXACT, [mean_of_means()], findings, library=library))


# --------------------------------------------------------------------------------------------- symptoms and docs


def test_symptoms_name_known_kinds() -> None:
    assert len(SYMPTOMS) == 5
    for symptom in SYMPTOMS:
        assert symptom.kinds
        assert set(symptom.kinds) <= set(KINDS)
        assert "|" not in symptom.complaint + symptom.look + symptom.mend, "it would end a cell of the table"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_symptoms_in_a_terminal(width: int) -> None:
    text = symptoms_text(width)
    assert max(map(len, text.splitlines())) <= width
    assert len(text.split("\n\n")) == len(SYMPTOMS)
    flat = " ".join(text.split())
    for symptom in SYMPTOMS:
        assert symptom.look in flat
        assert symptom.mend in flat
        assert all(kind in flat for kind in symptom.kinds)


def test_the_docs_have_the_table_of_symptoms() -> None:
    between = PAGE.read_text().split("<!-- symptoms: begin -->\n")[1].split("\n<!-- symptoms: end -->")[0]
    assert between == symptoms_markdown()


def test_the_docs_have_every_kind_with_its_meaning_and_what_mends_it() -> None:
    section = PAGE.read_text().split("## Kinds of finding")[1].split("## ")[0]
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", section, re.MULTILINE))
    assert list(rows) == list(KINDS)
    for kind, row in rows.items():
        meaning, example, mend = row.split(" | ")
        assert meaning == KINDS[kind]
        assert mend == IDEAS[kind]
        assert example


def test_the_docs_show_a_page_as_it_is_printed() -> None:
    shown = PAGE.read_text().split("<!-- report: begin -->\n```text\n")[1].split("\n```\n<!-- report: end -->")[0]
    evidence = (
        "a token of microbatch 1 on rank 0 (100 tokens) weighs 0.55 of what it should, one of microbatch 0 on rank 0 "
        "(10 tokens) 5.5"
    )
    finding = Finding("mean-of-means", 0, None, evidence, remedy("mean-of-means", "pytorch"), "train.py:41")
    assert shown == report_text(document(INEXACT, [mean_of_means()], [finding]), WIDTH)
