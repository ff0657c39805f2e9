"""Data: padded batches, groups that carry data, what a batch says about its ids, and exact evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from isostep import CoverageError, PeerError, Term, Updater, groups, mse, ready_groups
from isostep.data.collate import pad_batch
from isostep.data.groups import count_examples, ids_of
from isostep.errors import InputError
from isostep.evaluate import EvaluationResult
from isostep.grouping import Cursor, EpochOrder
from isostep.units import Coverage
from pool import Pool


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def lists(value: Any) -> Any:
    """A batch with its tensors as lists, to be compared with literals."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: lists(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(map(lists, value))
    return value


# ------------------------------------------------------------------------------------------- padded batches


def test_mappings_are_padded_by_the_meaning_of_their_entries() -> None:
    examples = [
        {"id": 7, "input_ids": torch.tensor([5, 6, 7]), "labels": torch.tensor([5, 6, 7]), "name": "a"},
        {"id": 9, "input_ids": torch.tensor([8]), "labels": torch.tensor([8]), "name": "b"},
    ]
    batch = pad_batch(examples)
    assert lists(batch) == {
        "id": [7, 9],
        "input_ids": [[5, 6, 7], [8, 0, 0]],
        "labels": [[5, 6, 7], [8, -100, -100]],
        "name": ["a", "b"],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }
    assert {batch[key].dtype for key in ("id", "input_ids", "labels", "attention_mask")} == {torch.int64}


def test_a_token_of_0_is_not_taken_for_padding() -> None:
    batch = pad_batch([{"input_ids": [0, 0]}, {"input_ids": [0]}])
    assert lists(batch) == {"input_ids": [[0, 0], [0, 0]], "attention_mask": [[1, 1], [1, 0]]}


def test_an_attention_mask_of_the_examples_is_kept() -> None:
    batch = pad_batch([{"input_ids": [1, 2], "attention_mask": [0, 1]}, {"input_ids": [3], "attention_mask": [1]}])
    assert lists(batch) == {"input_ids": [[1, 2], [3, 0]], "attention_mask": [[0, 1], [1, 0]]}


def test_no_attention_mask_is_made_without_a_length() -> None:
    assert lists(pad_batch([{"input_ids": 4}, {"input_ids": 5}])) == {"input_ids": [4, 5]}


def test_tuples_give_tuples_whose_later_integers_are_labels() -> None:
    batch = pad_batch([(torch.tensor([1, 2]), torch.tensor([3, 4])), (torch.tensor([1]), torch.tensor([3]))])
    assert lists(batch) == ([[1, 2], [1, 0]], [[3, 4], [3, -100]])
    assert lists(pad_batch([(torch.ones(2), 3, "a"), (torch.zeros(2), 4, "b")])) == (
        [[1, 1], [0, 0]],
        [3, 4],
        ["a", "b"],
    )


def test_namedtuples_stay_what_they_are() -> None:
    batch = pad_batch([Pair(torch.tensor([1.5]), torch.tensor(0)), Pair(torch.tensor([2.5]), torch.tensor(1))])
    assert isinstance(batch, Pair)
    assert lists(batch) == Pair([[1.5], [2.5]], [0, 1])


def test_pairs_of_arrays_are_two_columns() -> None:
    """As data sets of numpy arrays give them; stacked into one tensor, the targets would go into the model."""
    x, y = pad_batch([(np.ones(2, np.float32), np.zeros(2, np.float32))] * 3)
    assert (lists(x), lists(y)) == ([[1, 1]] * 3, [[0, 0]] * 3)
    assert lists(pad_batch([(np.float32(1.5), np.int64(2))] * 2)) == ([1.5, 1.5], [2, 2])


