"""A loss function that torch does not have (`--loss module:function`): seen as a whole, its targets and its reduction
read from what it is given and what it gives.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from . import places
from .capture import Capture, LossCall, hash_of

IGNORED = -100
CLOSE = 1e-3
MARK = "__isostep_watched__"


@contextmanager
def named(capture: Capture, name: str) -> Iterator[None]:
    """Watch the function `module:function` (or `module:Class.method`) as a loss. Raises InputError if there is none."""
    owner, attribute, function = find(name)
    setattr(owner, attribute, watched(capture, function))
    try:
        yield
    finally:
        setattr(owner, attribute, function)


def find(name: str) -> tuple[Any, str, Callable[..., Any]]:
    """(owner, attribute, function) of a name. Raises InputError."""
    module, _, path = name.partition(":")
    wrong = functools.partial(InputError.of, "--loss", name)
    if not module or not path:
        raise wrong("module:function", "name the function that computes the loss, and the module it is in")
    try:
        owner: Any = importlib.import_module(module)
        *parents, attribute = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        function = vars(owner)[attribute]
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        raise wrong("a function that can be imported", f"see whether its module can be imported ({error})") from None
    if not callable(function):
        raise wrong("a function", "name the function that computes the loss")
    return owner, attribute, function


def watched(capture: Capture, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with what it returns noted as a loss. The functions of torch inside it are not looked at."""
    reductions: dict[str, str | None] = {}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with capture.inside_named():
            loss = function(*args, **kwargs)
        if isinstance(loss, Tensor) and loss.requires_grad and loss.is_floating_point():
            site, key = places.caller()
            targets = _targets([*args, *kwargs.values()])
            if site not in reductions:
                with capture.inside_named():
                    reductions[site] = "none" if loss.numel() > 1 else _reduction(function, args, kwargs, loss, targets)
            _note(capture, site, key, function.__name__, loss, targets, reductions[site])
        return loss

    return call


PER_TOKEN = {"ChunkedLogProbFunction": 3}
"""Autograd functions of libraries that give log-probabilities per token first, by name: which argument the targets are.

trl.kernels (1.16): the fused head of SFTTrainer.
"""


def function_apply(capture: Capture, original: Any) -> Any:
    """A stand-in for `torch.autograd.Function.apply` that notes the functions of PER_TOKEN as losses."""

    @functools.wraps(original.__func__)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = original.__func__(cls, *args, **kwargs)
        position = PER_TOKEN.get(cls.__name__)
        if position is not None and isinstance(result, tuple) and result[0].requires_grad:
            site, key = places.caller()
            capture.losses += 1
            log_probabilities = result[0]
            call = LossCall(
                site, key, capture.losses, capture.forwards, cls.__name__, "none", 1.0, None, None,
                -log_probabilities.detach().sum(dtype=torch.float64), capture.rows, hash_of(args[position]), sign=-1.0,
            )  # fmt: skip
            capture.watch_loss(log_probabilities, call)
        return result

    return classmethod(apply)


def _targets(values: list[Any]) -> Tensor | None:
    """The first tensor of whole numbers."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.dim() > 0]
    return next((t for t in tensors if not t.is_floating_point() and t.dtype != torch.bool), None)


def _reduction(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], loss: Tensor, targets: Tensor | None
) -> str | None:
    """Run it again on twice the batch: a mean stays, a sum doubles. None for neither."""
    if targets is None:
        return None
    rows = targets.shape[0]

    def twice(value: Any) -> Any:
        fits = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows
        return torch.cat([value.detach(), value.detach()]) if fits else value

    with torch.no_grad(), torch.random.fork_rng():
        doubled = function(*(twice(value) for value in args), **{key: twice(value) for key, value in kwargs.items()})
    before, after = float(loss.detach()), float(doubled)
    for factor, reduction in ((1, "mean"), (2, "sum")):
        if abs(after - factor * before) <= CLOSE * abs(before):
            return reduction
    return None


def _note(
    capture: Capture, site: str, key: int, name: str, loss: Tensor, targets: Tensor | None, reduction: str | None
) -> None:
    if reduction is None:
        capture.note(f"{site}: {name} is neither a mean nor a sum over the first axis of its targets")
        return
    supervised = None if targets is None else targets.detach() != IGNORED
    count = loss.numel() if supervised is None else int(supervised.sum())
    whole = reduction != "none"
    masked = None if supervised is None or whole or supervised.numel() != loss.numel() else supervised
    capture.losses += 1
    call = LossCall(
        site, key, capture.losses, capture.forwards, name, reduction, float(count),
        None if masked is None else masked.reshape(loss.shape), None,
        loss.detach().sum(dtype=torch.float64) * (count if reduction == "mean" else 1), capture.rows,
        hash_of(targets), whole=count if whole else None,
    )  # fmt: skip
    capture.watch_loss(loss, call)


def run_with_loss(script: Path, name: str, capture: Capture) -> None:
    """Run a script as `__main__` whose own function `name` (or `Class.method`) is the loss. Raises InputError."""
    tree = ast.parse(script.read_bytes(), str(script))
    body: list[ast.stmt] = tree.body
    *parents, function = name.split(".")
    for parent in parents:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == parent), [])
    found = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == function), None)
    if found is None:
        raise InputError.of("--loss", name, f"a function of {script}", "name one that is defined at its top level")
    mark = ast.copy_location(ast.Name(MARK, ast.Load()), found.body[0])
    found.decorator_list.append(mark)
    module = types.ModuleType("__main__")
    module.__dict__.update({"__file__": str(script), MARK: functools.partial(watched, capture)})
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        exec(compile(tree, str(script), "exec"), module.__dict__)
    finally:
        sys.modules["__main__"] = before
