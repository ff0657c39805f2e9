"""The objective: what a term sums is what it counts, in any shape of batch and output, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isostep import Term, Updater, causal_lm, mse, token_cross_entropy
from isostep.errors import InputError
from isostep.objective import IGNORE, Objective, call_model, labels_of, logits_of, token_counts

VOCAB_SIZE = 7

aligned = token_cross_entropy(shift=False)


class Pair(NamedTuple):
    inputs: Tensor
    labels: Tensor


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_batch(seed: int = 0, num_examples: int = 4, length: int = 6) -> dict[str, Tensor]:
    """Labels are a copy of the ids, -100 in about half of the places and everywhere in the last example."""
    ids = torch.randint(VOCAB_SIZE, (num_examples, length), generator=generator(seed))
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator(seed + 1)) < 0.5, IGNORE)
    labels[-1] = IGNORE
    labels[0, 1] = ids[0, 1]
    return {"input_ids": ids, "labels": labels}


def random_logits(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=generator(9))


def by_hand(logits: Tensor, labels: Tensor, *, shift: bool) -> tuple[float, int]:
    """Sum and count of -log p, position by position."""
    total, count = 0.0, 0
    for scores, wanted in zip(logits.double(), labels.tolist(), strict=True):
        if shift:
            scores, wanted = scores[:-1], wanted[1:]
        for score, label in zip(scores, wanted, strict=True):
            if label != IGNORE:
                total += math.log(sum(math.exp(s) for s in score.tolist())) - score[label].item()
                count += 1
    return total, count


# ------------------------------------------------------------------------------------------- token losses


@pytest.mark.parametrize(("term", "shift"), [(causal_lm, True), (aligned, False)])
def test_token_losses_equal_a_sum_by_hand(term: Term, shift: bool) -> None:
    batch = random_batch()
    logits = random_logits(4, 6, VOCAB_SIZE)
    total, count = by_hand(logits, batch["labels"], shift=shift)
    assert term.sum_fn(logits, batch).item() == pytest.approx(total, rel=1e-12)
    assert int(term.count_fn(batch)) == count
    other, other_count = by_hand(logits, batch["labels"], shift=not shift)
    assert (total, count) != (other, other_count)


def test_the_first_label_of_a_causal_loss_is_never_counted() -> None:
    batch = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[1, IGNORE, 3]])}
    assert int(causal_lm.count_fn(batch)) == 1
    assert int(aligned.count_fn(batch)) == 2
    changed = {**batch, "labels": torch.tensor([[6, IGNORE, 3]])}
    logits = random_logits(1, 3, VOCAB_SIZE)
    assert torch.equal(causal_lm.sum_fn(logits, batch), causal_lm.sum_fn(logits, changed))
    assert not torch.equal(aligned.sum_fn(logits, batch), aligned.sum_fn(logits, changed))


def test_the_last_logits_of_a_causal_loss_have_no_gradient() -> None:
    batch = {"labels": torch.tensor([[1, 2, 3]])}
    logits = random_logits(1, 3, VOCAB_SIZE).requires_grad_()
    causal_lm.sum_fn(logits, batch).backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum(-1).ne(0).tolist() == [[True, True, False]]


def test_a_causal_loss_does_not_run_over_the_edge_of_an_example() -> None:
    """The first label of the second example is not the target of the first example's last position."""
    labels = torch.tensor([[IGNORE, 2], [5, IGNORE]])
    logits = random_logits(2, 2, VOCAB_SIZE)
    total, _ = by_hand(logits[:1], labels[:1], shift=True)
    assert int(causal_lm.count_fn({"labels": labels})) == 1
    assert causal_lm.sum_fn(logits, {"labels": labels}).item() == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("length", [1, 2])
def test_an_example_of_one_token_has_no_causal_target(length: int) -> None:
    batch = {"labels": torch.zeros(3, length, dtype=torch.int64)}
    assert int(causal_lm.count_fn(batch)) == 3 * (length - 1)
    assert (causal_lm.sum_fn(random_logits(3, length, VOCAB_SIZE), batch).item() > 0) == (length > 1)


def test_ignored_labels_add_nothing() -> None:
    labels = torch.full((2, 3), IGNORE)
    assert int(aligned.count_fn((None, labels))) == 0
    assert aligned.sum_fn(random_logits(2, 3, VOCAB_SIZE), (None, labels)).item() == 0.0


