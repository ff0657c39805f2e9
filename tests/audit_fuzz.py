"""Random training loops with known weights, for `test_audit_fuzz.py`.

`case(seed)` draws a loop and perhaps a fault; `run_case` runs it under an audit. Every token of the run has its own row
of an embedding, so the gradient that the optimizer gets on that row is the token's weight times the gradient of its own
loss: the weights are read off without anything of the audit. `complaints` compares the two.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import random
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from isostep.audit import watch
from isostep.audit.document import EXACT, EXACT_UP_TO_FACTOR, INEXACT, KINDS, Report

TOLERANCE = 1e-3
"""Relative, between a weight reported and the true one."""

SAME = 1e-4
"""True weights that differ by less, relatively, are the same: what rounding in float32 leaves."""

SEEN = 1e-3
"""Share of a gradient, by norm, from which something left over has to be found."""

WEIGHT_KINDS = set(list(KINDS)[: list(KINDS).index("uneven-weights") + 1])
TOKENS, VALUES = "tokens", "values"


# ------------------------------------------------------------------------------------------------ what is drawn


@dataclass(frozen=True)
class Batch:
    """One microbatch: `rows` x `length` positions, of which `supervised` have a target."""

    rows: int
    length: int
    supervised: tuple[int, ...]

    @property
    def rows_with_targets(self) -> int:
        return len({position // self.length for position in self.supervised})


@dataclass(frozen=True)
class Case:
    """A loop. Fields say what the script does; see `train`."""

    seed: int
    groups: tuple[tuple[tuple[Batch, ...], ...], ...]
    """By update, rank, microbatch."""
    replicas: int
    accumulate: int
    classes: int
    idiom: str
    """mean, mean-weighted, or a sum or a hand-masked sum: by the count of the microbatch (local), of it on all ranks
    (across), of the rank's group (group), of the group on all ranks (global), or by nothing (sum)."""
    sync: str
    """none, ddp, ddp-each, manual-mean, manual-sum"""
    fault: str = "none"
    variant: str = ""
    """Of the fault."""
    at: int = 0
    """The update, or the microbatch, that the fault is in."""
    everywhere: bool = True
    """The fault is in all updates, not in update 1 alone."""
    factor: float = 1.0
    """Of the fault scale."""
    listed: bool = False
    """Losses are collected; one backward pass runs over their sum."""
    closure: bool = False
    scaler: float = 0.0
    """Initial loss scale; 0 for none."""
    clip: float = 0.0
    optimizer: str = "sgd"
    """sgd, momentum, adamw, two"""
    clear: str = "after"
    """before or after the update"""
    clears: str = "optimizer"
    """optimizer, zeros, module, none"""
    coefficient: float = 0.0
    """Of a second term; 0 for none."""
    second: str = "mean"
    """mean, sum: how the second term is reduced."""
    class_weights: str = ""
    """'' for none; weights, tokens: what a sum of weighted losses is divided by."""
    smoothing: float = 0.0
    inside: bool = False
    """Losses are computed in the model's forward."""
    apart: bool = False
    """The last microbatch of a group has code of its own."""
    loader: str = ""
    """'' for lists; own, distributed: a DataLoader over the rank's data, or over all of it."""
    shifted: bool = False
    """Labels have one position more, which the loss shifts away."""
    shared: bool = True
    """A bias is shared by all tokens."""
    double: bool = False
    group_inside: bool = False
    """The process group is started under the watch; else it is the one of the case before, if there is one."""
    scheduler: bool = False
    logged: bool = False

    @property
    def averaged(self) -> bool:
        """Gradients are averaged over replicas."""
        return self.sync in ("ddp", "ddp-each", "manual-mean")

    @property
    def declared(self) -> bool:
        """The loss call of tokens divides by nothing."""
        return not self.idiom.startswith("mean")


LOCAL = ("mean", "sum-local", "mask-local")
GLOBAL = ("mean-weighted", "sum-global", "mask-global")
FAULTS = (
    "mean-of-means", "mean-of-replicas", "scale", "partial-group", "lost-microbatch", "stale-gradient", "stale-tail",
    "count-mismatch", "empty-microbatch", "term-scale", "unsynchronised-replicas", "clip-per-microbatch",
)  # fmt: skip


def case(seed: int) -> Case:
    """The loop of a seed. Two of five have no fault."""
    draw = random.Random(f"audit {seed}")
    fault = "none" if draw.random() < 0.4 else draw.choice(FAULTS)
    while True:
        made = _drawn(seed, fault, draw)
        if made is not None:
            return made


