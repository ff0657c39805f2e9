"""WHAT is optimised: terms, each a sum of per-element losses over its own denominator.

    L = sum over terms t of  c_t * (sum over microbatches of S_t) / (sum over microbatches of N_t)

Both sums run over all microbatches of all replicas of a group, so there is no mean of means anywhere. A term never
counts what it does not sum: shift, padding and ignored or weightless targets are decided once, in its own code.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .errors import InputError

IGNORE = -100

Batch: TypeAlias = Any
Outputs: TypeAlias = Any
Forward: TypeAlias = Callable[[nn.Module, Batch], Outputs]


@dataclass(frozen=True)
class Term:
    """One term of the objective.

    name: unique in the objective; the key of its loss and denominator in results.
    sum_fn(outputs, batch): scalar tensor, the SUM of per-element losses of one microbatch, with a graph.
    count_fn(batch): how many elements that sum has (int or integer tensor), or their weight sum (float or floating
        tensor). It sees the batch before forward and must agree with what sum_fn adds up.
    coefficient: multiplies the term's mean; finite.
    supervised_fn(batch): number of supervised targets, for the ledger's counters; only needed where count_fn
        returns weights.
    """

    name: str
    sum_fn: Callable[[Outputs, Batch], Tensor]
    count_fn: Callable[[Batch], int | float | Tensor]
    coefficient: float = 1.0
    supervised_fn: Callable[[Batch], int | Tensor] | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.coefficient):
            raise InputError.of(f"coefficient of {self.name}", self.coefficient, "a finite number", "change it")

    def __rmul__(self, factor: float) -> Term:
        """`0.5 * mse`: the same term with its coefficient multiplied."""
        return replace(self, coefficient=factor * self.coefficient)

    __mul__ = __rmul__

    def sum_of(self, outputs: Outputs, batch: Batch) -> Tensor:
        """S_t of one microbatch, float32 or wider. Raises InputError unless sum_fn gives a scalar tensor."""
        value = self.sum_fn(outputs, batch)
        if not isinstance(value, Tensor) or value.dim() != 0:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError.of(f"sum of {self.name}", got, "a scalar tensor", "add up the losses in its sum_fn")
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value

    def count_of(self, batch: Batch) -> int | float | Tensor:
        """N_t of one microbatch. Raises InputError unless count_fn gives one number."""
        value = self.count_fn(batch)
        if not (isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)):
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError.of(f"count of {self.name}", got, "one number", "add them up in its count_fn")
        return value


@dataclass(frozen=True)
class Objective:
    """The terms that an update minimises together. Raises InputError without terms or with a name used twice."""

    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        names = [term.name for term in self.terms]
        if not names or len(set(names)) < len(names):
            raise InputError.of("objective", names, "one or more terms with different names", "rename a term")

    @classmethod
    def of(cls, objective: Objective | Term | Sequence[Term]) -> Objective:
        """An objective from itself, from one term, or from several."""
        if isinstance(objective, Objective):
            return objective
        terms = tuple(objective) if isinstance(objective, Iterable) else (objective,)
        for term in terms:
            if not isinstance(term, Term):
                raise InputError.of(
                    "objective", term, "a Term or several",
                    "use causal_lm, mse, token_cross_entropy(...) or Term(name, sum_fn, count_fn)",
                )  # fmt: skip
        return cls(terms)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(term.name for term in self.terms)

    def counts(self, batch: Batch) -> list[int | float | Tensor]:
        """N_t of one microbatch for every term, then its supervised, total and padding tokens."""
        counts = [term.count_of(batch) for term in self.terms]
        first = self.terms[0]
        supervised = counts[0] if first.supervised_fn is None else first.supervised_fn(batch)
        return [*counts, supervised, *token_counts(batch)]


def token_counts(batch: Batch) -> tuple[int, int | Tensor]:
    """Total and padding tokens of a microbatch; (0, 0) where it holds no integer ids of shape [batch, length]."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else _element(batch, 0)
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() != 2:
        return 0, 0
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return ids.numel(), 0 if mask is None else (mask == 0).sum()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor on `device`; mappings become dicts, tuples and lists keep their type."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch.to(device) if hasattr(batch, "to") else batch


