"""The built-in decoder: its wiring against a second implementation, causality, positions, initial weights."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isostep.errors import InputError
from isostep.models.decoder import Decoder, DecoderConfig, rotary_tables, rotate

CONFIG = DecoderConfig(vocab_size=11, context_length=16, width=24, depth=2, heads=3)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(CONFIG, seed=3).double()


@pytest.fixture(scope="module")
def input_ids() -> Tensor:
    return torch.randint(0, CONFIG.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))


def rms_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turn(x: Tensor) -> Tensor:
    """RoPE of one head, [length, head_width], as multiplication of complex numbers."""
    half = x.shape[1] // 2
    angles = [[t / 10000 ** (i / half) for i in range(half)] for t in range(x.shape[0])]
    angle = torch.tensor(angles, dtype=torch.float64)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=1)


def reference_logits(weights: dict[str, Tensor], ids: Tensor, config: DecoderConfig) -> Tensor:
    """Logits [length, vocab_size] of one example, one head at a time; gains are taken to be 1."""
    x = weights["embedding.weight"][ids]
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for index in range(config.depth):

        def linear(name: str, value: Tensor, index: int = index) -> Tensor:
            return value @ weights[f"blocks.{index}.{name}.weight"].T

        normed = rms_norm(x)
        q, k, v = (linear(f"attention.{name}", normed) for name in ("query", "key", "value"))
        heads = []
        for head in range(config.heads):
            part = slice(head * config.head_width, (head + 1) * config.head_width)
            scores = turn(q[:, part]) @ turn(k[:, part]).T / math.sqrt(config.head_width)
            heads.append(scores.masked_fill(mask, -math.inf).softmax(-1) @ v[:, part])
        x = x + linear("attention.output", torch.cat(heads, dim=1))
        gate = linear("feed_forward.gate", rms_norm(x))
        x = x + linear("feed_forward.down", gate * gate.sigmoid() * linear("feed_forward.up", rms_norm(x)))
    return rms_norm(x) @ weights["head.projection.weight"].T


def test_forward_equals_a_second_implementation(decoder: Decoder, input_ids: Tensor) -> None:
    logits = decoder(input_ids)
    weights = dict(decoder.state_dict())
    for example, ids in enumerate(input_ids):
        expected = reference_logits(weights, ids, CONFIG)
        scale = expected.abs().max()
        assert (logits[example] - expected).abs().max() <= 1e-13 * scale
        weights_off = {**weights, "blocks.1.attention.key.weight": weights["blocks.0.attention.key.weight"]}
        assert (logits[example] - reference_logits(weights_off, ids, CONFIG)).abs().max() > 1e-7 * scale


def test_a_later_token_changes_later_logits_only(decoder: Decoder, input_ids: Tensor) -> None:
    changed_ids = input_ids.clone()
    changed_ids[:, 5] = (changed_ids[:, 5] + 1) % CONFIG.vocab_size
    difference = (decoder(changed_ids) - decoder(input_ids)).abs().amax(dim=(0, 2))
    assert difference[:5].max() <= 1e-14
    assert difference[5:].min() > 1e-6


def test_right_padding_needs_no_mask(decoder: Decoder, input_ids: Tensor) -> None:
    padding = torch.zeros(2, 7, dtype=torch.int64)
    logits = decoder(input_ids)
    padded_right = decoder(torch.cat((input_ids, padding), dim=1))[:, :9]
    padded_left = decoder(torch.cat((padding, input_ids), dim=1))[:, 7:]
    assert (padded_right - logits).abs().max() <= 1e-14
    assert (padded_left - logits).abs().max() > 1e-6


def test_rotary_scores_depend_on_the_distance_only_to_float64_precision() -> None:
    head_width, length = 16, 4096
    query, key = torch.randn(2, head_width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def scores(dtype: torch.dtype) -> Tensor:
        """Score of query at t + 5 with key at t, for every t."""
        cos, sin = rotary_tables(length, head_width, torch.empty(0, dtype=dtype))
        turned_query = rotate(query.expand(length, head_width), cos.double(), sin.double())
        turned_key = rotate(key.expand(length, head_width), cos.double(), sin.double())
        return (turned_query[5:] * turned_key[:-5]).sum(-1)

    spread = {dtype: scores(dtype).max() - scores(dtype).min() for dtype in (torch.float64, torch.float32)}
    assert spread[torch.float64] < 1e-11
    assert spread[torch.float32] > 1e3 * spread[torch.float64]


def test_rotary_tables_are_as_wide_as_the_model_and_at_least_float32() -> None:
    dtypes = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
    for model_dtype, table_dtype in dtypes.items():
        cos, sin = rotary_tables(3, 4, torch.empty(0, dtype=model_dtype))
        assert cos.dtype == sin.dtype == table_dtype
        assert cos.shape == sin.shape == (3, 2)
        angle = torch.tensor(2 / 10000**0.5, dtype=torch.float64)
        assert cos[2, 1] == angle.cos().to(table_dtype)


def test_conversion_to_float32_and_back_keeps_float64_positions(input_ids: Tensor) -> None:
    once = Decoder(CONFIG, seed=3).double()
    twice = Decoder(CONFIG, seed=3).double().float().double()
    assert torch.equal(once(input_ids), twice(input_ids))


def test_bfloat16_forward_is_finite(input_ids: Tensor) -> None:
    logits = Decoder(CONFIG).bfloat16()(input_ids)
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()


def test_initial_weights_follow_the_seed_and_leave_the_global_state_alone() -> None:
    state = torch.get_rng_state()
    first = Decoder(CONFIG, seed=7).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    second = Decoder(CONFIG, seed=7).state_dict()
    other = Decoder(CONFIG, seed=8).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "norm" not in name)
    nn.Linear(2, 2)
    assert not torch.equal(torch.get_rng_state(), state)  # the control: torch's own layers do draw from it


def test_initial_deviations() -> None:
    config = DecoderConfig(vocab_size=64, context_length=4, width=96, depth=8, heads=4)
    for name, weight in Decoder(config).named_parameters():
        if "norm" in name:
            assert torch.equal(weight, torch.ones(config.width))
            continue
        scale = 1 / 4 if name.endswith(("output.weight", "down.weight")) else 1
        assert weight.std().item() == pytest.approx(0.02 * scale, rel=0.05), name


def test_tied_embeddings_are_one_parameter() -> None:
    tied_config = DecoderConfig(11, 16, 24, 2, 3, tie_embeddings=True)
    tied, untied = Decoder(tied_config), Decoder(CONFIG)
    assert tied.head.projection.weight is tied.embedding.weight
    assert untied.head.projection.weight is not untied.embedding.weight
    assert untied.num_parameters() - tied.num_parameters() == 11 * 24
    assert tied.double().head.projection.weight is tied.embedding.weight


def test_num_parameters_and_hidden_width() -> None:
    block = 4 * 24 * 24 + 3 * 24 * 64 + 2 * 24
    assert CONFIG.hidden_width == 64
    assert Decoder(CONFIG).num_parameters() == 2 * 11 * 24 + 2 * block + 24
    widths = [DecoderConfig(11, 16, width, 1, 1).hidden_width for width in (2, 64, 96, 98, 768)]
    assert widths == [8, 176, 256, 264, 2048]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"vocab_size": 0}, "vocab_size: got 0"),
        ({"context_length": -1}, "context_length: got -1"),
        ({"width": 24.0}, r"width: got 24\.0"),
        ({"depth": True}, "depth: got True"),
        ({"heads": 5}, "heads: got 5, expected a divisor of width 24"),
        ({"heads": 8}, "width / heads: got 3, expected an even number"),
        ({"tie_embeddings": 1}, "tie_embeddings: got 1"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(changed: dict[str, Any], named: str) -> None:
    shape: dict[str, Any] = {"vocab_size": 11, "context_length": 16, "width": 24, "depth": 2, "heads": 3}
    with pytest.raises(InputError, match=named):
        DecoderConfig(**{**shape, **changed})


def test_bad_input_is_refused(decoder: Decoder) -> None:
    assert decoder(torch.zeros(1, 16, dtype=torch.int64)).shape == (1, 16, 11)
    with pytest.raises(InputError, match="length of input_ids: got 17, expected at most context_length 16"):
        decoder(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(InputError, match=r"input_ids: got \(4,\)"):
        decoder(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(InputError, match="seed: got -1"):
        Decoder(CONFIG, seed=-1)
