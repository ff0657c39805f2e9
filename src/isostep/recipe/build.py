"""From a configuration to what trains: model, optimizers, updater, groups, learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..config import Config, parse_rule
from ..data.groups import Groups, groups
from ..data.stdlib_functions import VOCAB_SIZE
from ..errors import InputError
from ..grouping import Cursor
from ..layout import ladder
from ..learning_rate import LearningRate, learning_rate_of
from ..memory import is_out_of_memory
from ..models.decoder import Decoder, DecoderConfig
from ..objective import causal_lm
from ..optimizers import build_optimizers, set_learning_rate
from ..updater import Updater


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

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules whose state a checkpoint keeps."""
        return {"model": self.model} | ({"average": self.average} if self.average is not None else {})

    @property
    def judged(self) -> nn.Module:
        """The module that is validated: the average of the weights where one is kept and has begun."""
        return self.model if self.average is None or not self.average.n_averaged else self.average.module

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
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "schedule": self.learning_rate.text(),
            "schedule_total": self.learning_rate.total,
            "planned_updates": self.planned_updates,
            "devices": [str(self.device)] * self.updater.replicas,
            "terms": {
                causal_lm.name: {
                    "coefficient": causal_lm.coefficient,
                    "denominator": "supervised tokens of the whole group",
                }
            },
            "left_out": self.train.num_left_out,
            "validation_examples": len(self.validation),
        }

    def announcement(self, what_hash: str) -> list[str]:
        """What is going to be trained, a line each."""
        facts = self.facts()
        left_out = f", {facts['left_out']:,} too long for the context" if facts["left_out"] else ""
        return [
            f"decoder of {facts['parameters']:,} parameters; what {what_hash[:12]}",
            f"{len(self.train):,} examples to train on{left_out}; {len(self.validation):,} to validate",
            *ladder(self.groups.plan, self.updater.replicas, self.config.model.context_length).splitlines(),
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
        first, _ = next(self.groups.plan.walk(Cursor(), 1))
        if len(first.microbatches) < self.updater.replicas:
            yield (
                f"note: an update has {len(first.microbatches)} microbatches for {self.updater.replicas} replicas, "
                "some of which have nothing to do: smaller microbatches would keep them busy"
            )

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
    try:
        model = _decoder(config).to(device)
        decay = config.optimizer.ema_decay
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)) if decay else None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        shape = f"width {config.model.width}, depth {config.model.depth}"
        raise InputError.of("model", shape, "one that fits in memory", "lower [model] width or depth") from None
    optimizers = build_optimizers(model, config.optimizer)
    updater = Updater(
        model,
        optimizers,
        causal_lm,
        clip_norm=config.optimizer.clip_norm or None,
        precision=config.precision.dtype,
        overlap=config.layout.overlap,
        seed=config.update.seed,
    )
    size = config.layout.examples_per_microbatch
    size = 1 if size == "auto" else size  # until it is known
    plan = grouped(config, train, size, Cursor())
    rate = learning_rate_of(config.schedule, _derived_total(config, plan, train, config.schedule.unit))
    return Training(config, model, average, optimizers, updater, train, validation, plan, rate, device, size)


def _decoder(config: Config) -> Decoder:
    model = config.model
    shape = DecoderConfig(VOCAB_SIZE, model.context_length, width=model.width, depth=model.depth, heads=model.heads)
    return Decoder(shape, seed=model.initial_seed, activation_checkpointing=config.layout.activation_checkpointing)


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
