"""The optimizers of a run: which parameter is in which group, one update by hand, and that each one learns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isostep import Updater, causal_lm, groups
from isostep.config import Optimizer
from isostep.errors import InputError
from isostep.models.decoder import Decoder, DecoderConfig
from isostep.optimizers import block_matrices, build_optimizers, set_learning_rate

CONFIG = DecoderConfig(vocab_size=61, context_length=16, width=16, depth=2, heads=2)
NAMES = ("adamw", "sgd", "muon")
IN_BLOCKS = {
    f"blocks.{block}.{part}.weight"
    for block in range(2)
    for part in ("attention.query", "attention.key", "attention.value", "attention.output", "feed_forward.gate",
                 "feed_forward.up", "feed_forward.down")
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of tiny matrices wait for each other, for long where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def named(model: nn.Module, parameters: Any) -> set[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter] for parameter in parameters}


def fault(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, int]:
    """How many groups hold a parameter, for each that is not in exactly one; 0 where it is left out."""
    held = Counter(p for o in optimizers for group in o.param_groups for p in group["params"])
    return {name: held[p] for name, p in model.named_parameters() if held[p] != p.requires_grad}


def built(name: str, model: nn.Module, **values: Any) -> list[torch.optim.Optimizer]:
    return build_optimizers(model, Optimizer(name=name, **values))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_trainable_parameter_is_in_exactly_one_group(name: str, tied: bool) -> None:
    model = Decoder(DecoderConfig(61, 16, width=16, depth=2, heads=2, tie_embeddings=tied))
    model.blocks[0].attention.key.weight.requires_grad_(False)  # type: ignore[union-attr]
    assert fault(model, built(name, model)) == {}


@pytest.mark.parametrize("name", NAMES)
def test_control_a_parameter_left_out_or_held_twice_is_noticed(name: str) -> None:
    model = Decoder(CONFIG)
    optimizers = built(name, model)
    lost = optimizers[0].param_groups[0]["params"].pop(3)
    assert fault(model, optimizers) == {next(iter(named(model, [lost]))): 0}
    optimizers[-1].param_groups[-1]["params"] += [lost, lost]
    assert fault(model, optimizers) == {next(iter(named(model, [lost]))): 2}


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_is_for_matrices(name: str) -> None:
    model = Decoder(CONFIG)
    decay = {
        p: group["weight_decay"]
        for optimizer in built(name, model, weight_decay=0.25)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert {n for n, p in model.named_parameters() if decay[p] == 0.25} == IN_BLOCKS | {
        "embedding.weight", "head.projection.weight",
    }  # fmt: skip
    assert {n for n, p in model.named_parameters() if decay[p] == 0.0} == {
        "head.norm.weight",
        *(f"blocks.{block}.{part}_norm.weight" for block in range(2) for part in ("attention", "feed_forward")),
    }


def test_muon_has_the_matrices_inside_blocks_and_adamw_the_rest() -> None:
    model = Decoder(CONFIG)
    muon, adamw = built("muon", model)
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    (group,) = muon.param_groups
    assert named(model, group["params"]) == IN_BLOCKS
    assert group["adjust_lr_fn"] == "match_rms_adamw"
    assert named(model, adamw.param_groups[0]["params"]) == {"embedding.weight", "head.projection.weight"}


class Foreign(nn.Module):
    """Another model, with other names; everything that the rule speaks of is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 4)
        self.h = nn.ModuleList(
            nn.ModuleDict(
                {"mix": nn.Linear(4, 4), "table": nn.Embedding(3, 4), "tied": nn.Linear(4, 7, bias=False),
                 "kernel": nn.Conv1d(4, 4, 2)}
            )
            for _ in range(2)
        )  # fmt: skip
        self.h[1]["tied"].weight = self.wte.weight  # type: ignore[index]
        self.h[1]["mix"].weight.requires_grad_(False)  # type: ignore[index]
        self.out = nn.Linear(4, 7)


def test_block_matrices_of_a_model_with_other_names() -> None:
    model = Foreign()
    assert named(model, block_matrices(model)) == {"h.0.mix.weight", "h.0.tied.weight"}
    assert named(model, block_matrices(nn.Sequential(model))) == {"h.0.mix.weight", "h.0.tied.weight"}
    assert fault(model, built("muon", model)) == {}


def test_muon_alone_where_nothing_is_left_for_adamw() -> None:
    model = nn.ModuleList([nn.Linear(3, 3, bias=False)])
    assert [type(optimizer).__name__ for optimizer in built("muon", model)] == ["Muon"]


def test_models_that_leave_nothing_to_do_are_refused() -> None:
    flat = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    with pytest.raises(InputError, match=r"optimizer.name: got 'muon', expected a model with matrices in the blocks"):
        built("muon", flat)
    with pytest.raises(InputError, match="model: got 'no trainable parameter', expected one or more"):
        built("adamw", flat.requires_grad_(False))