@pytest.mark.parametrize(
    ("examples", "expected", "dtype"),
    [
        ([3, 4], [3, 4], torch.int64),
        ([0.5, 1.5], [0.5, 1.5], torch.float32),
        ([torch.tensor([1.0]), torch.tensor([2.0])], [[1.0], [2.0]], torch.float32),
        ([torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [[1.0, 2.0], [3.0, 0.0]], torch.float32),
        ([np.array([1, 2]), np.array([3])], [[1, 2], [3, 0]], torch.int64),
        ([torch.tensor([True, True]), torch.tensor([True])], [[True, True], [True, False]], torch.bool),
    ],
)
def test_other_examples_are_stacked(examples: list[Any], expected: list[Any], dtype: torch.dtype) -> None:
    batch = pad_batch(examples)
    assert (lists(batch), batch.dtype) == (expected, dtype)


def test_strings_stay_a_list() -> None:
    assert pad_batch(["ab", "c"]) == ["ab", "c"]


def test_features_of_unequal_first_dimension_are_padded() -> None:
    batch = pad_batch([{"x": torch.ones(2, 3)}, {"x": torch.ones(1, 3)}])
    assert lists(batch) == {"x": [[[1, 1, 1], [1, 1, 1]], [[1, 1, 1], [0, 0, 0]]]}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("lengths", [(2, 2), (2, 1)])
def test_whole_numbers_beside_fractions_lose_nothing(lengths: tuple[int, int], swapped: bool) -> None:
    """Whatever the order: padded into the integers of the first example, 0.5 would be 0."""
    whole, fractions = {"y": [1, 2][: lengths[0]]}, {"y": [0.5, 0.25][: lengths[1]]}
    batch = pad_batch([fractions, whole] if swapped else [whole, fractions])
    assert sorted(batch["y"].flatten().tolist()) == sorted([1, 2, 0.5, 0.25 if lengths[1] == 2 else 0])


def test_an_empty_list_does_not_make_integers_fractions() -> None:
    for examples in ([{"input_ids": []}, {"input_ids": [3]}], [{"input_ids": [3]}, {"input_ids": []}]):
        assert pad_batch(examples)["input_ids"].dtype == torch.int64


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([{"x": torch.ones(2, 3)}, {"x": torch.ones(1, 4)}], "entry 'x': got [(2, 3), (1, 4)], expected shapes"),
        ([{"x": torch.ones(2)}, {"x": torch.tensor(1.0)}], "entry 'x': got [(2,), ()], expected shapes"),
        ([{"x": torch.tensor(1.0)}, {"x": torch.ones(2)}], "entry 'x': got [(), (2,)], expected shapes"),
        ([torch.ones(2, 3), torch.ones(2, 4)], "entry 'example': got [(2, 3), (2, 4)], expected shapes"),
        ([(torch.ones(1), torch.ones(1, 2)), (torch.ones(1), torch.ones(1))], "entry 1: got [(1, 2), (1,)], expected"),
        ([{"x": 1}, {"x": 1, "labels": 2}], "entries of an example: got ['labels', 'x'], expected ['x']"),
        ([{"x": 1, "labels": 2}, {"x": 1}], "entries of an example: got ['x'], expected ['labels', 'x']"),
        ([(1, 2), (1, 2, 3)], "number of entries of an example: got 3, expected 2"),
        ([{"x": None}], "entry 'x': got 'NoneType', expected tensors, numbers"),
        ([{"x": {"deeper": 1}}], "entry 'x': got 'dict', expected tensors, numbers"),
        ([{"x": 1}, {"x": "one"}], "entry 'x': got 'str', expected tensors, numbers"),
        ([((torch.ones(2), torch.ones(2)), 1)], "entry 0: got 'tuple', expected tensors, numbers"),
        ([{"x": [[1, 2], [3]]}], "entry 'x': got 'list', expected tensors, numbers"),
    ],
)
def test_examples_that_do_not_go_together_are_refused(examples: list[Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        pad_batch(examples)
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith("; give `collate`, a function from a list of examples to a batch")


# ------------------------------------------------------------------------------------------- groups of a data set


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)


class Lengths(list[Any]):
    lengths = (4, 4, 9, 1, 5, 5, 2, 2)


@pytest.mark.parametrize(
    ("data", "sizes", "message"),
    [
        (iter([1, 2]), {}, "data: got 'list_iterator', expected a map-style data set"),
        ({1, 2}, {}, "data: got 'set', expected a map-style data set"),
        (DataLoader([1, 2]), {}, "data: got 'DataLoader', expected a map-style data set"),
        (Stream(), {}, "data: got 'Stream', expected a map-style data set"),
        ([], {}, "data set: got 0, expected 1 example or more"),
        ([1], {"examples_per_update": 0}, "examples_per_update: got 0, expected a whole number of 1 or more"),
        ([1], {"examples_per_update": None}, "examples_per_update and tokens_per_update: got None"),
        ([1], {"examples_per_microbatch": -1}, "examples_per_microbatch: got -1, expected a whole number"),
        ([1], {"tokens_per_microbatch": 8}, "length_of: got None, expected a function"),
        ([1], {"examples_per_update": None, "tokens_per_update": 8}, "length_of: got None, expected a function"),
        ([1], {"last_group": "pad"}, "last_group: got 'pad', expected 'keep' or 'drop'"),
        ([1], {"last_group": "drop"}, "examples_per_update: got 4, expected at most 1"),
        ([1], {"epochs": 0}, "epochs: got 0, expected a whole number of 1 or more"),
        ([1], {"epochs": 1.5}, "epochs: got 1.5, expected a whole number of 1 or more"),
        ([1], {"seed": None}, "seed: got None, expected an int"),
        ([1], {"start": -1}, "start: got -1, expected 0 or more"),
        ([1], {"start": None}, "start: got None, expected 0 or more"),
        ([1], {"start": 0.5}, "start: got 0.5, expected 0 or more"),
        (
            Lengths("abcdefgh"),
            {"examples_per_update": None, "tokens_per_update": 8, "start": 3},
            "start: got 3, expected a Cursor",
        ),
    ],
)
def test_groups_refuses_what_makes_no_group(data: Any, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        groups(data, **{"examples_per_update": 4, **sizes})
    assert str(caught.value).startswith(message)
    assert "; " in str(caught.value)


def test_groups_hold_the_data_of_their_ids() -> None:
    data = [10.0 * i for i in range(10)]
    walk = groups(data, examples_per_update=4, examples_per_microbatch=3, seed=1)
    order = EpochOrder(10, 1, 0).ids(0, 10)
    found = [microbatch for group in walk for microbatch in group.load(0, 1, lambda *_: None)]
    assert [microbatch.ids for microbatch in found] == [
        tuple(order[a:b]) for a, b in [(0, 3), (3, 4), (4, 7), (7, 8), (8, 10)]
    ]
    assert [microbatch.batch.tolist() for microbatch in found] == [[data[i] for i in m.ids or ()] for m in found]
    assert len(walk) == 3
    assert [group.more for group in walk] == [True] * 3


def test_a_microbatch_has_one_example_where_nothing_is_said() -> None:
    (group,) = groups(range(3), examples_per_update=3)
    assert group.group.microbatches == tuple((i,) for i in EpochOrder(3, 0, 0).ids(0, 3))


def test_a_replica_loads_only_its_own_microbatches() -> None:
    asked: list[int] = []

    def load(ids: tuple[int, ...]) -> Tensor:
        asked.extend(ids)
        return torch.tensor(ids)

    (group,) = groups(range(9), examples_per_update=9, examples_per_microbatch=2, load=load)
    assert asked == []
    loaded = [m.ids for m in group.load(1, 3, lambda *_: None)]
    assert loaded == list(group.group.microbatches[2:4])
    assert tuple(asked) == sum(group.group.microbatches[2:4], ())


def test_lengths_of_the_data_set_are_used_for_budgets_of_tokens() -> None:
    data = Lengths("abcdefgh")
    by_attribute = groups(data, tokens_per_update=10, tokens_per_microbatch=8)
    by_function = groups(
        list("abcdefgh"), tokens_per_update=10, tokens_per_microbatch=8, length_of=lambda i: Lengths.lengths[i]
    )
    found = [group.group for group in by_attribute]
    assert found == [group.group for group in by_function]
    assert all(sum(data.lengths[i] for i in group.ids) <= 10 for group in found)
    assert len(found) > 3
    with pytest.raises(TypeError, match="no length before it is walked"):
        len(by_attribute)


@pytest.mark.parametrize(("start", "left"), [(0, 6), (1, 5), (3, 3), (6, 0), (7, 0), (Cursor(1, 4, 1), 2)])
def test_the_number_of_updates_left_is_that_of_the_walk(start: int | Cursor, left: int) -> None:
    walk = groups(range(10), examples_per_update=4, epochs=2, start=start)
    assert len(walk) == left == len(list(walk))


# ------------------------------------------------------------------------------------------- what a batch says


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (torch.tensor([3, 1]), (3, 1)),
        (torch.tensor([[3], [1]]), (3, 1)),
        (torch.tensor(3), (3,)),
        ([3, 1], (3, 1)),
        ((3, 1), (3, 1)),
        (np.array([3, 1]), (3, 1)),
        ([np.int64(3), 1], (3, 1)),
        ([torch.tensor(3)], (3,)),
        (3, (3,)),
        ([1 << 63], (1 << 63,)),
        (torch.tensor([], dtype=torch.int64), ()),
        ([], ()),
        (torch.tensor([3.0]), None),
        (["train-3"], None),
        ("3", None),
        (None, None),
    ],
)
def test_the_ids_that_a_batch_says_it_has(entry: Any, expected: tuple[int, ...] | None) -> None:
    found = ids_of({"id": entry})
    assert found == expected
    assert all(type(i) is int for i in found or ())


