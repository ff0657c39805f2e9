"""From a configuration to what trains: model, optimizers, updater, groups, learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..config import Config, parse_rule
from ..data.groups import Groups, groups
from ..data.stdlib_functions import VOCAB_SIZE
from ..errors import InputError
from ..grouping import Cursor, Group
from ..layout import ladder
from ..learning_rate import LearningRate, learning_rate_of
from ..memory import is_out_of_memory
from ..models.decoder import Decoder, DecoderConfig
from ..objective import causal_lm
from ..optimizers import build_optimizers, set_learning_rate
from ..units import count
from ..updater import Updater
from .staging import Staging, sample, stage
from .state import Held


@dataclass
class Training:
    """What trains, in one process."""

    config: Config
    model: nn.Module
    average: AveragedModel | None
    optimizers: list[torch.optim.Optimizer]
    updater: Updater
    train: Any
    validation: Any
    groups: Groups
    learning_rate: LearningRate
    device: torch.device
    examples_per_microbatch: int | None
    staging: Staging | None = None

    @property
    def weights(self) -> nn.Module:
        """What this rank trains."""
        return self.model if self.staging is None else self.staging.model.layers

    @property
    def held(self) -> Held:
        """What a checkpoint keeps."""
        if self.staging is not None:
            return self.staging.held(self.average)
        return Held.whole({"model": self.model} | ({"average": self.average} if self.average is not None else {}))

    @property
    def judged(self) -> nn.Module | None:
        """What is validated instead of the trained weights: their average, where one is kept and has begun."""
        return self.average.module if self.average is not None and self.average.n_averaged else None

    @property
    def planned_updates(self) -> int | None:
        """Attempted updates of the whole run; None for a budget of tokens, where nobody knows before."""
        per_epoch, limit = self.groups.plan.updates_per_epoch, self.config.run.updates
        if per_epoch is None:
            return limit
        return min(self.config.run.epochs * per_epoch, limit or 1 << 62)

    @property
    def planned_examples(self) -> int:
        """Examples of the whole run, if no limit on updates ends it before."""
        return self.config.run.epochs * len(self.train)

    @property
    def progress(self) -> dict[str, int]:
        """What has been applied, on each axis."""
        totals = self.updater.totals
        counts = totals.applied_counts
        return {
            "updates": totals.applied,
            "examples": counts.examples,
            "supervised_tokens": counts.supervised_tokens,
        }

    @property
    def cursor(self) -> Cursor:
        """Where the next group begins."""
        assert self.updater.cursor is not None
        return self.updater.cursor

    @property
    def evaluation_size(self) -> int:
        """Examples per microbatch in validation: as in training, for examples of full length."""
        tokens = self.config.layout.tokens_per_microbatch or 0
        return self.examples_per_microbatch or max(1, tokens // self.config.model.context_length)

    def facts(self) -> dict[str, Any]:
        """What a report wants to know beside the configuration."""
        return {
            "parameters": sum(parameter.numel() for parameter in self._parameters),
            "schedule": self.learning_rate.text(),
            "schedule_total": self.learning_rate.total,
            "planned_updates": self.planned_updates,
            "devices": [str(self.device)] * self.updater.replicas * self.config.layout.stages,
            "terms": {
                causal_lm.name: {
                    "coefficient": causal_lm.coefficient,
                    "denominator": "supervised tokens of the whole group",
                }
            },
            "left_out": self.train.num_left_out,
            "validation_examples": len(self.validation),
        } | ({} if self.staging is None else {"cut": self.staging.cut()})

    def announcement(self, what_hash: str) -> list[str]:
        """What is going to be trained, a line each."""
        facts = self.facts()
        left_out = f", {facts['left_out']:,} too long for the context" if facts["left_out"] else ""
        return [
            f"decoder of {facts['parameters']:,} parameters; what {what_hash[:12]}",
            f"{len(self.train):,} examples to train on{left_out}; {len(self.validation):,} to validate",
            *ladder(self.groups.plan, self.updater.replicas, self.config.model.context_length).splitlines(),
            *([] if self.staging is None else self.staging.text(self._microbatches_per_replica)),
            f"learning rate: {facts['schedule']}",
            *self._notes(),
        ]

    def _notes(self) -> Iterator[str]:
        """What a user may not have meant."""
        rule, quality, total = self.config.quality.accept_if, self.config.quality, self.learning_rate.total
        run = _derived_total(self.config, self.groups, self.train, self.config.schedule.unit)
        if total is not None and run is not None and total != run:
            which = "the schedule ends before the run" if total < run else "the run ends before the schedule"
            yield f"note: {which}: after {min(total, run):,} of {max(total, run):,} {self.config.schedule.unit}"
        end = _derived_total(self.config, self.groups, self.train, quality.axis)
        if rule is not None and end is not None and parse_rule(rule)[2] > end:
            yield f"note: the quality rule {rule!r} lies beyond the run's end at {end:,} {quality.axis}"
        if self.config.run.timeline and self.staging is None:
            yield "note: a timeline is of stages, of which this run has one: nothing is measured"
        stages, most = self.config.layout.stages, self._microbatches_per_replica
        if most < stages:
            yield (
                f"note: a replica has {count(most, 'microbatch')} for {stages} stages: smaller microbatches would keep "
                "them busy"
            )
        if (num_microbatches := len(self._first_group.microbatches)) < self.updater.replicas:
            yield (
                f"note: an update has {num_microbatches} microbatches for {self.updater.replicas} replicas, "
                "some of which have nothing to do: smaller microbatches would keep them busy"
            )

    @property
    def _first_group(self) -> Group:
        return next(self.groups.plan.walk(Cursor(), 1))[0]

    @property
    def _microbatches_per_replica(self) -> int:
        """A of the first group."""
        return -(-len(self._first_group.microbatches) // self.updater.replicas)

    @property
    def _parameters(self) -> Iterable[nn.Parameter]:
        """Of the whole model, each once."""
        return self.model.parameters() if self.staging is None else self.staging.model.all_parameters

    def set_learning_rate(self) -> float:
        """Set the learning rate of the next update by what has been applied; returns it."""
        factor = self.learning_rate.factor(self.progress[self.config.schedule.unit])
        rate = self.config.optimizer.learning_rate * factor
        set_learning_rate(self.optimizers, rate)
        return rate


def device_of_worker() -> torch.device:
    """The device of this worker: its CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def build(config: Config, train: Any, validation: Any) -> Training:
    """Everything at the run's first update; `place` moves it on. Raises InputError for sizes that do not fit."""
    device = device_of_worker()
    size = config.layout.examples_per_microbatch
    size = 1 if size == "auto" else size  # until it is known
    plan = grouped(config, train, size, Cursor())
    model: nn.Module
    staging, held = None, None
    try:
        model = decoder = _decoder(config).to(device)
        if config.layout.stages > 1:
            staging = stage(config, decoder, sample(plan, train))
            model, held = staging.model, staging.holds
        decay = config.optimizer.ema_decay
        weights = model if staging is None else staging.model.layers
        average = AveragedModel(weights, multi_avg_fn=get_ema_multi_avg_fn(decay)) if decay else None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        shape = f"width {config.model.width}, depth {config.model.depth}"
        raise InputError.of("model", shape, "one that fits in memory", "lower [model] width or depth") from None
    optimizers = build_optimizers(decoder, config.optimizer, held)
    updater = Updater(
        model,
        optimizers,
        causal_lm,
        clip_norm=config.optimizer.clip_norm or None,
        precision=config.precision.dtype,
        overlap=config.layout.overlap,
        seed=config.update.seed,
    )
    rate = learning_rate_of(config.schedule, _derived_total(config, plan, train, config.schedule.unit))
    return Training(config, model, average, optimizers, updater, train, validation, plan, rate, device, size, staging)


