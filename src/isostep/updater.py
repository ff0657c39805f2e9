"""`Updater`: the five phases as one call in somebody's own loop."""

from __future__ import annotations

import inspect as python_inspect
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from .data.collate import pad_batch
from .data.groups import Collate, DataGroup, ReadyGroup, count_examples
from .distributed.comm import connect
from .distributed.stages import StagedModel, connect_stages
from .engine import Engine, Microbatch, Work
from .errors import InputError
from .evaluate import EvaluationResult, evaluate
from .fitting import largest_microbatch
from .gradients import GradientSums
from .grouping import Cursor, hosted
from .inspection import inspect
from .ledger import Counts
from .loss_scale import LossScale, loss_scale_of
from .objective import Batch, Forward, Objective, Term, call_model
from .result import UpdateResult
from .update import run

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Precision = Literal["float32", "bfloat16", "float16"]
AUTOCAST = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Totals:
    """What was counted since the start of training. attempted = applied + skipped + empty.

    counts: over all attempted updates. applied_counts: over the applied ones.
    """

    attempted: int = 0
    applied: int = 0
    skipped: int = 0
    empty: int = 0
    counts: Counts = field(default_factory=Counts)
    applied_counts: Counts = field(default_factory=Counts)

    def add(self, result: UpdateResult) -> None:
        self.attempted += 1
        setattr(self, result.status, getattr(self, result.status) + 1)
        self.counts += result.counts
        if result.status == "applied":
            self.applied_counts += result.counts