@pytest.mark.parametrize("batch", [{"x": torch.ones(1)}, (torch.tensor([1]),), torch.tensor([1]), None])
def test_a_batch_without_an_entry_id_says_nothing(batch: Any) -> None:
    assert ids_of(batch) is None


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.ones(4, 2), 4),
        ((torch.ones(3), torch.ones(5)), 3),
        ({"scale": torch.tensor(2.0), "name": ["a"], "x": torch.ones(2, 5)}, 2),
        ({"inner": {"x": torch.ones(6)}}, 6),
        ({"scale": torch.tensor(2.0)}, 0),
        ("text", 0),
    ],
)
def test_the_examples_of_a_ready_batch(batch: Any, expected: int) -> None:
    assert count_examples(batch) == expected


# ------------------------------------------------------------------------------------------- coverage


class Weight(nn.Module):
    """One weight w; the output is w * x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class Told:
    """Examples that say their id; `lie` changes what example 2 says."""

    def __init__(self, lie: int = 2) -> None:
        self.lie = lie

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        said = self.lie if index == 2 else index
        x = torch.tensor(float(index), dtype=torch.float64)
        return {"id": torch.tensor(said), "x": x, "labels": x + 1}


def repeating(examples: list[Any]) -> Any:
    """Lets the first example stand for the last: the count is right, the ids are not."""
    return pad_batch([*examples[:-1], examples[0]])


def doubling(examples: list[Any]) -> Any:
    return pad_batch([*examples, examples[0]])


NOTHING = {"id": torch.tensor([], dtype=torch.int64), "x": torch.zeros(0).double(), "labels": torch.zeros(0).double()}


def losing(examples: list[Any]) -> Any:
    """Loses the microbatch with example 2 and goes on with what is left of it: nothing."""
    return NOTHING if any(int(example["id"]) == 2 for example in examples) else pad_batch(examples)


def late(data: Told) -> Callable[[tuple[int, ...]], Any]:
    """A loader that gives the microbatch before once more, except for the very first."""
    loaded: list[Any] = []

    def load(ids: tuple[int, ...]) -> Any:
        loaded.append(pad_batch([data[i] for i in ids]))
        return loaded[-2] if len(loaded) > 1 else loaded[-1]

    return load


def counted_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, list[int]]:
    """An optimizer, and a list that grows whenever it runs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runs: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: runs.append(1))
    return optimizer, runs


