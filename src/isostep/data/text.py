"""Data of one's own, from a file, as byte tokens.

`.jsonl`: each line is an object of one of these forms; other keys and blank lines are skipped.

    {"prompt": "...", "completion": "..."}    BEGIN prompt COMPLETION END
    {"text": "..."}                           BEGIN TEXT END
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
                                              BEGIN user:\\n content END assistant:\\n CONTENT END

Capitals are supervised: a completion and its end, a text and its end, each content of the assistant and the end
behind it. Every message ends in END_TOKEN, which no content can contain, so a content cannot pretend to be a turn.
An empty completion still has its end as a target. Without any target are only messages without the assistant, and
examples whose targets were all cut away.

`.txt`: each paragraph is an example like `text`, without the line break at its end. Blank lines separate paragraphs.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from .. import config
from ..errors import InputError
from .stdlib_functions import StdlibFunctions
from .tokens import ByteExamples, Piece, Pieces, cut, num_tokens

TooLong = Literal["refuse", "leave-out", "cut"]

ROLES = ("system", "developer", "user", "assistant", "tool")
_FORMS = (("prompt", "completion"), ("text",), ("messages",))
_FORMS_IN_WORDS = "an object with prompt and completion, or text, or messages"
_REMEDY = "mend or remove the line"


def load_split(data: config.Data, context_length: int) -> tuple[ByteExamples, ByteExamples]:
    """Training and validation data of a run: ids are 0..len-1 in each.

    "stdlib" has its own validation split and always leaves long functions out. Of a file, `validation_percent` of the
    examples are held out by a hash of their bytes, so the same text is never in both. A `validation` file replaces
    either. Raises InputError for what `read_text` refuses, and where nothing to train on or to validate is left.
    """
    if data.validation is not None:
        validation = read_text(data.validation, context_length, too_long=data.too_long)
        if data.source == "stdlib":
            return StdlibFunctions(context_length), validation
        return read_text(data.source, context_length, too_long=data.too_long), validation
    if data.source == "stdlib":
        return StdlibFunctions(context_length), StdlibFunctions(context_length, split="validation")
    train, validation = _read(data.source, context_length, data.too_long, data.validation_percent)
    for name, side in (("validation", validation), ("train", train)):
        if side.num_supervised_tokens == 0:
            raise InputError.of(
                "data.validation_percent", data.validation_percent, f"a share that leaves {name} a supervised token",
                f"give another one, or a file as [data] validation, for the {len(train) + len(validation)} examples "
                f"of {data.source}",
            )  # fmt: skip
    return train, validation


def read_text(path: str | Path, context_length: int, *, too_long: TooLong = "refuse") -> ByteExamples:
    """The examples of a `.jsonl` or `.txt` file in order. The module says how they become tokens.

    too_long: "refuse" examples of more than context_length tokens, "leave-out" these, or "cut" them at that length.
    Raises InputError, with file and line, for what cannot be read, has another form or is too long; and for a file
    without an example or without a supervised token.
    """
    return _read(path, context_length, too_long, 0.0)[0]


def _read(
    path: str | Path, context_length: int, too_long: TooLong, held_out_percent: float
) -> tuple[ByteExamples, ByteExamples]:
    """The examples that are kept and those that are held out, one of which may be empty."""
    sides: tuple[list[Pieces], list[Pieces]] = [], []
    num_left_out = [0, 0]
    for where, pieces in _examples(path):
        fitting = _fit(where, pieces, context_length, too_long)
        side = _is_held_out(fitting or pieces, held_out_percent)
        if fitting is None:
            num_left_out[side] += 1
        else:
            sides[side].append(fitting)
    kept, held_out = map(ByteExamples, sides, num_left_out)
    if not len(kept) + len(held_out):
        got = f"{n} examples, all longer than the context" if (n := sum(num_left_out)) else "no example"
        raise InputError.of(str(path), got, "one or more that fit", "give data, or raise [model] context_length")
    if not kept.num_supervised_tokens + held_out.num_supervised_tokens:
        raise InputError.of(
            str(path), "no supervised token in all of it", "one or more",
            'give a completion, a text or a message of "assistant", and room for it in [model] context_length',
        )  # fmt: skip
    return kept, held_out


def _fit(where: str, pieces: Pieces, context_length: int, too_long: TooLong) -> Pieces | None:
    """The example as it goes into the data set; None where it is left out."""
    length = num_tokens(pieces)
    if length <= context_length:
        return pieces
    if too_long == "refuse":
        raise InputError.of(
            f"length of {where}", length, f"at most {context_length} tokens, the context length",
            'raise [model] context_length, or set [data] too_long to "leave-out" or "cut"',
        )  # fmt: skip
    return cut(pieces, context_length) if too_long == "cut" else None


def _is_held_out(pieces: Pieces, percent: float) -> bool:
    """By the bytes alone, so that equal texts fall on the same side however they are supervised."""
    if percent == 0:
        return False
    digest = hashlib.sha256(b"".join(piece.text for piece in pieces)).digest()
    return int.from_bytes(digest[:8], "big") * 100 < percent * 2**64


# ------------------------------------------------------------------------------------------------- files


def _examples(path: str | Path) -> Iterator[tuple[str, Pieces]]:
    """Each example of a file with its place, "FILE, line N"."""
    readers = {".jsonl": _json_lines, ".txt": _paragraphs}
    reader = readers.get(Path(path).suffix.lower())
    if reader is None:
        raise InputError.of("data file", str(path), "a name in .jsonl or .txt", "rename or convert it")
    for number, pieces in reader(path):
        yield _place(path, number), pieces


def _place(path: str | Path, number: int) -> str:
    return f"{path}, line {number}"


def _lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and bytes of each line, line break included, all of it UTF-8; a byte order mark is left out."""
    for number, line in _raw_lines(path):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            got = f"byte {error.start + 1} that is not UTF-8"
            raise InputError.of(_place(path, number), got, "text in UTF-8", "convert the file") from None
        yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def _raw_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    try:
        with Path(path).open("rb") as file:
            yield from enumerate(file, 1)
    except (OSError, ValueError) as error:  # the latter for a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise InputError.of("data file", str(path), "one that can be read", f"{reason}") from None