def _drawn(seed: int, fault: str, draw: random.Random) -> Case | None:
    """A loop with this fault; None where the layout drawn cannot have it."""
    replicas = draw.choice((1, 1, 2))
    accumulate = draw.randint(1, 6)
    updates = draw.randint(2, 4)
    chosen: dict[str, Any] = {"variant": ""}
    equal = draw.random() < 0.3
    empty = False
    idiom = draw.choice((*LOCAL, *GLOBAL, *GLOBAL, "sum-group", "sum"))
    chosen["class_weights"] = draw.choice(("", "", "", "weights", "tokens"))
    extra = 0

    if fault in ("none", "lost-microbatch", "stale-gradient", "unsynchronised-replicas", "clip-per-microbatch"):
        equal = equal or idiom in LOCAL or (idiom == "sum-group" and replicas > 1)
        empty = not equal and idiom != "mean-weighted" and draw.random() < 0.4
    if fault == "clip-per-microbatch":
        accumulate = max(2, accumulate)
    if fault in ("lost-microbatch", "partial-group", "stale-tail") and accumulate == 1:
        return None
    if fault in ("mean-of-replicas", "unsynchronised-replicas") and replicas == 1:
        return None
    if fault == "mean-of-means":
        idiom, equal = draw.choice((*LOCAL, "sum-across") if accumulate > 1 else LOCAL), False
        if accumulate * replicas == 1:
            return None
    elif fault == "mean-of-replicas":
        idiom, equal = ("mean", False) if accumulate == 1 else ("sum-group", False)
    elif fault == "scale":
        values = {float(accumulate), 1 / accumulate, float(replicas), 1 / replicas} - {1.0}
        idiom = draw.choice((*LOCAL, *GLOBAL))
        equal = equal or idiom in LOCAL
        if not values:
            return None
        chosen["factor"] = draw.choice(sorted(values))
    elif fault in ("partial-group", "stale-tail"):
        idiom, equal = draw.choice(LOCAL), True
        if updates < 3:
            return None
        extra = draw.randint(1, accumulate - 1)
        chosen["at"] = draw.randrange(updates - 1) + 1 if fault == "stale-tail" else updates - 1
    elif fault == "lost-microbatch":
        chosen |= {"at": draw.randint(1, accumulate - 1), "everywhere": draw.random() < 0.5}
    elif fault == "stale-gradient":
        chosen["at"] = draw.randint(1, updates - 1)
    elif fault == "count-mismatch":
        idiom = draw.choice(("sum-global", "mask-global"))
        chosen["variant"] = draw.choice(("unshifted", "positions"))
        chosen["shifted"] = chosen["variant"] == "unshifted" or draw.random() < 0.5
    elif fault == "empty-microbatch":
        idiom, equal, empty = draw.choice(("sum-local", "mask-local")), True, True
        if accumulate * replicas == 1:
            return None
    elif fault == "term-scale":
        chosen["variant"] = draw.choice(("accumulate", "replicas"))
        if (accumulate if chosen["variant"] == "accumulate" else replicas) == 1:
            return None
        idiom = draw.choice(GLOBAL)
    elif fault == "unsynchronised-replicas":
        chosen |= {"everywhere": draw.random() < 0.6}
    elif fault == "clip-per-microbatch" and replicas > 1 and draw.random() < 0.4:
        chosen["variant"] = "before-reduce"

    if idiom in LOCAL and fault != "mean-of-means":
        chosen["class_weights"] = ""
    if idiom == "sum-group" and replicas > 1:
        chosen["class_weights"] = ""
    if chosen["class_weights"] == "tokens" and idiom not in ("sum-global",):
        chosen["class_weights"] = "weights"
    if fault in ("scale", "count-mismatch", "empty-microbatch", "mean-of-replicas"):
        chosen["class_weights"] = ""

    sync = "none" if replicas == 1 else draw.choice(("ddp", "ddp", "ddp-each", "manual-mean", "manual-sum"))
    if sync == "manual-sum" and (idiom not in GLOBAL or fault in ("term-scale", "stale-gradient")):
        sync = "manual-mean"
    if chosen["variant"] == "before-reduce":
        sync = "manual-mean"
    if fault == "unsynchronised-replicas":
        if sync == "ddp-each":
            sync = "ddp"
        chosen["variant"] = draw.choice(("never", "module") if sync == "ddp" else ("never", "before-last"))
        if chosen["variant"] == "before-last" and accumulate == 1:
            return None

    clip = draw.choice((0.0, 0.0, 0.05, 0.5, 100.0))
    if fault == "clip-per-microbatch":
        clip = draw.choice((0.02, 0.1))
    scaler = draw.choice((0.0, 0.0, 4.0, 8.0, 1024.0))
    if fault == "stale-gradient" and scaler > 8:
        scaler = 8.0
    closure = not scaler and draw.random() < 0.2
    if fault == "clip-per-microbatch":
        scaler = 0.0
    if fault in ("stale-tail",):
        closure = False
    optimizer = draw.choice(("sgd", "momentum", "adamw", "two"))
    if closure and optimizer == "two":
        optimizer = "adamw"

    second = draw.choice(("mean", "sum")) if fault != "term-scale" else "mean"
    coefficient = draw.choice((0.3, 0.7, 1.0)) if fault == "term-scale" or draw.random() < 0.25 else 0.0
    if fault == "empty-microbatch":
        coefficient = 0.0

    loader = draw.choice(("", "", "own", "distributed" if replicas > 1 else "own"))
    rows, length = draw.randint(1, 4), draw.choice((2, 5, 9, 14))
    same_rows = bool(loader) or (coefficient and second == "mean")
    partial = fault in ("none", "mean-of-means", "count-mismatch") and accumulate > 1 and draw.random() < 0.25

    groups = []
    for update in range(updates):
        size = accumulate
        if update == updates - 1 and partial:
            size = draw.randint(1, accumulate)
        if fault == "partial-group" and update == chosen["at"]:
            size = extra
        if fault == "stale-tail" and update == chosen["at"]:
            size = accumulate + extra
        ranks = _group(draw, replicas, size, rows, length, bool(loader), bool(same_rows), equal)
        if empty and (replicas * size > 1) and draw.random() < 0.7:
            rank, number = draw.randrange(replicas), draw.randrange(size)
            ranks[rank][number] = replace(ranks[rank][number], supervised=())
        groups.append(tuple(tuple(of_rank) for of_rank in ranks))

    chosen.setdefault("shifted", draw.random() < 0.2)
    double = draw.random() < 0.15
    return Case(
        seed, tuple(groups), replicas, accumulate, draw.randint(3, 6), idiom, sync, fault, scaler=scaler, clip=clip,
        listed=fault not in ("lost-microbatch", "clip-per-microbatch") and sync != "ddp-each"
        and chosen["variant"] != "before-last" and draw.random() < 0.15,
        closure=closure, optimizer=optimizer,
        clear="after" if fault == "stale-tail" else draw.choice(("before", "after")),
        clears=draw.choice(("optimizer", "optimizer", "zeros", "module", "none")),
        coefficient=coefficient, second=second, smoothing=draw.choice((0.0, 0.0, 0.1)),
        inside=draw.random() < 0.25, apart=draw.random() < 0.2, loader=loader,
        shared=optimizer == "two" or draw.random() < 0.7, double=double, group_inside=draw.random() < 0.5,
        scheduler=draw.random() < 0.2, logged=draw.random() < 0.2, **chosen,
    )  # fmt: skip