def first_group(**options: Any) -> Any:
    data = options.pop("data", Told())
    return next(iter(groups(data, **{"examples_per_update": 6, "examples_per_microbatch": 2, **options})))


@pytest.mark.parametrize(
    "options",
    [
        {"data": Told(lie=5)},
        {"data": Told(lie=77)},
        {"collate": repeating},
        {"collate": doubling},
        {"collate": losing},
        {"load": late(Told())},
    ],
    ids=["says another's id", "says a foreign id", "repeats one for another", "repeats one", "loses some", "late"],
)
def test_other_examples_than_the_groups_stop_the_update(options: dict[str, Any]) -> None:
    model = Weight()
    optimizer, runs = counted_optimizer(model)
    updater = Updater(model, optimizer, mse)
    with pytest.raises(CoverageError, match=r"epoch 0, group 0: got \d+ examples .* expected 6 with hash"):
        updater.update(first_group(**options))
    assert (model.w.item(), runs, model.w.grad) == (1.0, [], None)
    assert updater.totals.attempted == 0

    result = updater.update(first_group())  # the control: the true examples, with the same updater
    assert (result.status, runs) == ("applied", [1])
    assert result.coverage == Coverage.of(range(6))
    assert model.w.item() != 1.0


def test_a_loader_that_loses_everything_stops_the_update() -> None:
    """It would be an empty group whose coverage the ledger calls proved."""
    updater = plain_updater()
    with pytest.raises(CoverageError):
        updater.update(first_group(collate=lambda examples: NOTHING))


@dataclass(frozen=True)
class Attempted:
    """What became of an update on one replica."""

    raised: str | None
    weight: float
    runs: int


