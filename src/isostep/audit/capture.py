"""Watching a training loop from the inside: what it computes stays as it is, and every rank writes a log of events.

`Capture` meets loss functions, forward and backward passes; `around.py` adds what happens around the optimizer.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch as _C_functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from ..distributed.shards import part_of, wholes
from . import places, records
from .graphs import TIE, is_readable, walk
from .losses import SIGNATURES, unreduced
from .sketch import SIZE, row_hashes, sketch

DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}
READS = {Tensor.item, Tensor.__float__, Tensor.__format__, Tensor.tolist}
MOST_EXAMPLES = 4096
"""Weights per example are kept of microbatches up to this size."""

MOST_TOTALS = 4096
"""Values of loss calls that are kept until an optimizer runs."""


@dataclass(eq=False)
class LossCall:
    """A loss call, and what has come back to it in the backward pass under way. Tensors stay on their device.

    It is tied to its node of the graph and lives as long, so it must hold nothing that holds the graph.
    """

    site: str
    key: int
    order: int
    forward: int
    function: str
    reduction: str
    denominator: Tensor | float
    supervised: Tensor | None
    shares: Tensor | None
    total: Tensor
    rows: int | None
    targets: int
    whole: int | None = None
    """Targets of a loss that is only seen reduced."""
    sign: float = 1.0
    """-1 for log-probabilities, whose negative is the loss."""
    gradients: list[Tensor] = field(default_factory=list)
    scalars: tuple[float, ...] = ()


def out_of_sight() -> bool:
    """What runs now is traced or transformed: there are no numbers to read."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or _C_functorch.peek_interpreter_stack() is not None
    )