def _paragraphs(path: str | Path) -> Iterator[tuple[int, Pieces]]:
    for blank, lines in groupby(_lines(path), lambda line: not line[1].strip()):
        if not blank:
            first, *rest = lines
            text = b"".join((first[1], *(line for _, line in rest)))
            yield first[0], (Piece(text.rstrip(b"\r\n"), True, True),)


def _json_lines(path: str | Path) -> Iterator[tuple[int, Pieces]]:
    for number, line in _lines(path):
        if line.strip():
            yield number, _pieces(_place(path, number), _object(_place(path, number), line.decode().strip()))


# ------------------------------------------------------------------------------------------------- JSON


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError.of(where, _short(line), "JSON", _REMEDY) from None
    if not isinstance(value, dict):
        raise InputError.of(where, _short(value), _FORMS_IN_WORDS, _REMEDY)
    return value


def _pieces(where: str, value: dict[str, Any]) -> Pieces:
    forms = [form for form in _FORMS if all(key in value for key in form)]
    if len(forms) != 1:
        expected = _FORMS_IN_WORDS if not forms else "one form: prompt and completion, or text, or messages"
        raise InputError.of(where, _short(list(value)), expected, _REMEDY)
    if forms[0] == ("messages",):
        return _messages(where, value["messages"])
    *before, last = (_encoded(f"{key!r} of {where}", value[key]) for key in forms[0])
    return (*(Piece(text, False, False) for text in before), Piece(last, True, True))


def _messages(where: str, messages: Any) -> Pieces:
    if not isinstance(messages, list):
        raise InputError.of(f"'messages' of {where}", _short(messages), "a list of objects", _REMEDY)
    pieces: list[Piece] = []
    for index, message in enumerate(messages):
        name = f"message {index} of {where}"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise InputError.of(name, _short(message), "an object with role and content", _REMEDY)
        role = message["role"]
        if role not in ROLES:
            raise InputError.of(f"'role' of {name}", _short(role), f"one of {', '.join(ROLES)}", "rename it")
        content = _encoded(f"'content' of {name}", message["content"])
        pieces += [Piece(f"{role}:\n".encode(), False, False), Piece(content, role == "assistant", True)]
    return tuple(pieces)


def _encoded(name: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise InputError.of(name, _short(value), "text", _REMEDY)
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        got = f"half a surrogate pair at character {error.start + 1}"
        raise InputError.of(name, got, "text that UTF-8 can hold", _REMEDY) from None


def _short(value: object) -> object:
    """The value, or the beginning of its text where that is long."""
    text = str(value)
    return value if len(text) <= 60 else f"{text[:60]}..."