def test_one_label_per_example_is_a_classifier() -> None:
    logits, labels = random_logits(5, VOCAB_SIZE), torch.tensor([0, 6, IGNORE, 3, 3])
    assert int(aligned.count_fn((None, labels))) == 4
    wanted = F.cross_entropy(logits, labels, reduction="sum")
    assert aligned.sum_fn(logits, (None, labels)).item() == pytest.approx(wanted.item(), rel=1e-12)


def test_mse_sums_every_element() -> None:
    outputs, targets = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 2.0], [0.0, 1.0]])
    assert mse.sum_fn(outputs, (None, targets)).item() == 1 + 0 + 9 + 9
    assert mse.count_fn((None, targets)) == 4
    assert mse.sum_fn(outputs, (None, targets.long())).item() == 19


# ------------------------------------------------------------------------------------------- class weights


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator(3)))

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features)


def gradients_of_update(
    model: nn.Module, objective: Term | Sequence[Term], batches: Sequence[Any]
) -> tuple[list[Tensor], Any]:
    """Gradients that an update over these microbatches hands to the optimizer, and its result."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients: list[Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
    )
    result = Updater(model, optimizer, objective).update(list(batches))
    return gradients, result


def furthest(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Max over tensors of |found - wanted| / |wanted|, in the maximum norm."""
    return max(((f - w).abs().max() / w.abs().max()).item() for f, w in zip(found, wanted, strict=True))


CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.25])
FEATURES = torch.randn(9, 3, dtype=torch.float64, generator=generator(4))
CLASSES = torch.tensor([0, 1, 2, 3, 1, IGNORE, 2, 0, 1])


@pytest.mark.parametrize("m", [1, 2, 4, 9])
def test_class_weights_equal_torch_over_the_whole_group(m: int) -> None:
    """Weighted mean over all examples at once, although the update sees them in microbatches."""
    term = token_cross_entropy(shift=False, class_weights=CLASS_WEIGHTS)
    batches = [(FEATURES[i : i + m], CLASSES[i : i + m]) for i in range(0, 9, m)]
    gradients, result = gradients_of_update(Classifier(), term, batches)

    model = Classifier()
    loss = nn.CrossEntropyLoss(CLASS_WEIGHTS.double(), reduction="mean")(model(FEATURES), CLASSES)
    loss.backward()
    wanted = [p.grad for p in model.parameters() if p.grad is not None]
    assert furthest(gradients, wanted) <= 1e-12
    assert result.loss == pytest.approx(loss.item(), rel=1e-12)
    assert result.denominators == {"cross_entropy": 0.5 * 2 + 2.0 * 3 + 1.25}

    unweighted, _ = gradients_of_update(Classifier(), aligned, batches)
    assert furthest(unweighted, wanted) > 1e-3


def test_targets_of_weight_zero_are_not_supervised() -> None:
    term = token_cross_entropy(shift=False, class_weights=CLASS_WEIGHTS)
    _, result = gradients_of_update(Classifier(), term, [(FEATURES, CLASSES)])
    assert result.counts.supervised_tokens == 6  # nine, without one ignored and two of weight 0
    assert (result.counts.examples, result.counts.microbatches) == (9, 1)


def test_a_group_of_weightless_targets_is_empty() -> None:
    term = token_cross_entropy(shift=False, class_weights=CLASS_WEIGHTS)
    weightless = torch.tensor([2, IGNORE, 2])
    gradients, result = gradients_of_update(Classifier(), term, [(FEATURES[:3], weightless)])
    assert (result.status, result.loss, gradients) == ("empty", None, [])


def test_class_weights_of_shifted_labels_leave_out_the_first() -> None:
    term = token_cross_entropy(shift=True, class_weights=torch.tensor([8.0, 1.0, 2.0, 4.0]))
    assert float(term.count_fn({"labels": torch.tensor([[0, 1, 3], [0, IGNORE, 2]])})) == 1 + 4 + 2