def _group(
    draw: random.Random, replicas: int, size: int, rows: int, length: int, fixed: bool, same_rows: bool, equal: bool
) -> list[list[Batch]]:
    """The microbatches of one update by rank."""
    shapes = []
    for _ in range(replicas * size):
        of_rows = rows if fixed or same_rows else draw.randint(1, 4)
        shapes.append((of_rows, length if fixed else draw.randint(1, 14)))
    most = min(40, min(a * b for a, b in shapes))
    common = draw.randint(1, most)
    batches = []
    for a, b in shapes:
        count = common if equal else draw.randint(1, min(40, a * b))
        batches.append(Batch(a, b, tuple(sorted(draw.sample(range(a * b), count)))))
    return [batches[rank * size : (rank + 1) * size] for rank in range(replicas)]


# ------------------------------------------------------------------------------------------------ the loop


def token_loss(loop: Case, logits: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
    """Mean, sum, or hand-masked sum of one microbatch."""
    scores, labels, smooth = logits.flatten(0, -2), targets.flatten(), loop.smoothing
    if loop.idiom.startswith("mean"):
        return F.cross_entropy(scores, labels, weight=weight, label_smoothing=smooth)  # site: tokens
    if loop.idiom.startswith("sum"):
        return F.cross_entropy(scores, labels, weight, reduction="sum", label_smoothing=smooth)  # site: tokens
    mask = labels != -100
    labels = labels.clamp(min=0)
    each = F.cross_entropy(scores, labels, weight, reduction="none", label_smoothing=smooth)  # site: tokens
    return (each * mask).sum()


def token_loss_of_last(loop: Case, logits: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
    """The same in the code that a loop keeps for the last microbatch of a group."""
    scores, labels, smooth = logits.flatten(0, -2), targets.flatten(), loop.smoothing
    if loop.idiom.startswith("mean"):
        return F.cross_entropy(scores, labels, weight=weight, label_smoothing=smooth)  # site: tokens
    if loop.idiom.startswith("sum"):
        return F.cross_entropy(scores, labels, weight, reduction="sum", label_smoothing=smooth)  # site: tokens
    mask = labels != -100
    labels = labels.clamp(min=0)
    each = F.cross_entropy(scores, labels, weight, reduction="none", label_smoothing=smooth)  # site: tokens
    return (each * mask).sum()


def value_loss(loop: Case, values: Tensor, wanted: Tensor) -> Tensor:
    if loop.second == "mean":
        return F.mse_loss(values, wanted)  # site: values
    return F.mse_loss(values, wanted, reduction="sum")  # site: values


class Probe(nn.Module):
    """Logits and values that are rows of tables: every token and every example has its own row."""

    def __init__(self, loop: Case, tokens: int, examples: int, weight: Tensor | None) -> None:
        super().__init__()
        self.loop, self.weight = loop, weight
        self.table = nn.Embedding(tokens, loop.classes)
        self.values = nn.Embedding(examples, 1) if loop.coefficient else None
        self.bias = nn.Parameter(torch.zeros(loop.classes)) if loop.shared else None

    def forward(
        self, ids: Tensor, rows: Tensor, targets: Tensor | None = None, wanted: Tensor | None = None, last: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Logits and values; with targets, their losses."""
        logits = self.table(ids)
        if self.bias is not None:
            logits = logits + self.bias
        values = None if self.values is None else self.values(rows).squeeze(-1)
        if targets is None:
            return logits, values
        return self.losses(logits, values, targets, wanted, last)

    def losses(
        self, logits: Tensor, values: Tensor | None, targets: Tensor, wanted: Tensor | None, last: bool
    ) -> tuple[Tensor, Tensor | None]:
        if last and self.loop.apart:
            loss = token_loss_of_last(self.loop, logits, targets, self.weight)
        else:
            loss = token_loss(self.loop, logits, targets, self.weight)
        return loss, None if values is None or wanted is None else value_loss(self.loop, values, wanted)


@dataclass
class Data:
    """The tensors of all microbatches: by update, rank, microbatch: token ids, labels, row ids, wanted values."""

    groups: list[list[list[tuple[Tensor, Tensor, Tensor, Tensor]]]]
    tokens: int
    examples: int
    labels: Tensor
    """Of every token id, -100 where it has none."""
    wanted: Tensor
    """Of every example."""


def data_of(loop: Case) -> Data:
    generator = torch.Generator().manual_seed(loop.seed)
    dtype = torch.float64 if loop.double else torch.float32
    token, example = 0, 0
    labels_of, wanted_of, groups = [], [], []
    for ranks in loop.groups:
        groups.append([])
        for batches in ranks:
            groups[-1].append([])
            for batch in batches:
                positions = batch.rows * batch.length
                ids = torch.arange(token, token + positions).view(batch.rows, batch.length)
                labels = torch.full((positions,), -100)
                chosen = torch.tensor(batch.supervised, dtype=torch.int64)
                labels[chosen] = torch.randint(loop.classes, (len(chosen),), generator=generator)
                wanted = torch.randn(batch.rows, generator=generator, dtype=dtype)
                labels_of.append(labels)
                wanted_of.append(wanted)
                labels = labels.view(batch.rows, batch.length)
                if loop.shifted:
                    first = torch.where((labels != -100).any(1, keepdim=True), 0, -100)
                    labels = torch.cat((first, labels), dim=1)
                groups[-1][-1].append((ids, labels, torch.arange(example, example + batch.rows), wanted))
                token += positions
                example += batch.rows
    return Data(groups, token, example, torch.cat(labels_of), torch.cat(wanted_of))


def batches_of(loop: Case, data: Data, rank: int) -> Iterator[tuple[Tensor, ...]]:
    """One rank's microbatches in order, from lists or through a DataLoader."""
    own = [[batch for ranks in data.groups for batch in ranks[r]] for r in range(loop.replicas)]
    if not loop.loader:
        return iter(own[rank])
    rows = own[0][0][0].shape[0]
    columns = [[torch.cat([batch[i] for batch in of_rank]) for i in range(4)] for of_rank in own]
    if loop.loader == "own":
        return iter(DataLoader(TensorDataset(*columns[rank]), batch_size=rows))
    together = [torch.stack([of_rank[i] for of_rank in columns], dim=1).flatten(0, 1) for i in range(4)]
    dataset = TensorDataset(*together)
    sampler = DistributedSampler(dataset, loop.replicas, rank, shuffle=False)
    return iter(DataLoader(dataset, batch_size=rows, sampler=sampler))


@dataclass
class Seen:
    """What the optimizer got in one update, and from which parameters."""

    parameters: dict[str, Tensor]
    raw: dict[str, Tensor] = field(default_factory=dict)
    """Before the last clipping."""
    final: dict[str, Tensor] = field(default_factory=dict)


def _copies(model: Probe, gradients: bool) -> dict[str, Tensor]:
    taken = {}
    for name, parameter in model.named_parameters():
        value = parameter.grad if gradients else parameter
        taken[name] = torch.zeros_like(parameter).detach() if value is None else value.detach().clone()
    return taken


class Loop:
    """The training loop of a case on one rank."""

    def __init__(self, loop: Case, rank: int) -> None:
        self.loop, self.rank = loop, rank
        self.data = data_of(loop)
        self.seen: list[Seen] = []

    def build(self) -> None:
        loop = self.loop
        torch.manual_seed(loop.seed)
        weight = torch.tensor([0.5, 1.0, 2.0, 4.0, 0.7, 1.3][: loop.classes]) if loop.class_weights else None
        weight = weight.double() if weight is not None and loop.double else weight
        self.weight = weight
        self.model = Probe(loop, self.data.tokens, self.data.examples, weight)
        if loop.double:
            self.model.double()
        self.wrapped: nn.Module = DistributedDataParallel(self.model) if loop.sync.startswith("ddp") else self.model
        parameters = list(self.model.parameters())
        if loop.optimizer == "two":
            self.optimizers = [
                torch.optim.SGD(parameters[:1], lr=0.1), torch.optim.AdamW(parameters[1:], lr=1e-3),
            ]  # fmt: skip
        elif loop.optimizer == "adamw":
            self.optimizers = [torch.optim.AdamW(parameters, lr=1e-3)]
        else:
            momentum = 0.9 if loop.optimizer == "momentum" else 0.0
            self.optimizers = [torch.optim.SGD(parameters, lr=0.1, momentum=momentum)]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=loop.scaler, growth_interval=2) if loop.scaler else None
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in self.optimizers
        ] if loop.scheduler else []  # fmt: skip

    def train(self) -> None:
        loop = self.loop
        self.build()
        stream = batches_of(loop, self.data, self.rank)
        for update, ranks in enumerate(loop.groups):
            group = [next(stream) for _ in ranks[self.rank]]
            self.seen.append(Seen(_copies(self.model, gradients=False)))
            stale = loop.fault == "stale-gradient" and update == loop.at

            def closure(update: int = update, group: Any = group, stale: bool = stale) -> Tensor:
                if (loop.clear == "before" or loop.closure) and not stale:
                    self.clear()
                return self.accumulate(update, group)

            if loop.closure:
                self.optimizers[0].step(closure)
            else:
                closure()
                for optimizer in self.optimizers:
                    if self.scaler is None:
                        optimizer.step()
                    else:
                        self.scaler.step(optimizer)
                if self.scaler is not None:
                    self.scaler.update()
            for scheduler in self.schedulers:
                scheduler.step()
            self.seen[-1].final = _copies(self.model, gradients=True)
            forgotten = loop.fault == "stale-gradient" and update + 1 == loop.at
            if loop.clear == "after" and not loop.closure and not forgotten:
                self.clear()

    def clear(self) -> None:
        if self.loop.clears == "module":
            self.model.zero_grad()
        elif self.loop.clears == "none":
            for parameter in self.model.parameters():
                parameter.grad = None
        else:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=self.loop.clears == "optimizer")

    def accumulate(self, update: int, group: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """Forward and backward of all microbatches, reduction over replicas, clipping."""
        loop = self.loop
        here = loop.everywhere or update == 1
        count, examples = self.counts(group)
        losses = []
        total = torch.zeros(())
        unsynchronised = here and loop.fault == "unsynchronised-replicas"
        for number, batch in enumerate(group):
            last = number + 1 == len(group)
            if loop.fault == "lost-microbatch" and here and number == loop.at:
                self.clear()
            if unsynchronised and loop.variant == "before-last" and last:
                self.reduce()
            held = loop.sync == "ddp" and (not last or (unsynchronised and loop.variant == "never"))
            with self.wrapped.no_sync() if held else nullcontext():
                model = self.model if unsynchronised and loop.variant == "module" else self.wrapped
                loss = self.loss(model, batch, len(group), count, examples, last)
                if loop.listed:
                    losses.append(loss)
                    if not last:
                        continue
                    loss = sum(losses[1:], losses[0])
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total = total + loss.detach()
            if loop.logged:
                loss.item()
            if loop.fault == "clip-per-microbatch" and (loop.variant == "before-reduce") == last:
                nn.utils.clip_grad_norm_(self.model.parameters(), loop.clip)
        if loop.sync.startswith("manual") and not (unsynchronised and loop.variant in ("never", "before-last")):
            self.reduce()
        if loop.clip and loop.variant != "before-reduce":
            if self.scaler is not None:
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
            self.seen[-1].raw = _copies(self.model, gradients=True)
            nn.utils.clip_grad_norm_(self.model.parameters(), loop.clip)
        return total

    def reduce(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            if self.loop.sync == "manual-mean":
                parameter.grad /= self.loop.replicas

    def targets(self, labels: Tensor) -> Tensor:
        return labels[:, 1:] if self.loop.shifted else labels

    def counted(self, targets: Tensor) -> Tensor:
        """What a mean over these targets divides by."""
        supervised = targets != -100
        if self.weight is None or self.loop.class_weights == "tokens":
            return supervised.sum()
        return self.weight[targets[supervised]].sum()

    def counts(self, group: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
        """Targets and examples of the group, of all ranks where the idiom says so."""
        loop = self.loop
        if loop.fault == "count-mismatch" and loop.variant == "positions":
            count = sum((torch.tensor(self.targets(labels).numel()) for _, labels, *_ in group), torch.tensor(0))
        elif loop.fault == "count-mismatch":
            count = sum(((labels != -100).sum() for _, labels, *_ in group), torch.tensor(0))
        else:
            count = sum((self.counted(self.targets(labels)) for _, labels, *_ in group), torch.tensor(0))
        examples = torch.tensor(sum(rows.numel() for _, _, rows, _ in group))
        if loop.replicas > 1 and loop.idiom in GLOBAL:
            dist.all_reduce(count)
        if loop.replicas > 1:
            dist.all_reduce(examples)
        return count, examples

    def loss(
        self, model: nn.Module, batch: tuple[Tensor, ...], size: int, count: Tensor, examples: Tensor, last: bool
    ) -> Tensor:
        """The loss of one microbatch as the loop takes it backward."""
        loop = self.loop
        ids, labels, rows, wanted = batch
        targets = self.targets(labels)
        if loop.inside:
            loss, second = model(ids, rows, targets, wanted, last)
        else:
            loss, second = self.model.losses(*model(ids, rows), targets, wanted, last)
        if loop.fault in ("partial-group", "stale-tail"):
            size = loop.accumulate
        if loop.idiom == "mean":
            loss = loss / size
        elif loop.idiom in ("sum-local", "mask-local"):
            loss = loss / self.counted(targets).clamp(min=1e-9 if self.weight is not None else 1) / size
        elif loop.idiom == "sum-across":
            count = self.counted(targets)
            if loop.replicas > 1:
                dist.all_reduce(count)
            loss = loss / count * loop.replicas / size
        elif loop.idiom == "mean-weighted":
            loss = loss * self.counted(targets) / count
        elif loop.idiom != "sum":
            loss = loss / count
        if loop.idiom in GLOBAL and loop.averaged:
            loss = loss * loop.replicas
        if second is not None:
            if loop.second == "sum":
                second = second / examples * (loop.replicas if loop.averaged else 1)
            elif not (loop.fault == "term-scale" and loop.variant == "accumulate"):
                second = second / (size if loop.sync != "manual-sum" else size * loop.replicas)
            if loop.fault == "term-scale" and loop.variant == "replicas":
                second = second * loop.replicas
            loss = loss + loop.coefficient * second
        return loss * loop.factor if loop.fault == "scale" else loss


# ------------------------------------------------------------------------------------------------ the truth


@dataclass
class TrueWeight:
    """Of one microbatch and term on one rank."""

    tokens: int
    denominator: float
    """What a mean over them divides by."""
    mean: float
    low: float
    high: float


@dataclass
class Truth:
    """What one rank's optimizer got, by update: weights by (microbatch, term), and what was left from before."""

    weights: list[dict[tuple[int, str], TrueWeight]]
    stale: list[tuple[float, float]]
    """How much of the gradient applied before is in this one, and what share of this one that is, by norm."""


def truth_of(loop: Loop) -> Truth:
    """The weights of this rank's own tokens, from the gradients on their rows."""
    weights, stale = [], []
    for update, seen in enumerate(loop.seen):
        gradients = seen.raw or seen.final
        units = _units(loop, seen.parameters)
        of_update = {}
        for number, (ids, labels, rows, _) in enumerate(loop.data.groups[update][loop.rank]):
            targets = loop.targets(labels)
            places = {TOKENS: ids[targets != -100], VALUES: rows}
            for term, unit in units.items():
                place = places[term]
                denominator = float(loop.counted(targets)) if term == TOKENS else float(len(rows))
                if loop.loop.class_weights == "tokens" and term == TOKENS and loop.weight is not None:
                    denominator = float(loop.weight[targets[targets != -100]].sum())
                of_update[number, term] = _weight(gradients[_NAMES[term]][place], unit[place], denominator)
        weights.append(of_update)
        stale.append(_left(loop, update))
    return Truth(weights, stale)


_NAMES = {TOKENS: "table.weight", VALUES: "values.weight"}


def _units(loop: Loop, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per term: the gradient of every token's own loss on its own row, in float64."""
    table = parameters["table.weight"].double().requires_grad_()
    logits = table if not loop.loop.shared else table + parameters["bias"].double()
    weight = None if loop.weight is None else loop.weight.double()
    F.cross_entropy(logits, loop.data.labels, weight, reduction="sum", label_smoothing=loop.loop.smoothing).backward()
    units = {TOKENS: table.grad}
    if loop.loop.coefficient:
        units[VALUES] = 2 * (parameters["values.weight"].double() - loop.data.wanted.double().unsqueeze(1))
    return {term: unit for term, unit in units.items() if unit is not None}


def _weight(gradient: Tensor, unit: Tensor, denominator: float) -> TrueWeight:
    if not len(unit):
        return TrueWeight(0, denominator, math.nan, math.nan, math.nan)
    each = (gradient.double() * unit).sum(1) / (unit * unit).sum(1)
    return TrueWeight(len(unit), denominator, float(each.mean()), float(each.min()), float(each.max()))


def _left(loop: Loop, update: int) -> tuple[float, float]:
    if update == 0:
        return 0.0, 0.0
    gradients = loop.seen[update].raw or loop.seen[update].final
    before = loop.seen[update - 1].final["table.weight"].double()
    own = torch.cat([ids.flatten() for batches in loop.data.groups[update - 1] for ids, *_ in batches])
    norm = float((before[own] ** 2).sum())
    here = gradients["table.weight"].double()
    if not norm:
        return 0.0, 0.0
    return float((here[own] * before[own]).sum()) / norm, float(here[own].norm() / here.norm())


def _sites() -> dict[int, str]:
    """The term of every line with a loss call."""
    lines = enumerate(Path(__file__).read_text().splitlines(), start=1)
    return {number: line.rpartition("# site: ")[2] for number, line in lines if "  # site: " in line}


# ------------------------------------------------------------------------------------------------ what is right


@dataclass
class Expected:
    """What a report has to say of a case."""

    verdicts: set[str]
    required: list[set[str]] = field(default_factory=list)
    """Of each set, a finding of one kind."""
    allowed: set[str] = field(default_factory=set)
    factors: dict[tuple[str, int | None], float] = field(default_factory=dict)
    """By kind and update; None for any update."""


@dataclass
class _Term:
    """One term over the updates, by its true weights."""

    even: list[bool]
    factors: list[float]
    """Mean weight over that in one big batch, by update."""
    weights: list[float]
    tokens: list[float]
    ratios: list[list[tuple[int, float]]]
    """(rank, ratio) by update."""
    shares: list[list[tuple[int, float]]]
    """(rank, weight x denominator): the same for all microbatches where each is averaged alone."""


def _same(values: Sequence[float], tolerance: float = SAME) -> bool:
    return max(values) - min(values) <= tolerance * max(map(abs, values))


def _close(value: float, wanted: float, tolerance: float = TOLERANCE) -> bool:
    return abs(value - wanted) <= tolerance * abs(wanted)


def _term_of(truths: Sequence[Truth], term: str) -> _Term:
    found = _Term([], [], [], [], [], [])
    for update in range(len(truths[0].weights)):
        listed = [
            (rank, weight)
            for rank, truth in enumerate(truths)
            for (_, of_term), weight in truth.weights[update].items()
            if of_term == term
        ]
        total = sum(weight.denominator for _, weight in listed)
        filled = [(rank, weight) for rank, weight in listed if weight.tokens]
        if not filled:
            continue
        means = [weight.mean for _, weight in filled]
        inner = all(_same((weight.low, weight.high, weight.mean), 20 * SAME) for _, weight in filled)
        found.even.append(inner and _same(means))
        found.factors.append(sum(means) / len(means) * total)
        found.weights.append(sum(means) / len(means))
        found.tokens.append(sum(weight.tokens for _, weight in filled))
        found.ratios.append([(rank, weight.mean * total) for rank, weight in filled])
        found.shares.append([(rank, weight.mean * weight.denominator) for rank, weight in filled])
    return found


def expected(loop: Case, truths: Sequence[Truth]) -> Expected:
    """Derived from the true weights, and from which fault was put in."""
    terms = {TOKENS: _term_of(truths, TOKENS)}
    if loop.coefficient:
        terms[VALUES] = _term_of(truths, VALUES)
    right = Expected(_verdicts(loop, terms, truths))
    if loop.sync == "ddp-each" and loop.accumulate > 1:
        right.allowed.add("sync-every-microbatch")
    _faults(loop, terms, truths, right)
    return right


def _verdicts(loop: Case, terms: dict[str, _Term], truths: Sequence[Truth]) -> set[str]:
    stale = any(abs(much) > 1e-2 and share > SEEN for truth in truths for much, share in truth.stale)
    if stale or loop.fault == "unsynchronised-replicas":
        return {INEXACT}
    found, relative = set(), []
    for name, term in terms.items():
        coefficient = loop.coefficient if name == VALUES else 1.0
        declared = loop.declared if name == TOKENS else loop.second == "sum"
        if not all(term.even):
            return {INEXACT}
        if all(_close(factor, 1.0) for factor in term.factors):
            found.add(EXACT)
        elif declared and all(_close(w * n, 1.0) for w, n in zip(term.weights, term.tokens, strict=True)):
            found |= {EXACT, EXACT_UP_TO_FACTOR}  # weighted classes over the number of tokens
            relative.append(1.0)
            continue
        elif _same(term.factors, TOLERANCE) or (declared and _same(term.weights, TOLERANCE)):
            found.add(EXACT_UP_TO_FACTOR)
        else:
            return {INEXACT}
        if not (declared and _same(term.weights, TOLERANCE)):
            relative.append(term.factors[0] / coefficient)
    if len(relative) > 1 and not _same(relative, TOLERANCE):
        return {INEXACT}
    return found if len(found) == 1 or len(terms) == 1 else {EXACT_UP_TO_FACTOR}


def _faults(loop: Case, terms: dict[str, _Term], truths: Sequence[Truth], right: Expected) -> None:
    tokens = terms[TOKENS]
    uneven = not all(tokens.even)
    if loop.fault in ("mean-of-means", "mean-of-replicas"):
        kinds = {"mean-of-means", "mean-of-replicas"}
        alone = max(len(ranks) for group in loop.groups for ranks in group) == 1 or loop.idiom == "sum-group"
        kinds -= {"mean-of-means"} if alone else set()
        kinds -= {"mean-of-replicas"} if loop.replicas == 1 else set()
        right.allowed |= kinds
        within = any(
            not _same([ratio for of_rank, ratio in ratios if of_rank == rank], TOLERANCE)
            for ratios in tokens.ratios
            for rank in {of_rank for of_rank, _ in ratios}
        )
        if uneven:
            right.required.append({"mean-of-means"} if within else kinds)
    elif loop.fault == "scale":
        right.allowed.add("scale")
        right.factors["scale", None] = loop.factor
        if not (loop.declared and _same(tokens.weights, TOLERANCE)):
            right.required.append({"scale"})
        if loop.coefficient and any(_same(term.weights, TOLERANCE) for term in terms.values()):
            right.allowed.add("term-scale")  # a sum that weighs the same in every update may be meant so
            right.required = [{"scale", "term-scale"}]
            right.verdicts.add(INEXACT)
    elif loop.fault in ("partial-group", "stale-tail"):
        kind = "partial-group" if loop.fault == "partial-group" else "stale-gradient"
        right.allowed.add(kind)
        right.required.append({kind})
        right.factors[kind, loop.at] = len(loop.groups[loop.at][0]) / loop.accumulate
    elif loop.fault == "lost-microbatch":
        right.allowed.add("lost-microbatch")
        right.factors["lost-microbatch", None] = 0.0
        if uneven:
            right.required.append({"lost-microbatch"})
    elif loop.fault == "stale-gradient":
        stale, share = max(truth.stale[loop.at] for truth in truths)
        right.allowed.add("stale-gradient")
        right.factors["stale-gradient", loop.at] = stale
        if stale > 1.05e-2 and share > SEEN:
            right.required.append({"stale-gradient"})
    elif loop.fault in ("count-mismatch", "empty-microbatch"):
        right.allowed.add("count-mismatch")
        for update, factor in enumerate(tokens.factors):
            right.factors["count-mismatch", update] = factor
        if not all(_close(factor, 1.0) for factor in tokens.factors):
            right.verdicts.add(INEXACT)  # a factor that is the same in all updates by chance
            if not _same(tokens.weights, TOLERANCE):
                right.required.append({"count-mismatch"})
            elif any(_close(tokens.factors[0], n) for n in _divisors(loop)):
                right.allowed.add("scale")  # the wrong count is A or D times the right one in all updates
    elif loop.fault == "term-scale":
        right.allowed.add("term-scale")
        right.required.append({"term-scale"})
        right.factors["term-scale", None] = terms[VALUES].factors[0] / loop.coefficient
    elif loop.fault == "unsynchronised-replicas":
        right.allowed.add("unsynchronised-replicas")
        right.required.append({"unsynchronised-replicas"})
    elif loop.fault == "clip-per-microbatch":
        right.allowed |= {"clip-per-microbatch", *(("uneven-weights",) if loop.variant == "before-reduce" else ())}
        if uneven:
            right.required.append(set(right.allowed) - {"sync-every-microbatch"})
        else:
            right.verdicts.add(INEXACT)


def _divisors(loop: Case) -> set[float]:
    return {1 / loop.accumulate, 1 / loop.replicas, 1 / (loop.accumulate * loop.replicas)}


def complaints(loop: Case, document: dict[str, Any], truths: Sequence[Truth]) -> list[str]:
    """All that the report gets wrong."""
    right = expected(loop, truths)
    found = _wrong_weights(document, truths)
    if document["verdict"] not in right.verdicts:
        found.append(f"verdict {document['verdict']}, true: {' or '.join(sorted(right.verdicts))}")
    kinds = {finding["kind"] for finding in document["findings"]}
    found += [f"no finding of {' or '.join(sorted(wanted))}" for wanted in right.required if not kinds & wanted]
    found += [f"finding {kind}" for kind in sorted(kinds - right.allowed)]
    for finding in document["findings"]:
        kind, factor = finding["kind"], finding["factor"]
        wanted = right.factors.get((kind, finding["update"]), right.factors.get((kind, None)))
        if kind not in right.allowed:
            continue
        if wanted is None and any(of_kind == kind for of_kind, _ in right.factors):
            found.append(f"finding {kind} in update {finding['update']}")
        elif wanted is not None and (factor is None or not abs(factor - wanted) <= 1e-2 * abs(wanted) + 1e-9):
            found.append(f"finding {kind} in update {finding['update']}: factor {factor}, true {wanted:.6g}")
    found += document["not_observed"]
    return found


def _wrong_weights(document: dict[str, Any], truths: Sequence[Truth]) -> list[str]:
    found = []
    sites = _sites()
    reported = {update["update"]: update for update in document["updates"]}
    for update in range(len(truths[0].weights)):
        if not any(weight.tokens for truth in truths for weight in truth.weights[update].values()):
            continue
        if update not in reported:
            found.append(f"update {update} is not reported")
            continue
        rows: dict[tuple[int, int, str], Any] = {}
        for row in reported[update]["weights"]:
            file, _, line = row["site"].rpartition(":")
            key = row["rank"], row["microbatch_index"], sites.get(int(line), "?") if __file__.endswith(file) else "?"
            if key in rows or key[2] == "?":
                found.append(f"update {update}: {key} is reported twice, or is no loss call ({row['site']})")
            rows[key] = row
        for rank, truth in enumerate(truths):
            largest = max(abs(w.mean) for w in truth.weights[update].values() if w.tokens) if any(
                w.tokens for w in truth.weights[update].values()
            ) else 0.0  # fmt: skip
            for (number, term), weight in truth.weights[update].items():
                row = rows.pop((rank, number, term), None)
                place = f"update {update}, rank {rank}, microbatch {number}, {term}"
                if row is None:
                    found += [f"{place}: not reported"] if weight.tokens else []
                elif row["tokens"] != weight.tokens:
                    found.append(f"{place}: {row['tokens']} tokens, true {weight.tokens}")
                elif weight.tokens and not all(
                    a is not None and abs(a - b) <= TOLERANCE * max(abs(b), 1e-3 * largest)
                    for a, b in ((row["weight"], weight.mean), (row["min"], weight.low), (row["max"], weight.high))
                ):
                    found.append(f"{place}: weight {row['weight']:.6g}, true {weight.mean:.6g}")
        found += [f"update {update}: {key} does not exist" for key in rows if rows[key]["tokens"]]
    return found


# ------------------------------------------------------------------------------------------------ workers


def run_case(loop: Case, rank: int, join: Callable[[], None]) -> tuple[dict[str, Any], Truth]:
    """The report's document, and this rank's truth. `join` starts a process group where there is none."""
    running = Loop(loop, rank)
    if dist.is_initialized() and (loop.replicas == 1 or loop.group_inside):
        dist.destroy_process_group()
    if loop.replicas > 1 and not loop.group_inside:
        join()
    with watch(timeout=5) as seen:
        if loop.replicas > 1 and loop.group_inside:
            join()
        running.train()
    report: Report = seen.report()
    return report.document(), truth_of(running)


class Runners:
    """Two workers. Loops of one process are shared out between them, those of two replicas run on both."""

    def __init__(self) -> None:
        self._workers: list[Any] = []
        self._pipes: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, cases: Sequence[Case], timeout: float = 100) -> dict[int, tuple[dict[str, Any], list[Truth]] | str]:
        """By seed: the document and the truths by rank, or a traceback."""
        if not self._workers:
            self._start()
        alone = [loop for loop in cases if loop.replicas == 1]
        both = [loop for loop in cases if loop.replicas > 1]
        answers: list[dict[int, Any]] = []
        for rank, pipe in enumerate(self._pipes):
            pipe.send([*both, *alone[rank::2]])
        for pipe in self._pipes:
            if not pipe.poll(timeout):
                self.close()
                raise AssertionError(f"no answer in {timeout} s")
            answers.append(pipe.recv())
        return {loop.seed: _joined([answer[loop.seed] for answer in answers if loop.seed in answer]) for loop in cases}

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._workers, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="isostep-fuzz-")
        for rank in range(2):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(rank, f"{self._folder.name}/store", theirs), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)


def _joined(answers: list[Any]) -> tuple[dict[str, Any], list[Truth]] | str:
    errors = [answer for answer in answers if isinstance(answer, str)]
    if errors:
        return errors[0]
    documents = [document for document, _ in answers]
    if any(document != documents[0] for document in documents):
        return "ranks report differently"
    return documents[0], [truth for _, truth in answers]


def _serve(rank: int, path: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, 2)
    number = 0

    def join() -> None:
        if dist.is_initialized():
            return
        store.set(f"ready {number} {rank}", "")
        store.wait([f"ready {number} {other}" for other in range(2)], timedelta(seconds=60))  # after a failure of one
        prefixed = dist.PrefixStore(f"group {number}", store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=2, timeout=timedelta(seconds=20))

    while True:
        try:
            cases = pipe.recv()
        except EOFError:
            return
        answers = {}
        for loop in cases:
            number += loop.replicas > 1
            try:
                with contextlib.redirect_stdout(None):
                    answers[loop.seed] = run_case(loop, rank if loop.replicas > 1 else 0, join)
            except BaseException:
                answers[loop.seed] = traceback.format_exc()
                if dist.is_initialized():
                    dist.destroy_process_group()
        pipe.send(answers)
