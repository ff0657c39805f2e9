"""From a list of examples to one batch, padded where lengths differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import InputError
from ..objective import IGNORE

_REMEDY = "give `collate`, a function from a list of examples to a batch"


def pad_batch(examples: Sequence[Any]) -> Any:
    """Stack the examples of one microbatch; sequences of unequal length are padded on the right.

    Mappings give a dict: `labels` are padded with -100, everything else with 0, and an `attention_mask`
    (int64, 1 for tokens, 0 for padding) is added beside `input_ids`. Tuples give a tuple: integers after the
    first element are taken for labels and padded with -100. Other examples are stacked themselves. Strings
    stay a list. Numbers of different types get the type that holds them all. Raises InputError where
    examples do not go together.
    """
    first = examples[0]
    if isinstance(first, Mapping):
        _check_alike("entries", [sorted(map(str, example)) for example in examples])
        batch = {k: _column(k, [e[k] for e in examples], IGNORE if k == "labels" else 0) for k in first}
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor) and ids.dim() > 1 and "attention_mask" not in batch:
            ones = [torch.ones(len(e["input_ids"]), dtype=torch.int64) for e in examples]
            batch["attention_mask"] = pad_sequence(ones, batch_first=True)
        return batch
    if isinstance(first, (tuple, list)):
        _check_alike("number of entries", [len(example) for example in examples])
        entries = enumerate(zip(*examples, strict=True))
        columns = [_column(i, list(values), IGNORE if i else 0) for i, values in entries]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    return _column("example", list(examples), 0)


def _check_alike(what: str, found: Sequence[object]) -> None:
    """Raise InputError where an example has other entries than the first: none may be left out unsaid."""
    odd = next((other for other in found if other != found[0]), None)
    if odd is not None:
        raise InputError.of(f"{what} of an example", odd, f"{found[0]} as the first has", _REMEDY)


def _column(name: object, values: list[Any], fill: int) -> Any:
    if isinstance(values[0], str):
        return values
    tensors = [_tensor(name, value) for value in values]
    dtypes = {t.dtype for t in tensors if t.numel()} or {tensors[0].dtype}
    dtype = reduce(torch.promote_types, dtypes)
    tensors = [t.to(dtype) for t in tensors]
    if len({t.shape for t in tensors}) == 1:
        return torch.stack(tensors)
    if any(t.dim() == 0 for t in tensors) or len({t.shape[1:] for t in tensors}) > 1:
        raise InputError.of(
            f"entry {name!r}", [tuple(t.shape) for t in tensors],
            "shapes that differ in the first dimension at most", _REMEDY,
        )  # fmt: skip
    if fill == IGNORE:
        if dtype.is_floating_point or dtype is torch.bool:
            raise InputError.of(
                f"entry {name!r}", f"targets of {dtype} and unequal length", "equal lengths, or integer labels",
                f"padding would count as targets: {_REMEDY}",
            )  # fmt: skip
        tensors = [t.to(torch.int64) for t in tensors]  # -100 fits into it
    return pad_sequence(tensors, batch_first=True, padding_value=fill)


def _tensor(name: object, value: Any) -> Tensor:
    try:
        return value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError.of(
            f"entry {name!r}", type(value).__name__, "tensors, numbers, lists of numbers, or strings", _REMEDY
        ) from None
