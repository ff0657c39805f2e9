"""The report of an audit as a page of text, readable at 80 columns and without colour. Imports no torch."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from ..units import count
from .document import EXACT, EXACT_UP_TO_FACTOR, INEXACT, KINDS, NOT_OBSERVED, exit_code

NARROWEST = 60
LABEL = 20
"""Columns of a label, its indent included."""

ODD = 1e-3
"""How far a ratio may be from 1 before it gets a mark."""

MOST_MARKS = 3
MARKS = "<1 | >1"
"""The head of the bar of marks."""

SAME = 3
"""Rows of the same kind that are shown of a long table."""

MOST_UPDATES = 6
MOST_EVIDENCE = 600
"""Characters of it."""

MOST_REMEDIES = 2
"""Of findings of one kind; they differ in numbers at most, or in the cause of a factor."""

SITE = (12, 28)
"""Columns of a loss call: at least, at most."""

VERDICTS = {
    EXACT: "every token weighs what it should",
    EXACT_UP_TO_FACTOR: "the tokens of an update weigh what they should, up to one factor that they share",
    INEXACT: "tokens do not weigh what they should",
    NOT_OBSERVED: "the weights could not be read, so nothing is said about them",
}

JUDGED_BY = {
    "declared": "what the loss calls say: a mean divides by its own count, a sum by nothing, over the whole update",
    "token": "each token weighs the same",
    "example": "each example weighs the same",
    "microbatch": "each microbatch weighs the same",
}

EXITS = {0: "nothing was found", 1: "something was found", 3: "not observed"}

Row = Mapping[str, Any]


def report_text(document: dict[str, Any], width: int = 88, most_rows: int = 24) -> str:
    """The document of `Report` for people.

    Args:
        document: as `Report.document` gives it; None stands for a number that is none.
        width: columns of text; 60 at least. Lines to paste are not wrapped.
        most_rows: weights that are shown of one update; of more, the ordinary ones are counted.
    """
    width = max(NARROWEST, width)
    sections = [
        _header(document, width),
        *_updates(document["updates"], width, most_rows),
        *_findings(document, width),
        _not_observed(document["not_observed"], width),
        _last(document),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


# --------------------------------------------------------------------------------------------- frame


def _header(document: dict[str, Any], width: int) -> list[str]:
    updates, verdict = document["updates"], document["verdict"]
    findings = len(_alike(document))
    tokens = sum(update["tokens"] for update in updates)
    library = "" if document["library"] == "pytorch" else f"; remedies for {document['library']}"
    rows = [
        ("verdict", f"{_words(verdict)}: {VERDICTS[verdict]}"),
        ("judged by", f"{document['weighting']}: {JUDGED_BY[document['weighting']]}"),
        ("ranks", f"{document['world']:,}"),
        ("seen", f"{count(len(updates), 'update')}, {count(tokens, 'supervised token')}"),
        ("findings", f"{findings:,}{library if findings else ''}"),
    ]
    return ["audit", *(line for label, text in rows for line in _labelled(label, text, width))]


def _last(document: dict[str, Any]) -> list[str]:
    """The verdict again, and the exit code, by the rule of `Report`."""
    code = exit_code(document["verdict"], len(document["findings"]))
    found = count(len(_alike(document)), "finding")
    return [f"verdict: {_words(document['verdict'])}, {found}; exit code {code}: {EXITS[code]}"]


def _not_observed(names: Sequence[str], width: int) -> list[str]:
    lines = [line for name in names for line in _wrapped("  - ", name, width)]
    return ["not observed", *lines] if lines else []


def _words(verdict: str) -> str:
    return verdict.replace("-", " ")


def _labelled(label: str, text: str, width: int) -> list[str]:
    return _wrapped(f"{'  ' + label:<{LABEL - 1}} ", text, width)


def _wrapped(head: str, text: str, width: int) -> list[str]:
    """The text behind its head, going on below itself; its own line ends are kept."""
    lines, below = [], " " * len(head)
    for part in text.splitlines() or [""]:
        first = below if lines else head
        lines += textwrap.wrap(part, width, initial_indent=first, subsequent_indent=below, break_on_hyphens=False) or [
            first.rstrip()
        ]
    return lines


# --------------------------------------------------------------------------------------------- weights


def _updates(updates: Sequence[Row], width: int, most_rows: int) -> Iterator[list[str]]:
    """A table per update. Of many updates, the first ones and those that go otherwise than every one before."""
    tails = _tails(row["site"] for update in updates for row in update["weights"])
    patterns = [frozenset(_signature(row) for row in update["weights"]) for update in updates]
    shown: list[int] = []
    for i, pattern in enumerate(patterns):
        new = all(pattern != patterns[j] for j in shown)
        if len(updates) <= MOST_UPDATES or i < 2 or (new and len(shown) < MOST_UPDATES):
            shown.append(i)
            yield list(_update(updates[i], tails, width, most_rows))
    if len(shown) < len(updates):
        like = " like these" if set(patterns) == {patterns[i] for i in shown} else ""
        yield [f"... {count(len(updates) - len(shown), 'more update')}{like}"]


def _update(update: Row, tails: Mapping[str, str], width: int, most_rows: int) -> Iterator[str]:
    rows = update["weights"]
    microbatches = len({(row["rank"], row["microbatch_index"]) for row in rows})
    residual = "" if update["residual"] is None else f"; residual {update['residual']:.1e}"
    tokens = count(update["tokens"], "supervised token")
    yield f"update {update['update']}: {tokens} in {count(microbatches, 'microbatch')}{residual}"
    if not rows:
        yield "  no loss call was seen"
        return
    shown = _shown(rows, most_rows)
    yield from _table([rows[i] for i in shown], tails, width)
    if len(shown) < len(rows):
        yield "  " + _rest(rows, shown)


def _table(rows: Sequence[Row], tails: Mapping[str, str], width: int) -> Iterator[str]:
    """A line per loss call, microbatch and rank; the column of loss calls takes what the others leave."""
    whole = all(_one_over(row["weight"]) for row in rows if row["weight"])
    ranges = [_range(row, whole) for row in rows]
    head = ["rank", "microbatch", "loss call", "tokens", "weight", *(["min..max"] if any(ranges) else []), "x exact"]
    cells = [head] + [
        [
            str(row["rank"]),
            str(row["microbatch_index"]),
            tails[row["site"]],
            f"{row['tokens']:,}",
            _weight(row["weight"], whole),
            *([span] if any(ranges) else []),
            _number(row["ratio"]),
        ]
        for row, span in zip(rows, ranges, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    room = width - sum(widths) + widths[2] - 2 * len(widths) - 2 - len(MARKS)
    marked = room >= min(SITE[0], widths[2])  # else the bar gives way
    widths[2] = min(widths[2], SITE[1], max(SITE[0], room))
    for row, line in zip([None, *rows], cells, strict=True):
        line[2] = _cut(line[2], widths[2])
        texts = [f"{c:<{w}}" if i == 2 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        marks = MARKS if row is None else _marks(row["ratio"])
        yield f"  {'  '.join(texts)}  {marks if marked else ''}".rstrip()


def _shown(rows: Sequence[Row], most: int) -> list[int]:
    """Which rows of a long table to show: a few of each kind, and of those the first ones and the most deviating."""
    if len(rows) <= most:
        return list(range(len(rows)))
    of_kind: Counter[Any] = Counter()
    few = []
    for i, row in enumerate(rows):
        of_kind[_signature(row)] += 1
        if of_kind[_signature(row)] <= SAME:
            few.append(i)
    few.sort(key=lambda i: (of_kind[_signature(rows[i])] == 0, i >= SAME, -_deviation(rows[i]["ratio"]), i))
    return sorted(few[: max(1, most)])


def _rest(rows: Sequence[Row], shown: Sequence[int]) -> str:
    """What is not shown, by its ratios."""
    shown_kinds = {_signature(rows[i]) for i in shown}
    rest = [row for i, row in enumerate(rows) if i not in set(shown)]
    ratios = Counter(_number(row["ratio"]) for row in rest)
    numbers = sorted(row["ratio"] for row in rest if row["ratio"] is not None)
    like = " like these" if all(_signature(row) in shown_kinds for row in rest) else ""
    if len(ratios) <= 4:
        spread = ", ".join(f"{many:,} at {ratio}" for ratio, many in ratios.most_common())
    else:
        spread = f"ratios from {_number(numbers[0])} to {_number(numbers[-1])}"
    return f"... {len(rest):,} more{like}: {spread}"


def _signature(row: Row) -> Any:
    """What makes two rows look the same: the loss call, the ratio, and whether its tokens weigh alike."""
    return row["site"], _number(row["ratio"]), bool(_range(row))


def _deviation(ratio: float | None) -> float:
    """How far a ratio is from 1, in doublings."""
    if ratio is None:
        return 0.0
    return abs(math.log2(ratio)) if ratio > 0 else math.inf


def _marks(ratio: float | None) -> str:
    """A bar to the left or right of the middle, a mark per doubling begun; ? where there is nothing to judge by."""
    if ratio is None:
        return " " * MOST_MARKS + "?"
    if abs(ratio - 1) <= ODD:
        return " " * MOST_MARKS + "|"
    marks = MOST_MARKS if ratio <= 0 else min(MOST_MARKS, max(1, math.ceil(_deviation(ratio) - ODD)))
    return f"{'-' * marks if ratio < 1 else '':>{MOST_MARKS}}|{'+' * marks if ratio > 1 else ''}"


def _range(row: Row, whole: bool = False) -> str:
    """The extremes of the weights of a row, where they differ."""
    low, high = row["min"], row["max"]
    if low is None or high is None or high - low <= ODD * max(abs(low), abs(high)):
        return ""
    return f"{_weight(low, whole, 3)}..{_weight(high, whole, 3)}"


def _weight(weight: float | None, whole: bool, digits: int = 4) -> str:
    """1/110 where all weights of a table are one over a whole number, as a decimal otherwise."""
    return (
        f"1/{_one_over(weight)}" if whole and weight and weight < 1 and _one_over(weight) else _number(weight, digits)
    )


def _one_over(weight: float) -> int | None:
    """The whole number below one million whose inverse a weight is, as far as float32 tells."""
    inverse = 1 / weight
    return round(inverse) if 0.5 < inverse < 1e6 and abs(inverse - round(inverse)) <= 1e-5 * inverse else None


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _tails(sites: Iterable[str]) -> dict[str, str]:
    """The shortest end of each path that no other path has: train.py:41, or a/train.py:41 beside b/train.py:41."""
    every = set(sites)
    tails = {}
    for site in every:
        parts = PurePath(site).parts
        ends = ["/".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        others = [f"/{PurePath(other)}" for other in every if other != site]
        tails[site] = next((e for e in ends if not any(o.endswith(f"/{e}") for o in others)), site)
    return tails


def _cut(text: str, width: int) -> str:
    """At most `width` columns; the end of a path tells most."""
    return text if len(text) <= width else f"...{text[3 - width :]}"


# --------------------------------------------------------------------------------------------- findings


def _alike(document: dict[str, Any]) -> list[list[Row]]:
    """The findings, those of one kind at one place together."""
    alike: dict[Any, list[Row]] = {}
    for finding in document["findings"]:
        alike.setdefault((finding["kind"], finding["where"]), []).append(finding)
    return list(alike.values())


def _findings(document: dict[str, Any], width: int) -> Iterator[list[str]]:
    every = [update["update"] for update in document["updates"]]
    for i, findings in enumerate(_alike(document), 1):
        yield list(_finding(i, findings, every, width))


def _finding(number: int, findings: Sequence[Row], every: Sequence[int], width: int) -> Iterator[str]:
    first = findings[0]
    updates = sorted({f["update"] for f in findings if f["update"] is not None})
    title = [f"finding {number}: {first['kind']}", _when(updates, every), _factors(f["factor"] for f in findings)]
    yield from _wrapped("", ", ".join(part for part in title if part), width)
    yield from _labelled("means", KINDS[first["kind"]], width)
    if first["where"]:
        yield from _labelled("where", _cut(first["where"], width - LABEL), width)
    evidence = list(dict.fromkeys(f["evidence"] for f in findings))
    if first["evidence"]:
        more = f"\n... and {count(len(evidence) - 1, 'more observation')} like it" if len(evidence) > 1 else ""
        yield from _labelled("seen", textwrap.shorten(first["evidence"], MOST_EVIDENCE) + more, width)
    remedies = dict.fromkeys(f["remedy"] for f in findings if f["remedy"])
    for remedy in list(remedies)[:MOST_REMEDIES]:
        yield "  mend"
        yield from (f"    {line}".rstrip() for line in remedy.splitlines())


def _when(updates: Sequence[int], every: Sequence[int]) -> str:
    """every update, update 3, updates 0 to 5, updates 0, 2 and 7."""
    if len(updates) > 1 and set(updates) >= set(every):
        return "every update"
    if len(updates) <= 1:
        return "".join(f"update {update}" for update in updates)
    if all(b == a + 1 for a, b in pairwise(updates)):
        return f"updates {updates[0]} to {updates[-1]}"
    if len(updates) > 6:
        return f"{count(len(updates), 'update')} from {updates[0]} to {updates[-1]}"
    return f"updates {', '.join(map(str, updates[:-1]))} and {updates[-1]}"


def _factors(factors: Iterable[float | None]) -> str:
    numbers = sorted(factor for factor in factors if factor is not None)
    if not numbers:
        return ""
    low, high = _number(numbers[0]), _number(numbers[-1])
    return f"factor {low}" if low == high else f"factors from {low} to {high}"
