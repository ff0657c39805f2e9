"""Every id of every epoch is applied, skipped, empty or dropped: exactly one, in the model and in the ledger."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from isostep import Ledger, LossScale, Term, Updater, groups
from isostep.data.groups import Groups
from isostep.grouping import Cursor, Group, LastGroup
from isostep.ledger import (
    CoverageProof,
    Dropped,
    Event,
    Resumed,
    RunStarted,
    UpdateDone,
    format_hash,
    prove_coverage,
    read,
)
from isostep.ledger import fold as fold_events
from isostep.ledger.events import from_line, to_line
from isostep.result import Status
from isostep.units import Coverage
from pool import Pool


@dataclass(frozen=True)
class Case:
    """A run: its data, how it is grouped, and what becomes of the groups, in turn."""

    num_examples: int
    examples_per_update: int
    m: int
    last_group: LastGroup = "keep"
    epochs: int = 1
    seed: int = 0
    outcomes: tuple[Status, ...] = ("applied",)

    def outcome(self, epoch: int, index: int) -> Status:
        return self.outcomes[(7 * epoch + index) % len(self.outcomes)]


class Scalar(nn.Module):
    """One weight; remembers the ids that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.fed: list[int] = []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.fed += batch["id"].tolist()
        return self.w * batch["x"]


class Data:
    """Examples by id. `outcome` decides what an update over them comes to: one with an infinite input is skipped,
    one without any target is empty.
    """

    def __init__(self, num_examples: int) -> None:
        self.num_examples = num_examples
        self.outcome: Status = "applied"
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.num_examples

    def load(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        self.loaded += ids
        x = torch.tensor([1.0 + i % 5 for i in ids], dtype=torch.float64)
        if self.outcome == "skipped":
            x[-1] = torch.inf
        target = torch.full((len(ids),), self.outcome != "empty")
        return {"id": torch.tensor(ids), "x": x, "y": torch.tensor([i % 3 for i in ids]), "target": target}


def squared_error(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return torch.where(batch["target"], (outputs - batch["y"]) ** 2, 0.0).sum()


def count_targets(batch: dict[str, Tensor]) -> Tensor:
    return batch["target"].sum()


def build(optimizer: str = "SGD", process_group: Any = None) -> tuple[Scalar, Updater]:
    model = Scalar()
    make: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, nesterov=True),
        "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    }
    built = make[optimizer](model.parameters())
    updater = Updater(
        model,
        built,
        Term("squared_error", squared_error, count_targets),
        forward=lambda model, batch: model(batch),
        scheduler=torch.optim.lr_scheduler.StepLR(built, step_size=2, gamma=0.5),
        loss_scale=LossScale(scale=2.0**80, growth_interval=3),  # lasts for 100 skipped updates
        process_group=process_group,
    )
    return model, updater


def groups_of(case: Case, data: Data, start: int | Cursor = 0) -> Groups:
    return groups(
        data,
        examples_per_update=case.examples_per_update,
        examples_per_microbatch=case.m,
        seed=case.seed,
        epochs=case.epochs,
        last_group=case.last_group,
        start=start,
        load=data.load,
    )


@dataclass
class Record:
    """What really happened. `used`: (epoch, how, id) of each example, as model and loader saw it."""

    events: list[Event] = field(default_factory=list)
    used: list[tuple[int, str, int]] = field(default_factory=list)

    def drop(self, group: Group) -> None:
        ids_hash = format_hash(group.coverage)
        self.used += [(group.epoch, "dropped", example_id) for example_id in group.ids]
        self.events.append(
            Dropped(epoch=group.epoch, start=group.start, stop=group.stop, ids=group.ids, ids_hash=ids_hash)
        )


def train(case: Case, model: Scalar, updater: Updater, record: Record, start: int | Cursor, last: int = -1) -> None:
    """Updates from `start` on, up to attempt number `last`, or all; a run that is killed notes no drop after that."""
    data = Data(case.num_examples)
    walk = groups_of(case, data, start)
    num_dropped = 0
    if last == 0:
        return
    for group in walk:
        for dropped in walk.dropped[num_dropped:]:
            record.drop(dropped)
        num_dropped = len(walk.dropped)
        data.outcome = case.outcome(group.epoch, group.index)
        data.loaded.clear()
        model.fed.clear()
        result = updater.update(group)
        assert result.status == data.outcome
        # Of an empty group the model sees one microbatch at most: nothing else in it could have an effect.
        used = data.loaded if result.status == "empty" else model.fed
        record.used += [(group.epoch, result.status, example_id) for example_id in used]
        record.events.append(result.event(updater.totals.attempted))
        if updater.totals.attempted == last:
            return
    for dropped in walk.dropped[num_dropped:]:
        record.drop(dropped)


def run_started(case: Case) -> RunStarted:
    return RunStarted(
        what_hash="",
        what={},
        how={},
        run={},
        versions={},
        num_examples=case.num_examples,
        seed=case.seed,
        last_group=case.last_group,
        examples_per_update=case.examples_per_update,
    )


def proof_of(case: Case, events: Sequence[Event]) -> CoverageProof:
    """From the lines of the ledger, not from the objects: what a file would hold."""
    lines = [to_line(event) for event in [run_started(case), *events]]
    plan = groups_of(case, Data(case.num_examples)).plan
    return prove_coverage([from_line(line, "ledger") for line in lines], plan.ids_of)


def proves_everything(case: Case, proof: CoverageProof) -> bool:
    """Each example of every epoch, and none of another epoch."""
    covered = [(epoch.epoch, epoch.covered) for epoch in proof.epochs]
    return proof.ok and covered == [(epoch, case.num_examples) for epoch in range(case.epochs)]


def check_each_id_once(case: Case, used: Sequence[tuple[int, str, int]]) -> None:
    times = Counter((epoch, example_id) for epoch, _, example_id in used)
    assert times == {(epoch, i): 1 for epoch in range(case.epochs) for i in range(case.num_examples)}


def checkpoint(model: Scalar, updater: Updater) -> bytes:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "updater": updater.state_dict()}, file)
    return file.getvalue()