def update_with_a_wrong_loader(process_group: Any, wrong: bool) -> Attempted:
    """Two replicas; the loader of replica 1 gives it the examples of replica 0, if `wrong`."""
    model = Weight()
    optimizer, runs = counted_optimizer(model)
    updater = Updater(model, optimizer, mse, process_group=process_group)
    group = first_group(examples_per_update=4).group
    data = Told()

    def load(ids: tuple[int, ...]) -> Any:
        mine = group.microbatches_of(updater.replica, 2)
        taken = group.microbatches_of(0, 2)[mine.index(ids)] if wrong else ids
        return pad_batch([data[i] for i in taken])

    try:
        updater.update(first_group(load=load, examples_per_update=4))
    except CoverageError as error:
        return Attempted(str(error), model.w.item(), len(runs))
    return Attempted(None, model.w.item(), len(runs))


def test_a_replica_with_anothers_examples_stops_all_replicas(pool: Pool) -> None:
    wrong: list[Attempted] = pool.run(2, update_with_a_wrong_loader, True)
    assert [(attempt.weight, attempt.runs) for attempt in wrong] == [(1.0, 0)] * 2
    assert wrong[0].raised is not None
    assert wrong[0].raised == wrong[1].raised

    right: list[Attempted] = pool.run(2, update_with_a_wrong_loader, False)
    assert [(attempt.raised, attempt.runs) for attempt in right] == [(None, 1)] * 2
    assert right[0].weight == right[1].weight != 1.0


# ------------------------------------------------------------------------------------------- ready batches


