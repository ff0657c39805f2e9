"""What the SVG pictures share: the style sheet, the frame with its time axis, legends, numbers as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

from ..explain.draw import number
from .drawing import axis_step, axis_times

CHARACTER = 0.58
"""Width of a character of the interface font, at most, by its size."""

_RULES: tuple[tuple[str, str, str, str], ...] = (
    # selector, property, light, dark
    (".page", "fill", "#ffffff", "#12161b"),
    (".lane", "fill", "#eceff3", "#222932"),
    (".grid", "stroke", "#c9d0d9", "#3a444f"),
    ("text", "fill", "#1b2430", "#e6eaef"),
    ("text.quiet", "fill", "#566270", "#a3aeba"),
    ("rect.f.l0", "fill", "#073f6e", "#c4e2fa"),
    ("rect.f.l1", "fill", "#0b62a8", "#62aeea"),
    ("rect.f.l2", "fill", "#8dbfe8", "#2d6ea8"),
    ("rect.f.l3", "fill", "#cde3f6", "#204d78"),
    ("rect.b.l0", "fill", "#7a3000", "#ffd9bd"),
    ("rect.b.l1", "fill", "#b64a00", "#f0935a"),
    ("rect.b.l2", "fill", "#f2ab78", "#ad5520"),
    ("rect.b.l3", "fill", "#fadcc6", "#7a3d17"),
    ("rect.i.l0", "fill", "#8a5a00", "#ffeec2"),
    ("rect.i.l1", "fill", "#eaa400", "#f2bf45"),
    ("rect.i.l2", "fill", "#f8d27a", "#8f6a14"),
    ("rect.i.l3", "fill", "#fdeec9", "#65490a"),
    ("rect.w.l0", "fill", "#004f3b", "#c3efdf"),
    ("rect.w.l1", "fill", "#00775a", "#4dbf9b"),
    ("rect.w.l2", "fill", "#7fcbb1", "#18795e"),
    ("rect.w.l3", "fill", "#cdece1", "#0f5744"),
    ("rect.f.l2, rect.f.l3", "stroke", "#0b62a8", "#62aeea"),
    ("rect.b.l2, rect.b.l3", "stroke", "#b64a00", "#f0935a"),
    ("rect.i", "stroke", "#9a6a00", "#f2bf45"),
    ("rect.w.l2, rect.w.l3", "stroke", "#00775a", "#4dbf9b"),
    ("text.l0, text.l1", "fill", "#ffffff", "#10151a"),
    ("text.l2, text.l3", "fill", "#10151a", "#ffffff"),
    ("text.i.l1", "fill", "#10151a", "#10151a"),
    (".link.f", "stroke", "#0b62a8", "#8ec5f2"),
    (".link.b", "stroke", "#b64a00", "#f4b088"),
    (".held", "fill", "#c9d9ec", "#2b4561"),
    (".held-line", "stroke", "#0b62a8", "#62aeea"),
    (".over .held", "fill", "#f6d3cf", "#5c2b27"),
    (".over .held-line", "stroke", "#b3261e", "#f28b82"),
    (".limit", "stroke", "#b3261e", "#f28b82"),
)


def _style(name: str = ".isostep-gantt") -> str:
    def rules(column: int) -> str:
        lines = []
        for rule in _RULES:
            selectors = ", ".join(f"{name} {part}" for part in rule[0].split(", "))
            lines.append(f"{selectors} {{ {rule[1]}: {rule[column]}; }}")
        return "\n".join(lines)

    shapes = f"""\
{name} {{ font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }}
{name} text {{ font-size: 12px; font-variant-numeric: tabular-nums; }}
{name} text.heading {{ font-size: 15px; font-weight: 600; }}
{name} text.label {{ font-size: 11px; text-anchor: middle; }}
{name} text.small {{ font-size: 9px; }}
{name} text.middle {{ text-anchor: middle; }}
{name} text.end {{ text-anchor: end; }}
{name} rect.l2, {name} rect.l3, {name} rect.i {{ stroke-width: 0.75; }}
{name} .grid {{ stroke-width: 1; }}
{name} .link {{ fill: none; stroke-width: 1; stroke-opacity: 0.75; }}
{name} .held-line {{ fill: none; stroke-width: 1.5; }}
{name} .limit {{ stroke-width: 1.5; stroke-dasharray: 5 4; }}
"""
    return f"{shapes}{rules(2)}\n@media (prefers-color-scheme: dark) {{\n{rules(3)}\n}}\n"


STYLE = _style()
"""The style sheet of every picture, light and dark; each rule begins with .isostep-gantt."""


@dataclass(frozen=True)
class Frame:
    """Where time lies on a picture."""

    width: float
    left: float
    """x of the start of the window; the end lies `right` from the other edge."""
    start: float
    end: float
    right: float = 20.0

    @property
    def span(self) -> float:
        """Width of the whole window."""
        return self.width - self.left - self.right

    def x(self, time: float) -> float:
        """Where a time lies, times outside the window at its edges."""
        share = (time - self.start) / (self.end - self.start) if self.end > self.start else 0.0
        return self.left + min(max(share, 0.0), 1.0) * self.span


def decimal(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def tag(name: str, classes: str, text: str | None = None, **attributes: float | str) -> str:
    """One element; numbers become coordinates, `text` and strings are escaped, an underscore in a name a hyphen."""
    parts = [f'<{name} class="{classes}"']
    for key, value in attributes.items():
        shown = escape(value) if isinstance(value, str) else decimal(value)
        parts.append(f' {key.replace("_", "-")}="{shown}"')
    return "".join(parts) + ("/>" if text is None else f">{escape(text)}</{name}>")


def axis(frame: Frame, top: float, bottom: float) -> tuple[list[str], list[str]]:
    """Grid lines from `top` to `bottom`, and the times written below them."""
    widest = max(len(number(frame.start)), len(number(frame.end)))
    step = axis_step(frame.end - frame.start, frame.span / max(56.0, 12 * CHARACTER * (widest + 3)))
    lines, texts = [], []
    for time in axis_times(frame.start, frame.end, step) if frame.end > frame.start else [frame.start]:
        x = frame.x(time)
        lines.append(tag("line", "grid", x1=x, x2=x, y1=top, y2=bottom + 4))
        texts.append(tag("text", "quiet middle", number(time), x=x, y=bottom + 17))
    first = 12 * CHARACTER * len(number(frame.start)) / 2
    texts.append(tag("text", "quiet end", "time", x=frame.left - 8 - first, y=bottom + 17))
    return lines, texts


def legend(items: Iterable[tuple[str, str]], left: float, width: float, top: float) -> tuple[list[str], float]:
    """Pairs of (a 20 x 12 mark drawn at 0, 0; words) in lines that fit, and the y below them."""
    parts, x, y = [], left, top
    for mark, words in items:
        wide = 26 + 12 * CHARACTER * len(words) + 14
        if x > left and x + wide > width:
            x, y = left, y + 20
        parts.append(f'<g transform="translate({decimal(x)} {decimal(y)})">{mark}')
        parts.append(tag("text", "quiet", words, x=26, y=10.5) + "</g>")
        x += wide
    return parts, y + 20


def document(
    width: float, height: float, title: str, description: str, body: Iterable[str], style: bool
) -> Iterator[str]:
    """The lines of a whole picture."""
    size = f'viewBox="0 0 {decimal(width)} {decimal(height)}" width="{decimal(width)}" height="{decimal(height)}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" class="isostep-gantt" role="img" {size}>'
    yield f"<title>{escape(title)}</title>"
    yield f"<desc>{escape(description)}</desc>"
    if style:
        yield f"<style>\n{STYLE}</style>"
    yield tag("rect", "page", width=width, height=height)
    yield from body
    yield "</svg>\n"