def resumed(saved: bytes, optimizer: str = "SGD", process_group: Any = None) -> tuple[Scalar, Updater]:
    """As another process would, from what a file holds."""
    state = torch.load(io.BytesIO(saved), weights_only=True)
    model, updater = build(optimizer, process_group)
    model.load_state_dict(state["model"])
    updater.load_state_dict(state["updater"])
    return model, updater


# ------------------------------------------------------------------------------------------- one replica


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_examples = draw(st.integers(1, 30))
    last_group: LastGroup = draw(st.sampled_from(["keep", "drop"]))
    most = num_examples if last_group == "drop" else 35
    return Case(
        num_examples=num_examples,
        examples_per_update=draw(st.integers(1, most)),
        m=draw(st.integers(1, 9)),
        last_group=last_group,
        epochs=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 99)),
        outcomes=tuple(draw(st.lists(st.sampled_from(["applied", "skipped", "empty"]), min_size=1, max_size=5))),
    )


def corruptions(events: Sequence[Event]) -> dict[str, Callable[[int], list[Event]]]:
    """Ways in which a ledger may lie about the update or drop at a place, by name."""

    def changed(i: int, **changes: Any) -> list[Event]:
        return [*events[:i], replace(events[i], **changes), *events[i + 1 :]]

    def at(i: int) -> Any:
        return events[i]

    return {
        "lost": lambda i: [*events[:i], *events[i + 1 :]],
        "doubled": lambda i: [*events[: i + 1], *events[i:]],
        "another id in it": lambda i: changed(i, ids_hash=format_hash(Coverage(int(at(i).ids_hash, 16)) + Coverage(1))),
        "begins later": lambda i: changed(i, start=at(i).start + 1),
        "ends earlier": lambda i: changed(i, stop=at(i).stop - 1),
        "of the next epoch": lambda i: changed(i, epoch=at(i).epoch + 1),
        "a drop of other ids": lambda i: changed(i, ids=(*at(i).ids[1:], at(i).ids[0] + 1)),
        "another count": lambda i: changed(i, num_examples=at(i).num_examples - 1),
        "not observed": lambda i: changed(i, coverage="unknown"),
    }