def ready_batches(replica: int, num_batches: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of one to three examples, others on every replica."""
    generator = torch.Generator().manual_seed(replica)
    sizes = [1 + (replica + i) % 3 for i in range(num_batches)]
    return [
        (torch.rand(size, generator=generator).double(), torch.rand(size, generator=generator).double())
        for size in sizes
    ]


def reference_weights(groups_of_batches: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> list[float]:
    """The weight after each update: plain torch, all examples of a group at once, mean squared error, lr 0.1."""
    w = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    weights = []
    for batches in groups_of_batches:
        x, y = (torch.cat(column) for column in zip(*batches, strict=True))
        (gradient,) = torch.autograd.grad(((w * x - y) ** 2).mean(), w)
        with torch.no_grad():
            w -= 0.1 * gradient
        weights.append(w.item())
    return weights


def train_on_ready_batches(process_group: Any, num_batches: Sequence[int], overlap: bool) -> list[tuple[str, float]]:
    """Status of each update and the weight after it, for one replica."""
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = Updater(model, optimizer, mse, process_group=process_group, overlap=overlap)
    batches = ready_batches(updater.replica, num_batches[updater.replica])
    seen = []
    for group in ready_groups(iter(batches), microbatches_per_replica=2):
        result = updater.update(group)
        seen.append((result.status, model.w.item()))
    return seen


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_batches", [(5, 2, 0), (0, 5, 3), (0, 1), (4, 4), (1, 6)])
def test_replicas_run_out_of_ready_batches_at_different_times(
    pool: Pool, num_batches: tuple[int, ...], overlap: bool
) -> None:
    """Nobody waits for a replica without data, and each update is that of all batches that it has."""
    all_batches = [ready_batches(replica, number) for replica, number in enumerate(num_batches)]
    num_updates = -(-max(num_batches) // 2)
    parts = [[b for batches in all_batches for b in batches[2 * k : 2 * k + 2]] for k in range(num_updates)]
    wanted = reference_weights(parts)
    replicas = pool.run(len(num_batches), train_on_ready_batches, num_batches, overlap)
    assert replicas == [replicas[0]] * len(num_batches)
    statuses, weights = zip(*replicas[0], strict=True)
    assert statuses == ("applied",) * num_updates
    assert weights == pytest.approx(wanted, rel=1e-12)
    without_last = reference_weights([part[:-1] or part for part in parts])
    assert max(map(len, parts)) == 1 or weights != pytest.approx(without_last, rel=1e-6)


def test_where_no_replica_has_data_one_update_is_empty(pool: Pool) -> None:
    assert pool.run(2, train_on_ready_batches, (0, 0), False) == [[("empty", 1.0)]] * 2


def test_ready_groups_take_up_to_so_many_batches() -> None:
    found = [
        (group.index, group.epoch, group.batches)
        for group in ready_groups(range(5), microbatches_per_replica=2, epoch=3)
    ]
    assert found == [(0, 3, [0, 1]), (1, 3, [2, 3]), (2, 3, [4])]
    assert [group.more for group in ready_groups(range(4), microbatches_per_replica=2)] == [True, False]


@pytest.mark.parametrize("size", [0, -2])
def test_ready_groups_of_no_size_are_refused(size: int) -> None:
    with pytest.raises(InputError, match=f"microbatches_per_replica: got {size}, expected 1 or more"):
        next(ready_groups([1], microbatches_per_replica=size))


def test_a_dataloader_is_a_source_of_ready_batches() -> None:
    x, y = torch.rand(7, generator=torch.Generator().manual_seed(1)).double(), torch.ones(7).double()
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    model = Weight()
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), mse)
    results = [updater.update(group) for group in ready_groups(loader, microbatches_per_replica=2)]
    assert [(r.counts.microbatches, r.counts.examples) for r in results] == [(2, 6), (1, 1)]
    assert model.w.item() == pytest.approx(reference_weights([[(x[:6], y[:6])], [(x[6:], y[6:])]])[-1], rel=1e-12)
    assert [r.coverage for r in results] == [None, None]
    assert [r.event(1).coverage for r in results] == ["unknown", "unknown"]
    assert updater.cursor is None


def test_ready_batches_that_say_their_ids_are_hashed_but_not_proved() -> None:
    """What went in is known, what should have is not."""
    model = Weight()
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), mse)
    data = Told()
    result = updater.update([pad_batch([data[i] for i in ids]) for ids in [(4, 1), (2,)]])
    assert result.coverage == Coverage.of([1, 2, 4])
    assert result.event(1).coverage == "unknown"
    assert result.positions == (-1, -1)


@pytest.mark.parametrize("group", [iter([1]), {"x": torch.ones(1)}, torch.ones(2)])
def test_an_update_of_something_else_is_refused(group: Any) -> None:
    model = Weight()
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), mse)
    with pytest.raises(
        InputError, match=f"group: got '{type(group).__name__}', expected a group, or a list of batches"
    ):
        updater.update(group)


# ------------------------------------------------------------------------------------------- evaluation


def masked_mean(name: str, mask: str, coefficient: float) -> Term:
    return Term(
        name,
        lambda outputs, batch: ((outputs - batch["labels"]).square() * batch[mask]).sum(),
        lambda batch: batch[mask].sum(),
        coefficient,
    )


TWO_TERMS = (masked_mean("all", "one", 1.0), masked_mean("some", "rare", 0.25))


def evaluation_data(num_examples: int) -> list[dict[str, Tensor]]:
    """Every third example counts in the second term; the targets differ a lot."""
    return [
        {
            "x": torch.tensor(1.0 + i, dtype=torch.float64),
            "labels": torch.tensor(float(i * i), dtype=torch.float64),
            "one": torch.tensor(1),
            "rare": torch.tensor(int(i % 3 == 1)),
        }
        for i in range(num_examples)
    ]


def by_hand(num_examples: int, w: float) -> tuple[float, dict[str, float | None], dict[str, float]]:
    squares = [(w * (1 + i) - i * i) ** 2 for i in range(num_examples)]
    rare = squares[1::3]
    first = sum(squares) / num_examples
    second = sum(rare) / len(rare) if rare else None
    loss = first if second is None else first + 0.25 * second
    return loss, {"all": first, "some": second}, {"all": float(num_examples), "some": float(len(rare))}


def plain_updater(model: nn.Module | None = None, objective: Any = mse, process_group: Any = None) -> Updater:
    model = model or Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Updater(model, optimizer, objective, process_group=process_group)


def evaluate_on_replica(process_group: Any, num_examples: int, sizes: Sequence[int]) -> list[EvaluationResult]:
    updater = plain_updater(objective=TWO_TERMS, process_group=process_group)
    return [updater.evaluate(evaluation_data(num_examples), examples_per_microbatch=m) for m in sizes]


def check_evaluation(result: EvaluationResult, num_examples: int) -> None:
    loss, terms, denominators = by_hand(num_examples, w=1.0)
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert list(result.terms) == list(terms)
    for name, mean in terms.items():
        assert result.terms[name] == (None if mean is None else pytest.approx(mean, rel=1e-12))
    assert result.denominators == denominators
    assert result.counts.examples == num_examples


@pytest.mark.parametrize("num_examples", [1, 2, 7, 12])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 12, 50])
def test_evaluation_is_the_exact_mean_for_any_microbatch(num_examples: int, m: int) -> None:
    """A last partial microbatch included, and data that is smaller than one."""
    result = plain_updater(objective=TWO_TERMS).evaluate(evaluation_data(num_examples), examples_per_microbatch=m)
    check_evaluation(result, num_examples)
    assert result.counts.microbatches == -(-num_examples // m)


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
@pytest.mark.parametrize("num_examples", [1, 3, 11])
def test_evaluation_is_the_exact_mean_for_any_number_of_replicas(
    pool: Pool, num_replicas: int, num_examples: int
) -> None:
    """Data that is smaller than the number of replicas included: some then have none."""
    sizes = [1, 2, 4, 20]
    replicas = pool.run(num_replicas, evaluate_on_replica, num_examples, sizes)
    assert replicas == [replicas[0]] * num_replicas
    for m, result in zip(sizes, replicas[0], strict=True):
        check_evaluation(result, num_examples)
        assert result.counts.microbatches == -(-num_examples // m)


def test_a_mean_of_means_is_not_the_exact_mean() -> None:
    """The control: the data tells the two apart."""
    means = [by_hand(7, 1.0)[1]["all"]]
    squares = [(1.0 + i - i * i) ** 2 for i in range(7)]
    of_means = sum(sum(squares[i : i + 2]) / len(squares[i : i + 2]) for i in range(0, 7, 2)) / 4
    assert of_means != pytest.approx(means[0], rel=0.05)


def evaluate_ready_batches(process_group: Any, num_batches: Sequence[int]) -> EvaluationResult:
    updater = plain_updater(process_group=process_group)
    return updater.evaluate(iter(ready_batches(updater.replica, num_batches[updater.replica])))


def test_evaluation_of_ready_batches_with_a_replica_that_has_none(pool: Pool) -> None:
    num_batches = (3, 0, 2)
    x, y = (
        torch.cat(column)
        for column in zip(*(b for r, n in enumerate(num_batches) for b in ready_batches(r, n)), strict=True)
    )
    replicas = pool.run(3, evaluate_ready_batches, num_batches)
    assert replicas == [replicas[0]] * 3
    assert replicas[0].loss == pytest.approx((x - y).square().mean().item(), rel=1e-12)
    assert (replicas[0].counts.examples, replicas[0].counts.microbatches) == (len(x), 5)


def test_evaluation_of_a_dataloader() -> None:
    x, y = torch.arange(7.0).double(), torch.ones(7).double()
    result = plain_updater().evaluate(DataLoader(TensorDataset(x, y), batch_size=3))
    assert result.loss == pytest.approx((x - y).square().mean().item(), rel=1e-12)
    assert result.counts.microbatches == 3


def test_where_nothing_is_counted_there_is_no_loss() -> None:
    data = evaluation_data(1)  # its only example does not count in the second term
    assert plain_updater(objective=TWO_TERMS[1]).evaluate(data).loss is None
    result = plain_updater(objective=TWO_TERMS).evaluate(data)
    assert (result.loss, result.terms) == (1.0, {"all": 1.0, "some": None})
    nothing = plain_updater().evaluate([])
    assert (nothing.loss, nothing.terms, nothing.denominators) == (None, {"mse": None}, {"mse": 0.0})
    assert nothing.counts.examples == 0


class Modes(nn.Module):
    """Submodules in modes of their own; notes the mode that each is in during forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()).double())
        self.frozen = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
        self.active = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
        self.frozen.eval()
        self.active[0].eval()
        self.frozen[1].train()
        self.seen: list[set[bool]] = []

    def modes(self) -> list[bool]:
        return [module.training for module in self.modules()]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(set(self.modes()))
        if len(x) > 3:
            raise ValueError("too many")
        return self.w * self.active(self.frozen(x))