@pytest.mark.parametrize(
    ("weights", "text"), [([-1.0, 1.0], "-1.0"), ([1.0, math.nan], "nan"), ([math.inf, 1.0], "inf")]
)
def test_bad_class_weights_are_refused(weights: list[float], text: str) -> None:
    with pytest.raises(InputError, match=f"class_weights: got .*{text}.*, expected finite weights of 0 or more"):
        token_cross_entropy(shift=False, class_weights=torch.tensor(weights))


# ------------------------------------------------------------------------------------------- several terms


class Weight(nn.Module):
    """One weight w; the output is w * x."""

    def __init__(self, w: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def squares(name: str, entry: str, coefficient: float = 1.0) -> Term:
    """Mean of (w x)^2 over the examples that the batch's mask `entry` names."""
    return Term(
        name,
        lambda outputs, batch: (outputs.square() * batch[entry]).sum(),
        lambda batch: batch[entry].sum(),
        coefficient,
    )


MASKED = [
    {"x": torch.tensor([1.0, 2.0]).double(), "a": torch.tensor([1, 1]), "b": torch.tensor([0, 1])},
    {"x": torch.tensor([3.0]).double(), "a": torch.tensor([0]), "b": torch.tensor([0])},
    {"x": torch.tensor([4.0, 5.0]).double(), "a": torch.tensor([0, 1]), "b": torch.tensor([0, 0])},
]


def test_every_term_has_its_own_denominator_and_coefficient() -> None:
    """a: (1 + 4 + 25) / 3 = 10; b: 4 / 1; the gradient at w = 1 is twice the loss."""
    gradients, result = gradients_of_update(Weight(), [squares("a", "a", 2.0), squares("b", "b", 0.5)], MASKED)
    assert result.denominators == {"a": 3.0, "b": 1.0}
    assert result.terms == {"a": 10.0, "b": 4.0}
    assert result.loss == 2.0 * 10 + 0.5 * 4
    assert gradients[0].item() == pytest.approx(2 * 22.0, rel=1e-15)


def test_a_term_without_any_target_adds_nothing() -> None:
    batches = [{**batch, "b": torch.zeros_like(batch["b"])} for batch in MASKED]
    gradients, result = gradients_of_update(Weight(), [squares("a", "a"), squares("b", "b")], batches)
    assert result.terms == {"a": 10.0, "b": None}
    assert (result.status, result.loss, gradients[0].item()) == ("applied", 10.0, pytest.approx(20.0, rel=1e-15))


def test_a_factor_multiplies_the_coefficient_of_a_copy() -> None:
    half = 0.5 * mse
    assert (half.coefficient, (4 * half).coefficient, mse.coefficient) == (0.5, 2.0, 1.0)
    assert (half.name, half.sum_fn, half.count_fn) == (mse.name, mse.sum_fn, mse.count_fn)
    batch = (torch.tensor([1.0, 3.0]).double(), torch.tensor([0.0, 0.0]).double())
    gradients, result = gradients_of_update(Weight(), half, [batch])
    assert (result.loss, result.terms) == (2.5, {"mse": 5.0})
    assert gradients[0].item() == 5.0


def test_an_objective_is_made_of_one_term_several_or_itself() -> None:
    several = Objective.of([causal_lm, mse])
    assert several.names == ("causal_lm", "mse")
    assert Objective.of(several) is several
    assert Objective.of(mse).names == ("mse",)
    assert Objective.of(term for term in (mse, causal_lm)).names == ("mse", "causal_lm")


# ------------------------------------------------------------------------------------------- outputs and batches

LOGITS = random_logits(2, 3, VOCAB_SIZE)


@pytest.mark.parametrize(
    "outputs",
    [
        LOGITS,
        SimpleNamespace(logits=LOGITS, loss=torch.tensor(7.0)),
        {"loss": torch.tensor(7.0), "logits": LOGITS},
        (LOGITS, torch.tensor(7.0)),
        [LOGITS],
        Pair(LOGITS, torch.tensor(7.0)),
    ],
    ids=["tensor", "object", "mapping", "tuple", "list", "namedtuple"],
)
def test_logits_are_found_in_any_output(outputs: Any) -> None:
    assert logits_of(outputs) is LOGITS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_low_precision_logits_become_float32(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert logits_of(LOGITS.to(dtype)).dtype == wide


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("term", [aligned, mse])
def test_low_precision_outputs_are_summed_in_float32(dtype: torch.dtype, term: Term) -> None:
    """4096 losses: their sum overflows float16, or loses its last digits in it."""
    outputs = random_logits(4096, 8).to(dtype) * 8
    labels = torch.zeros(4096, dtype=torch.int64) if term is aligned else torch.zeros(4096, 8, dtype=dtype)
    found = term.sum_fn(outputs, (None, labels))
    wanted = term.sum_fn(outputs.double(), (None, labels)).item()
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(wanted, rel=1e-6)
    in_low_precision = term.sum_fn(outputs.double(), (None, labels)).to(dtype).item()
    assert abs(in_low_precision - wanted) > 1e-5 * wanted


def test_a_low_precision_sum_of_a_users_term_becomes_float32() -> None:
    term = Term("half", lambda outputs, batch: outputs.half().sum(), lambda batch: 1)
    assert term.sum_of(torch.ones(3), None).dtype == torch.float32
    assert (
        Term("wide", lambda outputs, batch: outputs.sum(), lambda batch: 1).sum_of(LOGITS, None).dtype == LOGITS.dtype
    )


X, Y = torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0, 3.0]).double()


