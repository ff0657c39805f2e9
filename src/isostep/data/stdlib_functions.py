"""The embedded data set: functions with a docstring from the running interpreter's standard library.

Real text with very unequal supervised counts, on every machine, without a download. The prompt of an example
is the signature and the docstring, its completion the rest of the body. Another Python version has other
functions; `StdlibFunctions.content_hash` tells the difference.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import os
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from ..errors import InputError
from .tokens import BEGIN_TOKEN, END_TOKEN, VOCAB_SIZE, ByteExamples, Example, Piece, Pieces, num_tokens

__all__ = [
    "BEGIN_TOKEN",
    "END_TOKEN",
    "VOCAB_SIZE",
    "Example",
    "Function",
    "Split",
    "StdlibFunctions",
    "stdlib_functions",
]

Split = Literal["train", "validation"]
_Definition = ast.FunctionDef | ast.AsyncFunctionDef

_VALIDATION_PERCENT = 5
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload", "__pycache__"}
)


@dataclass(frozen=True)
class Function:
    """Source of one function, without the indentation of its `def`, in UTF-8. Both parts end in a newline."""

    name: str
    prompt: bytes
    completion: bytes

    @property
    def num_tokens(self) -> int:
        """Length of the example: one token for each byte, one for begin, one for end of text."""
        return num_tokens(self.pieces)

    @property
    def pieces(self) -> Pieces:
        """The example: completion and end of text are supervised."""
        return Piece(self.prompt, False, False), Piece(self.completion, True, True)


class StdlibFunctions(ByteExamples):
    """The functions of one split, map style: `dataset[i]` for 0 <= i < len(dataset). Labels as in ByteExamples.

    context_length: functions with more tokens are left out, `num_left_out` says how many. They are not cut,
    because a cut function teaches that text ends, or goes on, at a place that only the cut decided.
    split: about 5 % of the functions are "validation", chosen by a hash of the qualified name; the others are
    "train". Equal texts count once, so no text is in both.
    max_examples: only the first that many. The order is by hash, so they come from all over the library, and
    a larger max_examples adds examples and renumbers none.

    Raises InputError for a value outside of this, or where no function fits.
    """

    def __init__(self, context_length: int, *, split: Split = "train", max_examples: int | None = None) -> None:
        if split not in ("train", "validation"):
            raise InputError.of("split", split, '"train" or "validation"', "choose one of them")
        if max_examples is not None and max_examples < 1:
            raise InputError.of("max_examples", max_examples, "1 or more, or None", "choose such a number")
        in_split = [function for function in stdlib_functions() if _split_of(function.name) == split]
        fitting = [function for function in in_split if function.num_tokens <= context_length]
        if not fitting:
            shortest = min(function.num_tokens for function in in_split)
            raise InputError.of(
                "context_length", context_length, f"at least {shortest}, the shortest function", "raise it"
            )
        super().__init__([function.pieces for function in fitting[:max_examples]], len(in_split) - len(fitting))


@cache
def stdlib_functions() -> tuple[Function, ...]:
    """Every function of the standard library that has a docstring and something after it, each text once.

    Skipped are test folders, installed packages, files that do not parse, and functions inside functions
    (their text is in the outer one). Ordered by hash of the qualified name, so the order does not depend on
    the file system. Read and parsed once per process, which takes about 1.5 s.
    """
    root = Path(sysconfig.get_path("stdlib"))
    with _garbage_collector_paused():
        found = [function for path in _source_files(root) for function in _functions_of(path, root)]
    found.sort(key=lambda function: (_name_hash(function.name), function.prompt, function.completion))
    unique: dict[tuple[bytes, bytes], Function] = {}
    for function in found:
        unique.setdefault((function.prompt, function.completion), function)
    return tuple(unique.values())


@contextmanager
def _garbage_collector_paused() -> Iterator[None]:
    """Syntax trees hold no cycles, and looking for some among so many nodes doubles the time of parsing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _name_hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _split_of(name: str) -> Split:
    return "validation" if _name_hash(name) % 100 < _VALIDATION_PERCENT else "train"


def _source_files(root: Path) -> Iterator[Path]:
    """Python files below root, without the skipped folders."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _functions_of(path: Path, root: Path) -> Iterator[Function]:
    """Functions of one file; none where the file cannot be read or is not valid Python."""
    try:
        with tokenize.open(path) as file:
            source = file.read()
        with warnings.catch_warnings():  # about the source, an odd escape sequence for example
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return
    lines = source.split("\n")
    module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    for name, definition in _definitions(tree, module):
        function = _function(name, definition, lines)
        if function is not None:
            yield function


def _definitions(node: ast.AST, scope: str) -> Iterator[tuple[str, _Definition]]:
    """Qualified name and node of each function below node, in classes and branches too, not in functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield f"{scope}.{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{scope}.{child.name}")
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _definitions(child, scope)


def _function(name: str, definition: _Definition, lines: list[str]) -> Function | None:
    """Cut the function out of the lines of its file; None without a docstring or without lines after it."""
    docstring, *body = definition.body
    docstring_end, end = docstring.end_lineno, definition.end_lineno
    if ast.get_docstring(definition, clean=False) is None or not body or docstring_end is None:
        return None
    if body[0].lineno == docstring_end:
        return None
    indentation = lines[definition.lineno - 1][: definition.col_offset]
    text = [line.removeprefix(indentation) + "\n" for line in lines[definition.lineno - 1 : end]]
    num_prompt_lines = docstring_end - definition.lineno + 1
    prompt, completion = "".join(text[:num_prompt_lines]), "".join(text[num_prompt_lines:])
    return Function(name, prompt.encode(), completion.encode())
