"""From a list of examples to one batch, padded where lengths differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import InputError
from ..objective import IGNORE


def pad_batch(examples: Sequence[Any]) -> Any:
    """Stack the examples of one microbatch; sequences of unequal length are padded on the right.

    Mappings give a dict: `labels` are padded with -100, everything else with 0, and an `attention_mask` (int64, 1 for
    tokens, 0 for padding) is added beside `input_ids`. Tuples give a tuple: integers after the first element are taken
    for labels and padded with -100. Other examples are stacked themselves. Strings stay a list.
    """
    first = examples[0]
    if isinstance(first, Mapping):
        batch = {k: _column(k, [e[k] for e in examples], IGNORE if k == "labels" else 0) for k in first}
        if "input_ids" in batch and "attention_mask" not in batch:
            ones = [torch.ones(len(e["input_ids"]), dtype=torch.int64) for e in examples]
            batch["attention_mask"] = pad_sequence(ones, batch_first=True)
        return batch
    if isinstance(first, (tuple, list)) and all(isinstance(x, (Tensor, int, float, list)) for x in first):
        columns = [_column(i, list(values), IGNORE if i else 0) for i, values in enumerate(zip(*examples, strict=True))]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    return _column("example", list(examples), 0)


def _column(name: object, values: list[Any], fill: int) -> Any:
    if isinstance(values[0], str):
        return values
    tensors = [value if isinstance(value, Tensor) else torch.as_tensor(value) for value in values]
    if len({t.shape for t in tensors}) == 1:
        return torch.stack(tensors)
    if tensors[0].dim() == 0 or len({t.shape[1:] for t in tensors}) > 1:
        raise InputError.of(
            f"entry {name!r}", [tuple(t.shape) for t in tensors], "shapes that differ in the first dimension at most",
            "give `collate`, a function from a list of examples to a batch",
        )  # fmt: skip
    return pad_sequence(tensors, batch_first=True, padding_value=0 if tensors[0].is_floating_point() else fill)