@pytest.mark.parametrize("batch", [{"x": X, "labels": Y}, (X, Y), [X, Y], Pair(X, Y), (X, Y, "more")])
def test_an_update_takes_batches_of_any_kind(batch: Any) -> None:
    gradients, result = gradients_of_update(Weight(), mse, [batch])
    assert (result.loss, result.counts.examples) == (2.5, 2)
    assert gradients[0].item() == -4.0


def test_an_update_takes_a_bare_tensor() -> None:
    term = Term("square", lambda outputs, batch: outputs.square().sum(), lambda batch: len(batch))
    gradients, result = gradients_of_update(Weight(), term, [X])
    assert (result.loss, result.counts.examples, gradients[0].item()) == (2.5, 2, 5.0)


class Named(nn.Module):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


class AnyKeyword(nn.Module):
    def forward(self, input_ids: Any, **more: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, **more}


BATCH = {"id": 0, "input_ids": 1, "attention_mask": 2, "labels": 3, "text": 4}


def test_the_model_gets_what_its_forward_names() -> None:
    assert call_model(Named(), BATCH) == {"input_ids": 1, "attention_mask": 2, "labels": None}


def test_a_model_that_takes_any_keyword_gets_everything_but_labels_and_id() -> None:
    assert call_model(AnyKeyword(), BATCH) == {"input_ids": 1, "attention_mask": 2, "text": 4}


def test_a_compiled_model_gets_what_the_model_inside_names() -> None:
    wrapper = AnyKeyword()
    wrapper._orig_mod = Named()
    assert call_model(wrapper, BATCH) == {"input_ids": 1, "attention_mask": 2}


@pytest.mark.parametrize("batch", [(5, 6), [5, 6], Pair(5, 6), 5])
def test_a_model_gets_the_first_element_of_a_sequence_or_the_batch_itself(batch: Any) -> None:
    assert call_model(Named(), batch)["input_ids"] == 5


def test_tokens_and_padding_are_counted() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    ids = torch.zeros(2, 3, dtype=torch.int64)
    assert tuple(map(int, token_counts({"input_ids": ids, "attention_mask": mask}))) == (6, 3)
    assert token_counts({"input_ids": ids}) == (6, 0)
    assert token_counts((ids, None)) == (6, 0)
    assert token_counts((ids.double(), None)) == token_counts((ids[0], None)) == token_counts({"x": ids}) == (0, 0)


# ------------------------------------------------------------------------------------------- what is refused


def scalar_term(sum_fn: Callable[..., Any] = lambda o, b: o.sum(), count_fn: Callable[..., Any] = lambda b: 1) -> Term:
    return Term("mine", sum_fn, count_fn)


def update_with(objective: Any, batch: Any = (X, Y)) -> Callable[[], Any]:
    return lambda: gradients_of_update(Weight(), objective, [batch])