ONLY_OF = {"a drop of other ids": Dropped, "another count": UpdateDone, "not observed": UpdateDone}


@settings(deadline=None, max_examples=150)
@given(case=cases(), data=st.data())
def test_every_id_is_accounted_for_exactly_once(case: Case, data: st.DataObject) -> None:
    """With a kill and a resume anywhere; the ledger says the same, and a corrupted one does not."""
    per_epoch = groups_of(case, Data(case.num_examples)).plan.updates_per_epoch
    assert per_epoch is not None
    attempts = per_epoch * case.epochs
    saved_at = data.draw(st.integers(0, attempts), label="checkpoint after")
    killed_at = data.draw(st.integers(saved_at, attempts), label="killed after")

    model, updater = build()
    record = Record()
    train(case, model, updater, record, 0, last=saved_at)
    saved = resumed(checkpoint(model, updater))
    assert saved[1].cursor is not None
    lost = deepcopy(record)
    if killed_at > saved_at:
        assert updater.cursor is not None
        train(case, model, updater, lost, updater.cursor, last=killed_at)
    train(case, *saved, record, saved[1].cursor)

    check_each_id_once(case, record.used)
    statuses = Counter(event.status for event in record.events if isinstance(event, UpdateDone))
    totals = saved[1].totals
    assert (totals.applied, totals.skipped, totals.empty) == (
        statuses["applied"],
        statuses["skipped"],
        statuses["empty"],
    )
    assert totals.attempted == attempts

    after_kill = record.events[saved_at_index(record.events, saved_at) :]
    written = [*lost.events, Resumed(from_update=saved_at, how={}), *after_kill]
    proof = proof_of(case, written)
    assert proves_everything(case, proof), proof.faults
    for epoch in proof.epochs:
        said = {how: getattr(epoch, how) for how in ("applied", "skipped", "empty", "dropped")}
        seen = Counter(how for e, how, _ in record.used if e == epoch.epoch)
        assert said == {how: seen[how] for how in said}
    assert fold_events(written).attempted == attempts

    check_corruptions_are_found(case, record.events, data.draw)


def saved_at_index(events: Sequence[Event], attempted: int) -> int:
    """Index behind the update with this number, of an uninterrupted ledger."""
    return next((i + 1 for i, e in enumerate(events) if isinstance(e, UpdateDone) and e.attempted == attempted), 0)


def check_corruptions_are_found(case: Case, events: Sequence[Event], draw: Callable[..., Any]) -> None:
    assert proves_everything(case, proof_of(case, events))
    kinds = corruptions(events)
    name = draw(st.sampled_from(sorted(kinds)), label="corruption")
    places = [i for i, event in enumerate(events) if isinstance(event, ONLY_OF.get(name, Event))]
    if places:
        place = draw(st.sampled_from(places), label="at event")
        assert not proves_everything(case, proof_of(case, kinds[name](place)))


FOUR_FATES = Case(11, 3, 2, "drop", epochs=2, seed=4, outcomes=("applied", "skipped", "empty"))


def run_of(case: Case) -> Record:
    record = Record()
    train(case, *build(), record, 0)
    return record


def test_all_four_fates_as_literals() -> None:
    """11 examples in threes, the last two dropped: 3 applied, 3 skipped, 3 empty in the first epoch."""
    record = run_of(FOUR_FATES)
    proof = proof_of(FOUR_FATES, record.events)
    assert [epoch.text() for epoch in proof.epochs] == [
        "epoch 0: 11 of 11 examples, each exactly once: 3 applied, 3 skipped, 3 empty, 2 dropped",
        "epoch 1: 11 of 11 examples, each exactly once: 3 applied, 3 skipped, 3 empty, 2 dropped",
    ]
    assert [type(event).__name__ for event in record.events] == (["UpdateDone"] * 3 + ["Dropped"]) * 2