class Capture(TorchFunctionMode):
    """Everything that one rank sees, from `start` to `stop`. Is active on the thread that enters it."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        self.log = records.Log(rank, world)
        self.in_backward = 0
        self.in_forward = 0
        self.losses = 0
        self.forwards = 0
        self.backwards = 0
        self.updates = 0
        """Optimizer calls with no backward pass between them count once."""
        self.rows: int | None = None
        self.modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.before_pass: Callable[[], None] = lambda: None
        """Called where the loop starts another forward pass: the place to stop it."""
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._hooked: dict[tuple[int, int], Any] = {}
        self._local: dict[int, Tensor] = {}
        self._arrived: list[LossCall] = []
        self._noisy = -1
        self._named = 0
        self.totals: list[Tensor] = []
        """Values of the loss calls since the last update, also of those that never went backward."""
        self.stand_ins: dict[Any, Any] = {}
        """Functions that are replaced while watching, and what they stand for."""
        self.graphs: list[tuple[int, weakref.ref[LossCall]]] = []
        """Loss calls whose graph may still be alive, with the number of updates before them."""

    # ------------------------------------------------------------------------------------------ torch functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if out_of_sight():
            return func(*args, **kwargs)
        func = self.stand_ins.get(func, func)
        if (
            func in SIGNATURES
            and torch.is_grad_enabled()
            and not self._named
            and all(is_readable(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        ):
            return self._loss(func, args, kwargs)
        if func in READS and is_readable(args[0]):
            return self._read(func, args, kwargs)
        if func in DROPOUTS:
            self._note_noise(args, kwargs)
        elif func is F.batch_norm:
            self._note_batch_norm(args, kwargs)
        elif func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            self._note_noise((), {})
        return func(*args, **kwargs)

    def _loss(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        loss = unreduced(func, args, kwargs)
        if loss is None:
            return func(*args, **kwargs)
        site, key = places.caller()
        elements = loss.elements
        self.losses += 1
        call = LossCall(
            site, key, self.losses, self.forwards, func.__name__, loss.reduction, loss.denominator, loss.supervised,
            loss.shares, elements.detach().sum(dtype=torch.float64), self.rows, hash_of(loss.targets),
        )  # fmt: skip
        self.watch_loss(elements, call)
        return loss.reduced()

    def watch_loss(self, elements: Tensor, call: LossCall) -> None:
        """Tie a loss call to its node of the graph, and note every gradient that arrives there."""
        self.totals.append(call.total)
        del self.totals[:-MOST_TOTALS]
        node: Any = elements.grad_fn
        if node is not None:
            node.metadata[TIE] = call
            self.graphs.append((self.updates, weakref.ref(call)))

        def arrived(gradient: Tensor) -> None:
            if self.in_backward:
                call.gradients.append(gradient.detach())
                if call not in self._arrived:
                    self._arrived.append(call)

        elements.register_hook(arrived)

    @contextmanager
    def inside_named(self) -> Iterator[None]:
        """Inside a loss function that is watched as a whole: the functions of torch that it uses are not."""
        self._named += 1
        try:
            yield
        finally:
            self._named -= 1

    def note(self, reason: str) -> None:
        """Why something could not be seen."""
        if reason not in self.log.notes:
            self.log.notes.append(reason)

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = func(*args, **kwargs)
        tensor = args[0]
        if not self.in_backward and tensor.numel() == 1 and tensor.is_floating_point() and tensor.dim() == 0:
            number = value if isinstance(value, float) else float(tensor.detach())
            self.log.events.append(records.Logged(places.script_line(), number))
        return value

    def _note_noise(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        training = kwargs.get("training", args[2] if len(args) > 2 else True)
        chance = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        if training and chance and not self.in_backward and self._noisy != self.forwards:
            self._noisy = self.forwards
            state = torch.get_rng_state()
            if args and args[0].is_cuda:
                state = torch.cuda.get_rng_state(args[0].device)
            self.log.events.append(records.Noise(self.forwards, zlib.crc32(state.numpy().tobytes())))

    def _note_batch_norm(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        training = kwargs.get("training", args[5] if len(args) > 5 else False)
        if training and torch.is_grad_enabled() and not self.in_backward:
            self.log.events.append(records.BatchNorm(places.script_line()))

    # ------------------------------------------------------------------------------------------ forward passes

    @contextmanager
    def module(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Around the call of a module. The outermost ones that have parameters are forward passes."""
        if self.in_backward:
            yield
            return
        # an evaluation without gradients is left to end: other ranks may wait for it
        if not self.in_forward and torch.is_grad_enabled() and next(module.parameters(), None) is not None:
            self.before_pass()
            self._note_forward(module, args, kwargs)
        self.in_forward += 1
        try:
            yield
        finally:
            self.in_forward -= 1

    def _note_forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.modules.add(module)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() > 0]
        if self.forwards and any(tensor.grad_fn is not None for tensor in tensors):
            return  # it goes on with what another one has computed: a head, a discriminator
        self.forwards += 1
        self.rows = tensors[0].shape[0] if tensors else None
        hashes = None
        if self.rows and self.rows <= MOST_EXAMPLES and all(is_readable(tensor) for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.shape[0] == self.rows and tensor.numel()]
            hashes = row_hashes(same, self.rows).cpu().numpy().astype(np.uint64)
        reduces = isinstance(module, DistributedDataParallel) and bool(module.require_backward_grad_sync)
        self.log.events.append(records.Forward(self.forwards, self.rows, hashes, reduces))

    # ------------------------------------------------------------------------------------------ backward passes

    @contextmanager
    def backward(self, roots: Sequence[Any]) -> Iterator[None]:
        """Around one backward pass. A backward pass inside another one (activation checkpointing) is part of it."""
        if self.in_backward:
            yield
            return
        self.before_pass()
        self._hook_parameters()
        self._local = {}
        self._arrived = []
        bypassed, unseen = walk([_node(root) for root in roots if _node(root) is not None])
        self.in_backward += 1
        try:
            yield
        finally:
            self.in_backward -= 1
        site = places.script_line()
        value = sum(float(r.detach().double().sum()) for r in roots if isinstance(r, Tensor) and is_readable(r))
        event = records.Backward(self.backwards, site, places.idiom(), value, unseen=unseen, bypassed=bypassed)
        self.backwards += 1
        event.calls = [_finished(call) for call in self._arrived]
        for call in self._arrived:
            call.gradients.clear()
        event.sketches = {index: total.cpu().numpy() for index, total in self._local.items()}
        self.log.events.append(event)
        self._arrived = []

    def _hook_parameters(self) -> None:
        """A hook on every parameter that an optimizer holds: its gradient before any library reduces it."""
        in_parts = wholes(self.modules)
        for index, optimizer in self.living():
            for place, parameter in enumerate(_parameters(optimizer)):
                used = in_parts.get(id(parameter), parameter)
                key = index, id(used)
                known = self._hooked.get(key)
                if used.requires_grad and (known is None or known[0]() is not used):
                    handle = used.register_hook(self._local_gradient(index, place))
                    _run_first(used, handle.id)
                    self._hooked[key] = weakref.ref(used), handle

    def _local_gradient(self, index: int, place: int) -> Callable[[Tensor], None]:
        @torch.utils.hooks.unserializable_hook
        def add(gradient: Tensor) -> None:
            if self.in_backward and _is_plain(gradient):
                total = sketch(gradient, place)
                self._local[index] = (
                    self._local[index] + total.to(self._local[index].device) if (index in self._local) else total
                )

        return add

    # ------------------------------------------------------------------------------------------ optimizers

    def living(self) -> Iterator[tuple[int, torch.optim.Optimizer]]:
        """Optimizers that still exist, by their index."""
        for index, reference in enumerate(self.optimizers):
            optimizer = reference()
            if optimizer is not None:
                yield index, optimizer

    def index_of(self, optimizer: torch.optim.Optimizer) -> int:
        """The index of an optimizer, which is remembered if it is new."""
        for index, known in self.living():
            if known is optimizer:
                return index
        self.optimizers.append(weakref.ref(optimizer))
        return len(self.optimizers) - 1

    def sketch_of(self, optimizer: torch.optim.Optimizer, of: Callable[[Tensor], Tensor | None]) -> np.ndarray | None:
        """The sketch of `of(parameter)` over an optimizer's parameters, or over this rank's parts of them.

        None if one is neither whole nor cut along its first axis.
        """
        total = None
        for place, parameter in enumerate(_parameters(optimizer)):
            values = of(parameter)
            if values is None:
                continue
            piece = (values, 0) if _is_plain(values) else part_of(values)
            if piece is None:
                return None
            part = sketch(piece[0], place, piece[1])
            total = part if total is None else total + part.to(total.device)
        return np.zeros(SIZE) if total is None else total.cpu().numpy()

    def release(self) -> None:
        """Take all hooks off the parameters."""
        for _, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """An optimizer of which this rank holds only a part of the parameters."""
    return any(part_of(parameter) is not None for parameter in _parameters(optimizer))


