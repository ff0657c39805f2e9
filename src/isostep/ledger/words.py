"""Numbers, sizes and times in words, for sheets and reports."""

from __future__ import annotations

import time
from typing import Any


def find(document: Any, *keys: str) -> Any:
    """The value under nested keys; None where some level lacks one."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def number(value: Any) -> str:
    """A loss or a norm in four decimals; "-" for none. A float that JSON has no number for comes as text."""
    return "-" if value is None else f"{float(value):.4f}"


def whole(value: float | None) -> str:
    """A count with separators; a median may end in .5."""
    return "-" if value is None else f"{value:,.1f}".removesuffix(".0")


def mebibytes(value: int | None) -> str:
    """Bytes as MiB."""
    return "-" if value is None else f"{value / 2**20:,.0f} MiB"


def duration(seconds: float | None) -> str:
    """Seconds in the two units that matter: 4.2 s, 1 min 13 s, 2 h 5 min, 3 d 4 h."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, large, small_size, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        units = round(seconds / small_size)
        if units * small_size >= size:
            first, rest = divmod(units, size // small_size)
            return f"{first:,} {large} {rest} {small}" if rest else f"{first:,} {large}"
    return f"{seconds:.0f} s"


def moment(unix_seconds: float) -> str:
    """A time as date and time of day, in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(float(unix_seconds)))
    except (ValueError, OverflowError, OSError):
        return "-"


def stages_of(how: dict[str, Any]) -> int:
    """P of a layout; 1 where it does not say."""
    stages = how.get("stages")
    return stages if isinstance(stages, int) and stages > 0 else 1