@pytest.mark.parametrize("name", sorted(corruptions([])))
def test_every_kind_of_corruption_is_found_at_every_place(name: str) -> None:
    events = run_of(FOUR_FATES).events
    places = [i for i, event in enumerate(events) if isinstance(event, ONLY_OF.get(name, Event))]
    assert len(places) >= 2
    for place in places:
        assert not proves_everything(FOUR_FATES, proof_of(FOUR_FATES, corruptions(events)[name](place))), place


def test_a_doubled_or_lost_example_is_found_by_the_check_itself() -> None:
    """The control of `check_each_id_once`."""
    used = run_of(FOUR_FATES).used
    check_each_id_once(FOUR_FATES, used)
    for wrong in (used[1:], [*used, used[0]], [*used[1:], used[1]]):
        with pytest.raises(AssertionError):
            check_each_id_once(FOUR_FATES, wrong)


def test_the_ledger_file_of_a_run_proves_it(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        for event in [run_started(FOUR_FATES), *run_of(FOUR_FATES).events]:
            ledger.append(event)
    events = read(tmp_path / "ledger.jsonl")
    plan = groups_of(FOUR_FATES, Data(11)).plan
    assert proves_everything(FOUR_FATES, prove_coverage(events, plan.ids_of))
    other_order = replace(plan, seed=5)
    assert not prove_coverage(events, other_order.ids_of).ok


@pytest.mark.parametrize(("killed_after", "drop_was_noted"), [(3, False), (3, True), (6, False)])
def test_a_run_killed_at_the_end_of_an_epoch_accounts_for_the_dropped_ids(
    killed_after: int, drop_was_noted: bool
) -> None:
    """Resumed by number or by cursor: the drop that follows the last update is noted once in what stands."""
    for start in (killed_after, None):
        record = Record()
        model, updater = build()
        train(FOUR_FATES, model, updater, record, 0, last=killed_after)
        assert not any(isinstance(event, Dropped) and event.epoch == killed_after // 3 - 1 for event in record.events)
        if drop_was_noted:
            record.drop(groups_of(FOUR_FATES, Data(11)).plan.group(killed_after // 3 - 1, 3))
        record.events.append(Resumed(from_update=killed_after, how={}))
        assert updater.cursor is not None
        train(FOUR_FATES, model, updater, record, updater.cursor if start is None else start)
        assert proves_everything(FOUR_FATES, proof_of(FOUR_FATES, record.events))


# ------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("optimizer", ["SGD", "momentum", "AdamW"])
@pytest.mark.parametrize("saved_at", [0, 1, 3, 4, 5, 8])
@pytest.mark.parametrize("by_number", [False, True])
def test_a_resumed_run_has_the_same_ids_and_identical_weights(optimizer: str, saved_at: int, by_number: bool) -> None:
    case = Case(10, 3, 2, epochs=3, seed=1, outcomes=("applied", "applied", "skipped", "applied", "empty"))
    model, updater = build(optimizer)
    record = Record()
    train(case, model, updater, record, 0)

    first_model, first = build(optimizer)
    second_record = Record()
    train(case, first_model, first, second_record, 0, last=saved_at)
    second_model, second = resumed(checkpoint(first_model, first), optimizer)
    assert second.cursor is not None
    train(case, second_model, second, second_record, saved_at if by_number else second.cursor)

    assert second_record.used == record.used
    assert second_model.w.item() == model.w.item()
    assert second.totals == updater.totals
    assert [e.loss for e in second_record.events if isinstance(e, UpdateDone)] == [
        e.loss for e in record.events if isinstance(e, UpdateDone)
    ]


@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
def test_resuming_without_the_updaters_state_moves_the_weights(optimizer: str) -> None:
    """The control: bit identity of the weights depends on what `state_dict` keeps."""
    case = Case(10, 3, 2, epochs=3, seed=1)
    model, updater = build(optimizer)
    train(case, model, updater, Record(), 0)

    first_model, first = build(optimizer)
    train(case, first_model, first, Record(), 0, last=5)
    second_model, second = build(optimizer)
    second_model.load_state_dict(first_model.state_dict())
    assert first.cursor is not None
    train(case, second_model, second, Record(), first.cursor)
    assert second_model.w.item() != model.w.item()


@pytest.mark.parametrize("last_group", ["keep", "drop"])
def test_a_number_of_groups_and_the_cursor_behind_them_are_the_same_start(last_group: LastGroup) -> None:
    case = Case(10, 4, 2, last_group, epochs=3)
    _, updater = build()
    walk = groups_of(case, data := Data(10))
    for done, group in enumerate(walk, start=1):
        updater.update(group)
        assert groups_of(case, data, done).start == updater.cursor
        assert updater.cursor is not None
        assert len(groups_of(case, data, done)) == len(groups_of(case, data, updater.cursor)) == len(walk) - done
    assert groups_of(case, data, 0).start == Cursor() == build()[1].cursor


# ------------------------------------------------------------------------------------------- several replicas


@dataclass(frozen=True)
class Replica:
    """What one replica brought home from a run."""

    record: Record
    weight: float
    checkpoint: bytes


def train_replica(process_group: Any, case: Case, saved: bytes, last: int) -> Replica:
    model, updater = resumed(saved, "AdamW", process_group)
    record = Record()
    assert updater.cursor is not None
    train(case, model, updater, record, updater.cursor, last)
    return Replica(record, model.w.item(), checkpoint(model, updater))


def used_by_all(replicas: Sequence[Replica]) -> list[tuple[int, str, int]]:
    """Microbatches of one group are spread over the replicas; a dropped group is known to each of them."""
    used = [entry for replica in replicas for entry in replica.record.used if entry[1] != "dropped"]
    return used + [entry for entry in replicas[0].record.used if entry[1] == "dropped"]


def without_time(events: Sequence[Event]) -> list[Event]:
    return [replace(event, time=0.0) for event in events]


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize(
    "case",
    [
        FOUR_FATES,
        Case(13, 5, 2, "keep", epochs=2, seed=1, outcomes=("applied", "empty", "applied", "skipped")),
        Case(5, 9, 4, "keep", epochs=3, seed=2, outcomes=("applied", "skipped")),
    ],
    ids=["dropped", "kept", "fewer microbatches than replicas"],
)
def test_replicas_account_for_every_id_together(pool: Pool, case: Case, num_replicas: int) -> None:
    replicas: list[Replica] = pool.run(num_replicas, train_replica, case, checkpoint(*build("AdamW")), -1)
    check_each_id_once(case, used_by_all(replicas))
    assert len({replica.weight for replica in replicas}) == 1
    for replica in replicas:
        assert without_time(replica.record.events) == without_time(replicas[0].record.events)
        assert proves_everything(case, proof_of(case, replica.record.events))
        with pytest.raises(AssertionError):
            check_each_id_once(case, used_by_all([replica, replica]))


def test_a_run_goes_on_with_another_number_of_replicas(pool: Pool) -> None:
    """4 updates on three replicas, then the rest on two: every id once, and the weight of a run on one."""
    case = Case(10, 4, 1, "drop", epochs=4, seed=3, outcomes=("applied", "applied", "skipped"))
    before: list[Replica] = pool.run(3, train_replica, case, checkpoint(*build("AdamW")), 4)
    after: list[Replica] = pool.run(2, train_replica, case, before[0].checkpoint, -1)
    check_each_id_once(case, used_by_all(before) + used_by_all(after))
    events = [*before[0].record.events, Resumed(from_update=4, how={}), *after[0].record.events]
    assert proves_everything(case, proof_of(case, events))

    model, updater = build("AdamW")
    train(case, model, updater, Record(), 0)
    assert after[0].weight == pytest.approx(model.w.item(), rel=1e-12)
    assert after[0].weight != pytest.approx(before[0].weight, rel=1e-6)
