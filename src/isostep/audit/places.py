"""Where in somebody's code a call came from. No torch."""

from __future__ import annotations

import os
import sys
import sysconfig
import zlib
from types import FrameType

OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
STDLIB = sysconfig.get_path("stdlib") + os.sep
MACHINERY = ("torch", "functorch")
LIBRARIES = {
    "trl": "trl", "transformers": "transformers", "lightning_fabric": "fabric", "lightning": "lightning",
    "pytorch_lightning": "lightning", "accelerate": "accelerate",
}  # fmt: skip
"""Top-level packages, and the library whose idiom remedies then speak; the first one found counts."""

DEPTH = 60


def script_line() -> str:
    """file:line of the innermost frame of no installed package; where there is none, of the innermost beside torch."""
    fallback = "?:0"
    for frame in _frames():
        filename = frame.f_code.co_filename
        if not _is_machinery(filename):
            place = f"{_shown(filename)}:{frame.f_lineno}"
            if "site-packages" not in filename:
                return place
            fallback = place if fallback == "?:0" else fallback
    return fallback


def caller() -> tuple[str, int]:
    """(file:line, identity) of the innermost frame that is neither ours, torch's nor the standard library's.

    The identity is a hash of the whole stack above it, the same on every rank: two calls on one line, or one call
    reached in two ways, differ.
    """
    place, identity = "?:0", 0
    for frame in _frames():
        if not _is_machinery(frame.f_code.co_filename):
            if place == "?:0":
                place = f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"
            identity = zlib.crc32(f"{frame.f_code.co_filename}:{frame.f_lasti}".encode(), identity)
    return place, identity


def idiom() -> str:
    """The library that the call under way came through, by its remedy's name; pytorch if none."""
    packages = set()
    for frame in _frames():
        name = frame.f_globals.get("__name__", "") or ""
        head, _, rest = name.partition(".")
        packages.add("lightning_fabric" if head == "lightning" and rest.startswith("fabric") else head)
    found = [idiom for package, idiom in LIBRARIES.items() if package in packages]
    if "fabric" in found and "lightning" in found:
        return "lightning"
    return found[0] if found else "pytorch"


def _frames():
    frame: FrameType | None = sys._getframe(2)
    for _ in range(DEPTH):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _is_machinery(filename: str) -> bool:
    if filename.startswith((OURS, "<frozen")):
        return True
    if "site-packages" in filename:
        package = filename.rpartition("site-packages")[2].lstrip(os.sep).split(os.sep)[0]
        return package in MACHINERY
    return filename.startswith(STDLIB)


def _shown(filename: str) -> str:
    if "site-packages" in filename:
        return filename.rpartition("site-packages")[2].lstrip(os.sep)
    relative = os.path.relpath(filename)
    return filename if relative.startswith("..") else relative
