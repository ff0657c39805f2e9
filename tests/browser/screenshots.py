"""Writes the pictures of docs/lab.md: python tests/browser/screenshots.py. Needs Chromium."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from playwright.sync_api import FloatRect  # noqa: E402

from chromium import PHONE, chromium, looking  # noqa: E402
from lab_server import running  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
WIDE, SHORT = {"width": 1280, "height": 960}, {"width": 1280, "height": 900}
SHOTS = (
    ("lab-replicas", "/replicas?unequal=1", WIDE, "light"),
    ("lab-tokens", "/tokens?counts=1,7+0,5&losses=", WIDE, "light"),
    ("lab-batch", "/batch?context=2048&examples=10000", WIDE, "light"),
    ("lab-pipeline", "/pipeline?schedule=1f1b&compare=zb-v&stages=4&microbatches=6", SHORT, "dark"),
    ("lab-phone", "/pipeline?stages=3&microbatches=4&forward-only=1", PHONE, "light"),
)


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with running() as lab, chromium() as browser:
        for name, path, viewport, scheme in SHOTS:
            with looking(browser, lab.base, viewport=viewport, color_scheme=scheme) as (page, _):
                page.goto(lab.base + path)
                clip: FloatRect | None = None
                if path.startswith("/pipeline"):
                    page.locator("#result").evaluate("part => scrollTo(0, part.getBoundingClientRect().top - 24)")
                if viewport is SHORT:
                    left = page.locator("#result").evaluate("part => part.getBoundingClientRect().left") - 16
                    clip = {"x": left, "y": 0, "width": viewport["width"] - 2 * 16 - left, "height": viewport["height"]}
                file = FOLDER / f"{name}.png"
                page.screenshot(path=file, clip=clip)
                print(f"{file.relative_to(ROOT)}: {file.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