def call_model(model: nn.Module, batch: Batch) -> Outputs:
    """The default forward: what of a batch goes into the model.

    Mapping: the entries that the model's forward names, except `labels` and `id`. Tuple or list: its first element.
    Anything else: the batch itself.
    """
    if isinstance(batch, Mapping):
        accepted = _forward_names(type(getattr(model, "_orig_mod", model)))  # torch.compile wraps
        inputs = {k: v for k, v in batch.items() if k not in ("labels", "id")}
        return model(**(inputs if accepted is None else {k: v for k, v in inputs.items() if k in accepted}))
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def logits_of(outputs: Outputs) -> Tensor:
    """Logits of what a model returned: a tensor, an object or mapping with `logits`, or a tuple that begins with them.

    float16 and bfloat16 are converted to float32, so that losses are summed in float32; others are left as they are.
    """
    logits = outputs
    if not isinstance(outputs, Tensor):
        found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
        logits = _element(outputs, 0) if found is None else found
    if not isinstance(logits, Tensor):
        raise InputError.of(
            "model output", type(outputs).__name__, "a tensor, or something with `logits`",
            "write a Term whose sum_fn reads it",
        )  # fmt: skip
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def labels_of(batch: Batch) -> Tensor:
    """Labels of a batch: its entry or field `labels`, or else the second element of a tuple or list."""
    named = batch.get("labels") if isinstance(batch, Mapping) else getattr(batch, "labels", None)
    labels = _element(batch, 1) if named is None and not isinstance(batch, Mapping) else named
    if not isinstance(labels, Tensor):
        raise InputError.of(
            "batch", _types(batch), "a tensor 'labels' in a mapping, or a pair (inputs, labels)",
            "rename or convert it, or write a Term of your own",
        )  # fmt: skip
    return labels


def token_cross_entropy(*, shift: bool, class_weights: Tensor | None = None, name: str = "cross_entropy") -> Term:
    """Cross entropy of integer labels, one per position; labels of -100 are ignored.

    shift: True where labels are a copy of the input ids and position i predicts label i + 1 (causal language models);
        False where labels are aligned with the logits.
    class_weights: shape [classes], non-negative. The denominator is then the sum of the targets' weights, as in
        torch.nn.CrossEntropyLoss(weight=...).

    logits: [..., classes]; labels: int64 [...], without the class dimension.
    """
    if class_weights is not None and not bool((class_weights >= 0).all() and class_weights.isfinite().all()):
        raise InputError.of("class_weights", class_weights.tolist(), "finite weights of 0 or more", "mend them")

    def targets(batch: Batch) -> Tensor:
        labels = labels_of(batch)
        return F.pad(labels[..., 1:], (0, 1), value=IGNORE) if shift else labels

    def loss_sum(outputs: Outputs, batch: Batch) -> Tensor:
        logits, wanted = logits_of(outputs), targets(batch)
        if logits.shape[:-1] != wanted.shape:
            raise InputError.of(
                "labels", tuple(wanted.shape), f"{tuple(logits.shape[:-1])} as the logits have",
                "give one label per position",
            )  # fmt: skip
        weight = None if class_weights is None else class_weights.to(logits)
        return F.cross_entropy(logits.flatten(0, -2), wanted.flatten(), weight, ignore_index=IGNORE, reduction="sum")

    def count(batch: Batch) -> Tensor:
        return (targets(batch) != IGNORE).sum()

    def weights(batch: Batch) -> Tensor:
        assert class_weights is not None
        wanted = targets(batch)
        return class_weights.to(wanted.device, torch.float64)[wanted[wanted != IGNORE]]

    if class_weights is None:
        return Term(name, loss_sum, count)
    return Term(
        name,
        loss_sum,
        lambda batch: weights(batch).sum(),
        supervised_fn=lambda batch: (weights(batch) > 0).sum(),
    )


causal_lm = token_cross_entropy(shift=True, name="causal_lm")


def _squared_error_sum(outputs: Outputs, batch: Batch) -> Tensor:
    predicted, wanted = logits_of(outputs), labels_of(batch)
    if predicted.shape != wanted.shape:
        raise InputError.of(
            "targets", tuple(wanted.shape), f"{tuple(predicted.shape)} as the predictions have",
            "reshape one: broadcasting would count elements that are not there",
        )  # fmt: skip
    return F.mse_loss(predicted, wanted.to(predicted.dtype), reduction="sum")


mse = Term("mse", _squared_error_sum, lambda batch: labels_of(batch).numel())


def _element(values: Any, index: int) -> Any:
    return values[index] if isinstance(values, (tuple, list)) and len(values) > index else None


def _types(batch: Batch) -> str | list[str] | dict[Any, str]:
    """What a batch is made of, for messages: type names, one per entry."""
    if isinstance(batch, Mapping):
        return {key: type(value).__name__ for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [type(value).__name__ for value in batch]
    return type(batch).__name__


@cache
def _forward_names(model_type: type[nn.Module]) -> frozenset[str] | None:
    """Names that a model's forward takes; None where it takes any keyword."""
    parameters = inspect.signature(model_type.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)