class Updater:
    """Owns the update of one model: gradients, clipping, optimizers, loss scale and schedulers.

    model: a plain module, or one in DistributedDataParallel, which is taken off. Its gradients belong to the Updater:
        whatever is on `p.grad` when an update begins is dropped.
    optimizer: one or several, over parameters of this model. scheduler: likewise; stepped once per APPLIED update.
    objective: a Term or several, such as `causal_lm`.
    forward(model, batch): what of a batch goes into the model; see `objective.call_model` for the default.
    clip_norm: the global gradient norm is clipped to this; None does not clip.
    precision: "float32" runs as the model is; "bfloat16" and "float16" autocast the forward.
    loss_scale: a LossScale or torch.amp.GradScaler; float16 makes one by itself.
    overlap: start reducing gradients during each replica's last backward; through stages, as soon as a rank is done.
    seed: key of all random draws in forward, such as dropout.
    allow: kinds of `inspect` findings that are refused otherwise, such as "batchnorm".
    process_group: whose ranks are the replicas; the default process group where there is one.

    Every replica builds its Updater and calls `update` and `evaluate` in the same order. Raises InputError for what
    cannot give one exact update.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        objective: Objective | Term | Sequence[Term],
        *,
        forward: Forward = call_model,
        clip_norm: float | None = None,
        scheduler: Any | Sequence[Any] | None = None,
        precision: Precision = "float32",
        loss_scale: LossScale | torch.amp.GradScaler | None = None,
        overlap: bool = False,
        seed: int = 0,
        allow: Collection[str] = (),
        process_group: ProcessGroup | None = None,
    ) -> None:
        if clip_norm is not None and not (math.isfinite(clip_norm) and clip_norm > 0):
            raise InputError.of("clip_norm", clip_norm, "a finite number above 0", "leave it out not to clip")
        if precision not in AUTOCAST:
            raise InputError.of("precision", precision, f"one of {', '.join(AUTOCAST)}", "choose one")
        if isinstance(getattr(model, "_orig_mod", None), StagedModel):
            raise InputError.of("model", "a compiled StagedModel", "a plain one", "compile its layers instead")
        staged = model if isinstance(model, StagedModel) else None
        if staged is None:
            module, comm = connect(model, process_group)
            inspect(module).raise_if_refused([allow] if isinstance(allow, str) else allow)
            parameters = list(module.parameters())
        else:
            if forward is not call_model:
                raise InputError.of("forward", forward, "none beside a StagedModel", "give the StagedModel `inputs`")
            module, comm = staged, connect_stages(staged)
            parameters = list(staged.all_parameters)
        optimizers = _listed(optimizer)
        check_optimizers(module, optimizers)
        scale = loss_scale_of(loss_scale)
        self._engine = Engine(
            model=module,
            gradients=GradientSums(parameters),
            objective=Objective.of(objective),
            forward=forward,
            comm=comm,
            device=next(module.parameters()).device,
            optimizers=optimizers,
            schedulers=_checked_schedulers(_listed(scheduler)),
            loss_scale=LossScale() if scale is None and precision == "float16" else scale,
            clip_norm=clip_norm,
            autocast=AUTOCAST[precision],
            overlap=overlap and comm.replicas > 1,
            seed=seed,
            stages=staged,
        )
        self._check_same_settings()
        self._num_optimized = sum(len(g["params"]) for o in optimizers for g in o.param_groups)
        self.totals = Totals()
        self.cursor: Cursor | None = Cursor()

    def _check_same_settings(self) -> None:
        """Raise InputError on every replica where some setting of the update differs between replicas."""
        engine = self._engine
        settings = {
            "objective": [(term.name, term.coefficient) for term in engine.objective.terms],
            "clip_norm": engine.clip_norm,
            "precision": str(engine.autocast),
            "overlap": engine.overlap,
            "seed": engine.seed,
            "optimizers": [
                (type(o).__name__, [{k: str(v) for k, v in g.items() if k != "params"} for g in o.param_groups])
                for o in engine.optimizers
            ],
            "schedulers": [type(scheduler).__name__ for scheduler in engine.schedulers],
        }
        for replica, other in enumerate(engine.comm.gather(settings)):
            odd = [name for name, value in settings.items() if other[name] != value]
            if odd:
                raise InputError.of(
                    odd[0], settings[odd[0]], f"{other[odd[0]]} as on replica {replica}", "give every replica the same"
                )

    @property
    def rank(self) -> int:
        """Index of this process among all that take part, from 0; a replica that is cut into stages has several."""
        return self._engine.comm.rank

    @property
    def replica(self) -> int:
        """Index of this process's replica, from 0."""
        return self._engine.comm.replica

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas, D."""
        return self._engine.comm.replicas

    def update(self, group: DataGroup | ReadyGroup | Sequence[Batch]) -> UpdateResult:
        """One attempted update over a group, or over this replica's ready microbatches given as a list.

        Applied by every replica or by none. Raises AbandonedError (see `request_stop`), CoverageError,
        NonFiniteError, OutOfMemoryError or PeerError before anything is applied, and what model, objective or data
        raise.
        """
        if sum(len(g["params"]) for o in self._engine.optimizers for g in o.param_groups) != self._num_optimized:
            raise InputError.of(
                "optimizer", "parameters added or removed since the Updater was built", "the same ones",
                "build a new Updater: it would not reduce or clip the gradients of new parameters",
            )  # fmt: skip
        work: Work = group if isinstance(group, (DataGroup, ReadyGroup)) else self._ready(group)
        result = run(self._engine, work)
        self.totals.add(result)
        self.cursor = group.after if isinstance(group, DataGroup) else None
        return result

    def evaluate(
        self,
        data: Any,
        *,
        examples_per_microbatch: int = 1,
        collate: Collate = pad_batch,
        model: nn.Module | None = None,
    ) -> EvaluationResult:
        """The objective over all of `data`: sums over global counts, so independent of how it is split.

        data: a map-style data set (a list too: of examples), the same on every replica, among which it is shared
        out; or an iterable without [i], such as a DataLoader, of ready microbatches, each replica's own share.
        model: evaluated instead of the trained one, on the same device; it is called the same way, as an average of
        the weights is. Beside a StagedModel, one of the same layers, such as AveragedModel(staged.layers).module.

        Where memory runs out on some replica, all begin again with half of the examples per microbatch, whatever
        training runs with; with 1, and with ready microbatches, OutOfMemoryError is raised on every replica.
        """
        if examples_per_microbatch < 1:
            raise InputError.of("examples_per_microbatch", examples_per_microbatch, "1 or more", "give a size")
        if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            size = max(1, min(examples_per_microbatch, len(data)))
            share = partial(self._shared_out, data, collate)
            return evaluate(self._engine, share, examples_per_microbatch=size, size=len(data), model=model)
        share = partial(_ready_microbatches, data)
        return evaluate(self._engine, share, examples_per_microbatch=None, size=0, model=model)

    def largest_microbatch(
        self,
        data: Any,
        *,
        at_most: int,
        lengths: Sequence[int] | None = None,
        collate: Collate = pad_batch,
        fraction: float = 0.8,
    ) -> int:
        """The largest microbatch, in examples, that this model trains in on every replica; found by trying.

        See `fitting.largest_microbatch`. Afterwards everything is as if it had not been called.
        """
        return largest_microbatch(
            self._engine, data, at_most=at_most, lengths=lengths, collate=collate, fraction=fraction
        )

    def gather(self, value: Any) -> list[Any]:
        """A picklable value of every rank, in their order; for reports. Raises PeerLostError."""
        return self._engine.comm.gather(value)

    @property
    def intact(self) -> bool:
        """Whether parameters and optimizers are as the last update left them, also after an error: fit to be saved.

        False where an optimizer or scheduler failed half-way.
        """
        return self._engine.intact

    def request_stop(self, grace: float | None = None) -> None:
        """Ask all replicas to stop: the `stop_requested` of the next result is true on every one of them.

        grace: seconds from now. Where this replica has microbatches left to run when they are over, it runs no more,
        and `update` or `evaluate` raises AbandonedError on every replica; a later call may shorten this, not extend
        it. The others still finish their microbatches, unless they are asked as well.

        Safe to call in a signal handler.
        """
        self._engine.stop.ask(grace)

    def state_dict(self) -> dict[str, Any]:
        """Optimizers, schedulers, loss scale, totals, cursor, and the microbatch that memory was found to hold.

        The model's own state is the caller's to save.
        """
        engine = self._engine
        return {
            "optimizers": [optimizer.state_dict() for optimizer in engine.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in engine.schedulers],
            "loss_scale": None if engine.loss_scale is None else engine.loss_scale.state_dict(),
            "totals": asdict(self.totals),
            "cursor": None if self.cursor is None else asdict(self.cursor),
            "examples_that_fit": engine.examples_that_fit,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a `state_dict`. Raises InputError where it belongs to another set of optimizers or schedulers."""
        engine = self._engine
        if missing := [name for name in self.state_dict() if name not in state]:
            raise InputError.of(
                "state", f"no {missing[0]}", "a state_dict of an Updater", "give what state_dict() gave"
            )
        for name, objects in (("optimizers", engine.optimizers), ("schedulers", engine.schedulers)):
            if len(state[name]) != len(objects):
                raise InputError.of(f"state of {name}", len(state[name]), f"{len(objects)}", "build them as before")
        for optimizer, saved in zip(engine.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for scheduler, saved in zip(engine.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        if engine.loss_scale is not None and state["loss_scale"] is not None:
            engine.loss_scale.load_state_dict(state["loss_scale"])
        counts = {name: Counts(**state["totals"][name]) for name in ("counts", "applied_counts")}
        self.totals = Totals(**{**state["totals"], **counts})
        self.cursor = None if state["cursor"] is None else Cursor(**state["cursor"])
        engine.examples_that_fit = state["examples_that_fit"]

    def _ready(self, batches: Sequence[Batch]) -> ReadyGroup:
        if not isinstance(batches, (list, tuple)):
            raise InputError.of(
                "group", type(batches).__name__, "a group, or a list of batches",
                "iterate over groups(...) or ready_groups(...), or pass [batch, ...]",
            )  # fmt: skip
        return ReadyGroup(batches, index=self.totals.attempted)

    def _shared_out(self, data: Any, collate: Collate, examples_per_microbatch: int) -> Iterator[Microbatch]:
        pieces = range(0, len(data), examples_per_microbatch)
        for piece in hosted(len(pieces), self.replica, self.replicas):
            ids = range(pieces[piece], min(pieces[piece] + examples_per_microbatch, len(data)))
            yield Microbatch(collate([data[i] for i in ids]), len(ids))


def _ready_microbatches(batches: Iterable[Batch], _: int) -> Iterator[Microbatch]:
    """A generator and not an expression: a DataLoader draws its seed when it is iterated, not when it is passed."""
    for batch in batches:
        yield Microbatch(batch, count_examples(batch))


def check_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise InputError for parameters that are not the model's, and for optimizers that need a closure."""
    if len(set(map(id, optimizers))) < len(optimizers):
        raise InputError.of("optimizer", "the same one twice", "each once", "it would run twice per update")
    if not optimizers:
        raise InputError.of("optimizer", "none", "one or more", "give an optimizer over the model's parameters")
    known = set(map(id, model.parameters()))
    for optimizer in optimizers:
        foreign = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
        if foreign:
            raise InputError.of(
                type(optimizer).__name__, f"{foreign} parameters that are not the model's", "none",
                "their gradients would not be reduced: put what they belong to into the model",
            )  # fmt: skip
        closure = python_inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise InputError.of(
                "optimizer", type(optimizer).__name__, "one whose update needs no closure",
                "it evaluates the loss several times per update: use a first-order optimizer",
            )  # fmt: skip


def _checked_schedulers(schedulers: list[Any]) -> list[Any]:
    for scheduler in schedulers:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise InputError.of(
                "scheduler", "ReduceLROnPlateau", "one that is stepped without a metric",
                "leave it out and call its step(metric) after each evaluation",
            )  # fmt: skip
    return schedulers


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) else [value]