def _run_first(tensor: Tensor, number: int) -> None:
    """Put a hook before those that the script has registered: they are part of what happens to the gradient."""
    hooks: Any = tensor._backward_hooks
    if hooks is not None and len(hooks) > 1:
        ours, others = hooks.pop(number), dict(hooks)
        hooks.clear()
        hooks.update({number: ours, **others})


def _node(root: Any) -> Any:
    return root.grad_fn if isinstance(root, Tensor) else root.node


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter)


def hash_of(targets: Tensor | None) -> int:
    """A hash of a call's targets; 0 where there are none, or they say nothing."""
    if targets is None or not targets.numel():
        return 0
    return int(row_hashes([targets.detach().reshape(1, -1)], 1)[0])


def _finished(call: LossCall) -> records.Call:
    """The record of a call whose gradient has arrived; called after the backward pass."""
    if call.whole is not None:
        return _finished_whole(call, call.whole)
    weights = sum(call.gradients[1:], call.gradients[0]).double() * call.sign
    supervised = torch.ones_like(weights, dtype=torch.bool) if call.supervised is None else call.supervised
    if call.reduction == "none":
        supervised = supervised & (weights != 0)
    tokens = int(supervised.sum())
    denominator = float(call.denominator)
    if call.reduction == "none":
        denominator = float(tokens if call.shares is None else call.shares[supervised].sum())
    chosen = weights[supervised]
    mean, low, high = (float(v) for v in (chosen.mean(), chosen.min(), chosen.max())) if tokens else (0.0, 0.0, 0.0)
    examples = None
    rows = call.rows
    if rows and rows <= MOST_EXAMPLES and weights.numel() and weights.shape[:1].numel() % rows == 0:
        per_row = (supervised.reshape(rows, -1).sum(1), weights.masked_fill(~supervised, 0).reshape(rows, -1).sum(1))
        examples = (per_row[0].cpu().numpy(), per_row[1].cpu().numpy())
    return records.Call(
        call.site, call.key, call.order, call.forward, call.function, call.reduction,
        denominator, tokens, weights.numel(), float(call.total),
        mean, low, high, examples, call.scalars, call.targets,
    )  # fmt: skip


def _finished_whole(call: LossCall, targets: int) -> records.Call:
    weight = sum(float(gradient) for gradient in call.gradients)
    weight /= targets if call.reduction == "mean" and targets else 1
    return records.Call(
        call.site, call.key, call.order, call.forward, call.function, call.reduction, float(targets), targets, targets,
        float(call.total), weight, weight, weight, None, call.scalars, call.targets,
    )  # fmt: skip