@pytest.mark.parametrize("name", NAMES)
def test_set_learning_rate_reaches_every_group(name: str) -> None:
    optimizers = built(name, Decoder(CONFIG), learning_rate=0.5)
    all_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    assert {group["lr"] for group in all_groups} == {0.5}
    set_learning_rate(optimizers, 0.125)
    assert {group["lr"] for group in all_groups} == {0.125}


@pytest.mark.parametrize(
    ("name", "values", "found"),
    [
        ("adamw", {"betas": (0.5, 0.75)}, [{"betas": (0.5, 0.75), "eps": 1e-8, "fused": True}] * 2),
        ("sgd", {"momentum": 0.5}, [{"momentum": 0.5, "nesterov": False, "dampening": 0}] * 2),
        ("muon", {"momentum": 0.5, "betas": (0.5, 0.75)},
         [{"momentum": 0.5, "nesterov": True}, *[{"betas": (0.5, 0.75), "eps": 1e-8, "fused": True}] * 2]),
    ],
)  # fmt: skip
def test_settings_reach_the_optimizers(name: str, values: dict[str, Any], found: list[dict[str, Any]]) -> None:
    all_groups = [group for optimizer in built(name, Decoder(CONFIG), **values) for group in optimizer.param_groups]
    held = [{k: group[k] for k in wanted} for group, wanted in zip(all_groups, found, strict=True)]
    assert held == found


def test_fused_only_where_the_device_has_it() -> None:
    (adamw,) = built("adamw", nn.Linear(2, 2, device="meta"))
    assert adamw.param_groups[0]["fused"] is None


# ------------------------------------------------------------------------------------------------- updates


def updated(name: str, **values: Any) -> tuple[nn.Linear, list[Tensor]]:
    """A weight of 1 and a bias of 1 after two updates with gradient 0.5, and what each was after the first."""
    model = nn.ModuleList([nn.Linear(1, 1)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizers = built(name, model, learning_rate=0.1, weight_decay=0.5, **values)
    first: list[Tensor] = []
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        for optimizer in optimizers:
            optimizer.step()
        first = first or [parameter.detach().clone() for parameter in model.parameters()]
    linear = model[0]
    assert isinstance(linear, nn.Linear)
    return linear, first


def test_weight_decay_of_adamw_is_decoupled() -> None:
    """The gradient is constant, so Adam moves by the learning rate; decay multiplies by 1 - 0.1 * 0.5."""
    linear, first = updated("adamw")
    assert [p.item() for p in first] == pytest.approx([0.95 - 0.1, 0.9], rel=1e-6)
    assert linear.weight.item() == pytest.approx(0.85 * 0.95 - 0.1, rel=1e-6)
    assert linear.bias.item() == pytest.approx(0.8, rel=1e-6)


def test_weight_decay_of_sgd_is_part_of_the_gradient() -> None:
    """Gradient 0.5 + 0.5 * w for the weight; the second update's buffer is 0.5 * the first one plus the gradient."""
    linear, first = updated("sgd", momentum=0.5)
    assert [p.item() for p in first] == pytest.approx([0.9, 0.95], rel=1e-6)
    assert linear.weight.item() == pytest.approx(0.9 - 0.1 * (0.5 * 1.0 + 0.5 + 0.5 * 0.9), rel=1e-6)
    assert linear.bias.item() == pytest.approx(0.95 - 0.1 * (0.5 * 0.5 + 0.5), rel=1e-6)


def test_weight_decay_of_muon_is_decoupled_and_its_bias_is_adamws() -> None:
    """Orthogonalised, a 1 x 1 gradient is near 1 (0.7 to 1.2 by Newton-Schulz), times 0.2 to match AdamW."""
    _, (weight, bias) = updated("muon")
    assert 0.95 - 0.1 * 0.2 * 1.3 < weight.item() < 0.95 - 0.1 * 0.2 * 0.6
    assert bias.item() == pytest.approx(0.9, rel=1e-6)


def trained(name: str, learning_rate: float) -> list[float | None]:
    """Loss of each of 24 updates on repeating sequences."""
    model = Decoder(CONFIG, seed=1)
    optimizers = built(name, model, learning_rate=1.0)
    set_learning_rate(optimizers, learning_rate)
    updater = Updater(model, optimizers, causal_lm, clip_norm=1.0)
    data = [
        {"id": i, "input_ids": (ids := (torch.arange(8 + i % 8) * (1 + i % 3) + i) % 13), "labels": ids}
        for i in range(16)
    ]
    return [
        updater.update(group).loss
        for group in groups(data, examples_per_update=8, examples_per_microbatch=4, epochs=12)
    ]


@pytest.mark.parametrize(("name", "learning_rate"), [("adamw", 0.01), ("sgd", 0.1), ("muon", 0.01)])
def test_each_optimizer_lowers_the_loss(name: str, learning_rate: float) -> None:
    losses = trained(name, learning_rate)
    first, last = losses[0], losses[-1]
    assert first is not None
    assert last is not None
    assert 4.0 < first < 4.3  # log(61) = 4.11
    assert last < first - 1.0
    hardly = trained(name, learning_rate * 1e-6)[-1]  # the control: without a learning rate nothing is learned
    assert hardly is not None
    assert hardly > first - 0.1
