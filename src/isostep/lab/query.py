"""A query string, checked key by key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from ..errors import InputError
from .fields import MAX_TEXT, Field, shortened

MAX_QUERY = 4096
"""Bytes of a query string."""

FRAGMENT = "fragment"
"""The key that asks for the result without the page around it."""


def texts_of(query: bytes) -> dict[str, str]:
    """The texts of a query by their keys. Raises InputError where it is no UTF-8, or a key is given twice."""
    try:
        pairs = parse_qsl(query.decode("utf-8"), keep_blank_values=True, errors="strict")
    except UnicodeError:
        raise InputError.of("query", "bytes that are no UTF-8", "text", "write it as the form does") from None
    texts: dict[str, str] = {}
    for name, text in pairs:
        if name in texts:
            raise InputError.of(shortened(name), "the same name twice", "each name once", "remove one")
        if len(text) > MAX_TEXT:
            raise InputError.of(shortened(name), f"{len(text)} characters", f"at most {MAX_TEXT}", "shorten it")
        texts[name] = text.strip()
    return texts


def values_of(fields: Iterable[Field], texts: Mapping[str, str]) -> dict[str, Any]:
    """The value of each field. Raises InputError where a text is refused, or a key belongs to no field."""
    known = {field.name: field for field in fields}
    for name in texts:
        if name not in known:
            raise InputError.of("query", shortened(name), f"names among {', '.join(known)}", "remove it")
    return {name: field.parse(texts.get(name, field.default)) for name, field in known.items()}


def query_of(texts: Mapping[str, str], **changed: object) -> str:
    """The query string of texts, with some changed or, by None, left out; it starts with ? where it has any."""
    merged: dict[str, object] = {**texts, **changed}
    kept = {name: text for name, text in merged.items() if text is not None}
    return f"?{urlencode(kept)}" if kept else "?"