@pytest.mark.parametrize("m", [2, 4])
def test_evaluation_restores_the_mode_of_every_module(m: int) -> None:
    """After an error in forward too, as there is one with four examples."""
    model = Modes()
    before = model.modes()
    assert before == [True, False, False, True, True, False, True]
    updater = plain_updater(model)
    data = [(torch.tensor(1.0).double(), torch.tensor(0.0).double())] * 4
    if m == 4:
        with pytest.raises(ValueError, match="too many"):
            updater.evaluate(data, examples_per_microbatch=m)
    else:
        assert updater.evaluate(data, examples_per_microbatch=m).loss == 1.0
    assert model.seen
    assert all(seen == {False} for seen in model.seen)
    assert model.modes() == before


class Merging(Weight):
    """Merges an update into its weight for evaluation and takes it out for training, in `train`, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        with torch.no_grad():
            if mode == self.merged:
                self.w += -self.delta if mode else self.delta
                self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.merged else super().forward(x) + self.delta * x


def test_evaluation_lets_modules_undo_what_they_did_for_it() -> None:
    model = nn.Sequential(Merging())
    updater = plain_updater(model)
    assert updater.evaluate([(torch.tensor(1.0).double(), torch.tensor(0.0).double())]).loss == 9.0
    assert (model[0].training, model[0].merged, model[0].w.item()) == (True, False, 1.0)
    updater.update([(torch.ones(1).double(), torch.zeros(1).double())])
    assert model[0].delta.item() == pytest.approx(2.0 - 0.1 * 2 * 3)


class Stubborn(Weight):
    """Ignores `train`, as frozen layers do, although its flag says training."""

    def train(self, mode: bool = True) -> Stubborn:
        self.training = False
        return self


def test_evaluation_restores_the_mode_of_a_module_that_ignores_train() -> None:
    model = nn.Sequential(Stubborn())
    assert model[0].training
    plain_updater(model).evaluate([(torch.tensor(1.0).double(), torch.tensor(0.0).double())])
    assert model[0].training


class Noisy(Weight):
    """Draws in evaluation mode as well."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand_like(x)