def _decoder(config: Config) -> Decoder:
    model = config.model
    shape = DecoderConfig(VOCAB_SIZE, model.context_length, width=model.width, depth=model.depth, heads=model.heads)
    recomputes = config.layout.stages == 1 and bool(config.layout.activation_checkpointing)  # else its stages do
    return Decoder(shape, seed=model.initial_seed, activation_checkpointing=recomputes)


def grouped(config: Config, train: Any, examples_per_microbatch: int | None, start: Cursor) -> Groups:
    """The groups of a run from `start`."""
    return groups(
        train,
        examples_per_update=config.update.examples_per_update,
        tokens_per_update=config.update.tokens_per_update,
        examples_per_microbatch=examples_per_microbatch,
        tokens_per_microbatch=config.layout.tokens_per_microbatch,
        seed=config.update.seed,
        epochs=config.run.epochs,
        last_group=config.update.last_group,
        start=start,
    )


def _derived_total(config: Config, plan: Groups, train: Any, unit: str) -> int | None:
    """Length of the run in updates, examples or supervised tokens; None where nobody knows it before."""
    epochs, limit, per_epoch = config.run.epochs, config.run.updates, plan.plan.updates_per_epoch
    keeps_all = config.update.last_group == "keep"
    updates = limit if per_epoch is None else min(epochs * per_epoch, limit or 1 << 62)
    if unit == "updates":
        return updates
    if limit is None and keeps_all:
        return epochs * (len(train) if unit == "examples" else train.num_supervised_tokens)
    size = config.update.examples_per_update
    if unit == "examples" and size is not None and per_epoch is not None and updates is not None:
        used = min(len(train), per_epoch * size)  # less where the last group is dropped
        whole, rest = divmod(updates, per_epoch)
        return whole * used + min(rest * size, used)
    return None