REFUSED = [
    pytest.param(lambda: Objective.of([]), "objective: got []", id="no term"),
    pytest.param(lambda: Objective.of([mse, mse]), "objective: got ['mse', 'mse']", id="one name twice"),
    pytest.param(lambda: Objective.of("mse"), "objective: got 'm'", id="text"),
    pytest.param(
        lambda: Objective.of(token_cross_entropy),
        "objective: got <function token_cross_entropy",
        id="helper that was not called",
    ),
    pytest.param(lambda: Objective.of(nn.MSELoss()), "objective: got MSELoss()", id="torch loss"),
    pytest.param(lambda: Term("mine", mse.sum_fn, len, math.nan), "coefficient of mine: got nan", id="NaN"),
    pytest.param(lambda: Term("mine", mse.sum_fn, len, -math.inf), "coefficient of mine: got -inf", id="infinite"),
    pytest.param(lambda: math.nan * mse, "coefficient of mse: got nan", id="NaN factor"),
    pytest.param(
        lambda: causal_lm.sum_fn(LOGITS, {"labels": torch.zeros(2, 4, dtype=torch.int64)}),
        "labels: got (2, 4), expected (2, 3)",
        id="labels longer than logits",
    ),
    pytest.param(
        lambda: aligned.sum_fn(LOGITS.transpose(1, 2), (None, torch.zeros(2, 3, dtype=torch.int64))),
        f"labels: got (2, 3), expected (2, {VOCAB_SIZE})",
        id="classes not last",
    ),
    pytest.param(
        lambda: mse.sum_fn(torch.zeros(4, 1), (None, torch.zeros(4))),
        "targets: got (4,), expected (4, 1)",
        id="broadcast",
    ),
    pytest.param(lambda: labels_of({"x": X}), "batch: got {'x': 'Tensor'}, expected a tensor 'labels'", id="no labels"),
    pytest.param(
        lambda: labels_of({"labels": [1, 2]}),
        "batch: got {'labels': 'list'}, expected a tensor 'labels'",
        id="labels of the wrong type",
    ),
    pytest.param(lambda: labels_of((X,)), "batch: got ['Tensor'], expected a tensor 'labels'", id="a tuple of one"),
    pytest.param(lambda: labels_of(X), "batch: got 'Tensor', expected a tensor 'labels'", id="a bare tensor"),
    pytest.param(lambda: logits_of({"scores": X}), "model output: got 'dict', expected a tensor", id="no logits"),
    pytest.param(
        lambda: logits_of(SimpleNamespace(scores=X)), "model output: got 'SimpleNamespace', expected", id="an object"
    ),
    pytest.param(lambda: logits_of(("text", X)), "model output: got 'tuple', expected a tensor", id="tensor not first"),
    pytest.param(
        update_with(scalar_term(lambda o, b: o)), "sum of mine: got (2,), expected a scalar tensor", id="sum of vectors"
    ),
    pytest.param(
        update_with(scalar_term(lambda o, b: o.sum().item())), "sum of mine: got 'float'", id="sum without a graph"
    ),
    pytest.param(
        update_with(scalar_term(count_fn=lambda b: -3)), "count of mine: got -3.0, expected a finite", id="negative"
    ),
    pytest.param(update_with(scalar_term(count_fn=lambda b: math.nan)), "count of mine: got nan", id="count NaN"),
    pytest.param(
        update_with(scalar_term(count_fn=lambda b: b[1])), "count of mine: got (2,), expected one number", id="counts"
    ),
    pytest.param(
        update_with(scalar_term(count_fn=lambda b: None)), "count of mine: got 'NoneType', expected", id="no count"
    ),
    pytest.param(update_with(mse, {"x": X}), "batch: got {'x': 'Tensor'}, expected", id="update without labels"),
]


@pytest.mark.parametrize(("attempt", "message"), REFUSED)
def test_what_is_refused_says_got_expected_and_what_to_do(attempt: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        attempt()
    text = str(caught.value)
    assert text.startswith(message)
    assert ", expected " in text
    remedy = text.split(", expected ", 1)[1].split("; ", 1)
    assert len(remedy) == 2
    assert len(remedy[1]) > 5


def test_a_refused_update_changes_nothing() -> None:
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = Updater(model, optimizer, scalar_term(count_fn=lambda batch: -1))
    with pytest.raises(InputError):
        updater.update([(X, Y)])
    assert model.w.item() == 1.0
    assert model.w.grad is None
    assert updater.totals.attempted == 0
    good = Updater(model, optimizer, scalar_term())  # the control: with a good count it moves
    good.update([(X, Y)])
    assert model.w.item() != 1.0