class Drawing(Told):
    """Draws when an example is read."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        torch.rand(())
        return super().__getitem__(index)


def test_evaluation_touches_neither_gradients_nor_the_generator() -> None:
    model = Noisy()
    updater = plain_updater(model)
    model.w.grad = gradient = torch.tensor(3.0, dtype=torch.float64)
    state = torch.get_rng_state()
    assert updater.evaluate(Drawing(), examples_per_microbatch=4).counts.examples == 6
    assert model.w.grad is gradient
    assert gradient.item() == 3.0
    assert torch.equal(torch.get_rng_state(), state)
    model(torch.ones(2))  # the control: this model does move the generator
    assert not torch.equal(torch.get_rng_state(), state)


def test_evaluation_of_a_dataloader_leaves_the_generator() -> None:
    """A DataLoader draws a seed whenever it is iterated, which would move the order of a shuffled training one."""
    x = torch.ones(4).double()
    state = torch.get_rng_state()
    plain_updater().evaluate(DataLoader(TensorDataset(x, x), batch_size=2))
    assert torch.equal(torch.get_rng_state(), state)


class Dropping(Weight):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.w * x, 0.5, self.training)


def test_evaluating_between_updates_does_not_change_them() -> None:
    def trained(evaluating: bool, seed: int = 0) -> float:
        model = Dropping()
        updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), mse, seed=seed)
        data = [(torch.tensor(1.0 + i).double(), torch.tensor(2.0).double()) for i in range(12)]
        for group in groups(data, examples_per_update=4, examples_per_microbatch=2, epochs=2):
            updater.update(group)
            if evaluating:
                updater.evaluate(data, examples_per_microbatch=3)
        return model.w.item()

    assert trained(evaluating=True) == trained(evaluating=False)
    assert trained(evaluating=True) != trained(evaluating=True, seed=1)


def evaluate_with_a_failing_replica(process_group: Any) -> str:
    updater = plain_updater(process_group=process_group)
    good, bad = torch.ones(2).double(), torch.ones(3).double()
    try:
        updater.evaluate(iter([(good, bad if updater.replica == 1 else good)]))
    except (InputError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def test_a_failed_evaluation_is_raised_on_every_replica(pool: Pool) -> None:
    first, second = pool.run(2, evaluate_with_a_failing_replica)
    assert first.startswith("PeerError: replica 1 failed in the evaluation")
    assert second.startswith("InputError: targets: got (3,), expected (2,)")


@pytest.mark.parametrize(
    ("sum_fn", "got"), [(lambda o, b: o, "(2,)"), (lambda o, b: o[:1], "(1,)"), (lambda o, b: 1.0, "'float'")]
)
def test_evaluation_refuses_a_sum_that_is_no_scalar(sum_fn: Callable[..., Any], got: str) -> None:
    updater = plain_updater(objective=Term("mine", sum_fn, lambda batch: 2))
    with pytest.raises(InputError) as caught:
        updater.evaluate([(torch.tensor(1.0).double(), torch.tensor(0.0).double())] * 2, examples_per_microbatch=2)
    assert str(caught.value).startswith(f"sum of mine: got {got}, expected a scalar tensor")


@pytest.mark.parametrize("m", [0, -1])
def test_evaluation_in_microbatches_of_no_size_is_refused(m: int) -> None:
    with pytest.raises(InputError, match=f"examples_per_microbatch: got {m}, expected 1 or more"):
        plain_updater().evaluate([1], examples_per_microbatch=m)
