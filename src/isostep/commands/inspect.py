"""`isostep inspect`: find the parts of a model whose result depends on how the update is split."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from ..cli import write_json
from ..errors import InputError

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")

EXAMPLE = """\
example:
  isostep inspect my_model.py:build --allow batchnorm

exit code: 0 nothing is refused, 1 something is refused, 2 bad input
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `isostep inspect`."""
    parser.epilog = EXAMPLE
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns the model, in an importable module or a .py file "
        "(default: the built-in decoder)",
    )
    parser.add_argument(
        "--allow",
        metavar="KIND",
        action="append",
        default=[],
        help="let findings of this kind through, for example batchnorm; may be repeated",
    )
    parser.add_argument("--json", metavar="FILE", help="write the findings to FILE; - prints them instead of text")


def run(args: argparse.Namespace) -> int:
    """Inspect one model. Returns 0, or 1 if something is refused. Raises InputError for bad input."""
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is not part of the document
        model = _built_in_decoder() if args.model is None else _build(args.model)
    from ..inspection import inspect

    inspection = inspect(model).allowing(args.allow)
    write_json(
        args.json,
        {
            "schema": 1,
            "model": inspection.model,
            "training": inspection.training,
            "findings": [asdict(finding) for finding in inspection.findings],
            "refused": bool(inspection.refused),
        },
    )
    if args.json != "-":
        print(inspection)
    return 1 if inspection.refused else 0


def _built_in_decoder() -> nn.Module:
    from ..data.stdlib_functions import VOCAB_SIZE
    from ..models.decoder import Decoder, DecoderConfig

    return Decoder(DecoderConfig(VOCAB_SIZE, context_length=512, width=64, depth=2, heads=2))


def _build(target: str) -> nn.Module:
    """Call the function that `MODULE:FUNCTION` names. Raises InputError unless it returns an nn.Module."""
    from torch import nn

    function = _find(target)
    model = _guarded(function, target, "a function that returns without an error")
    if not isinstance(model, nn.Module):
        raise InputError.of(target, type(model).__name__, "a torch.nn.Module", "return the model")
    return model


def _find(target: str) -> Callable[[], object]:
    source, colon, name = target.rpartition(":")
    if not (colon and source and name):
        raise InputError.of("model", target, "MODULE:FUNCTION", "name a module and a function")
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise InputError.of("model", source, "a file that exists", "check the path")
        module = _guarded(lambda: _load_file(Path(source)), source, "a file that runs without an error")
    else:
        module = _guarded(lambda: _load_module(source), source, "a module that can be imported")
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError.of("model", target, f"a function {name} in {source}", "check its name")
    return function


def _load_file(path: Path) -> ModuleType:
    """Run a file as a module. Its folder comes first in `sys.path`, as for a script.

    The name in `sys.modules`, where dataclasses look their module up, hides no other module.
    """
    name = f"_inspected_{path.stem}"
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, "")
    return importlib.import_module(name)


def _guarded(call: Callable[[], T], name: str, expected: str) -> T:
    """Result of the user's code. Whatever it raises, and a call of `sys.exit`, becomes an InputError."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        got = f"{type(error).__name__}: {error}"
        raise InputError.of(name, got, expected, "correct it") from error
