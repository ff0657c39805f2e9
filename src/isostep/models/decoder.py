"""A small decoder-only language model: token embedding, pre-norm blocks, head. Read it from top to bottom.

Decoder(input_ids) = head(block_n(... block_1(embedding(input_ids))))
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import InputError

NORM_EPS = 1e-6
ROTARY_BASE = 10000.0
INIT_STD = 0.02


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a `Decoder`. Raises InputError where no decoder of that shape exists.

    vocab_size: number of token ids. context_length: the longest sequence that `forward` takes.
    width: features of the residual stream. depth: number of blocks. heads: attention heads of a block.
    tie_embeddings: the head's projection is the embedding matrix, one parameter.
    """

    vocab_size: int
    context_length: int
    width: int
    depth: int
    heads: int
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "tie_embeddings":
                if not isinstance(value, bool):
                    raise InputError.of(field.name, value, "True or False", "choose one of them")
            elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError.of(field.name, value, "a whole number of 1 or more", "choose such a number")
        if self.width % self.heads:
            raise InputError.of("heads", self.heads, f"a divisor of width {self.width}", "change heads or width")
        if self.head_width % 2:
            raise InputError.of(
                "width / heads",
                self.head_width,
                "an even number (features rotate in pairs)",
                "change heads or width",
            )

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.width // self.heads

    @property
    def hidden_width(self) -> int:
        """Features inside the feed-forward part: 8/3 of width, up to a multiple of 8.

        Its three matrices then hold about as much as the two of a plain feed-forward part of 4 x width.
        """
        return 8 * -(-self.width // 3)


class Decoder(nn.Module):
    """Decoder-only language model.

    Attributes: `embedding`, `blocks` (ModuleList) and `head`, in the order in which data flows.

    The weights are a function of `seed` and the default dtype only; torch's global random state is neither
    read nor changed. They are drawn as in GPT-2 (Radford et al. 2019): normal with deviation 0.02, and
    0.02 / sqrt(2 * depth) for the two projections of each block that add to the residual stream.

    activation_checkpointing: in training, keep only what enters each block and recompute the rest in backward (Chen et
    al. 2016, arXiv 1604.06174): less memory, about a third more time, the same numbers.

    Raises InputError for a seed that does not fit in 64 unsigned bits.
    """

    def __init__(self, config: DecoderConfig, *, seed: int = 0, activation_checkpointing: bool = False) -> None:
        super().__init__()
        if not 0 <= seed < 2**64:
            raise InputError.of("seed", seed, "a whole number from 0 to 2**64 - 1", "choose such a seed")
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(config.vocab_size, config.width, device="meta").to_empty(device="cpu")
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.head = Head(config)
        if config.tie_embeddings:
            self.head.projection.weight = self.embedding.weight
        self._initialize(torch.Generator().manual_seed(seed))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of the token after each position.

        input_ids: int64 [batch, length], each 0 <= id < vocab_size, length <= context_length.
        Returns [batch, length, vocab_size] in the dtype of the parameters.
        Position i sees positions 0..i only, so padding on the right needs no mask.
        Raises InputError for another rank or a longer sequence.
        """
        if input_ids.dim() != 2:
            raise InputError.of(
                "input_ids", tuple(input_ids.shape), "a shape [batch, length]", "add the missing dimension"
            )
        length = input_ids.shape[1]
        if length > self.config.context_length:
            raise InputError.of(
                "length of input_ids",
                length,
                f"at most context_length {self.config.context_length}",
                "shorten the examples or build the decoder with a larger context_length",
            )
        hidden = self.embedding(input_ids)
        cos, sin = rotary_tables(length, self.config.head_width, hidden)
        for block in self.blocks:
            if self.activation_checkpointing and self.training:
                hidden = checkpoint(block, hidden, cos, sin, use_reentrant=False)
            else:
                hidden = block(hidden, cos, sin)
        return self.head(hidden)

    def as_layers(self) -> list[nn.Module]:
        """The same model as a list of layers, each of which takes what the one before returns: for stages.

        They share this decoder's parameters; a tied head shares the embedding's.
        """
        blocks = [_BlockLayer(block, self.config, self.activation_checkpointing) for block in self.blocks]
        return [self.embedding, *blocks, self.head]

    def num_parameters(self) -> int:
        """Number of trained values; a tied matrix counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _initialize(self, generator: torch.Generator) -> None:
        """Fill every matrix from `generator`, in the order of `named_parameters`; gains are 1 already."""
        residual_std = INIT_STD / math.sqrt(2 * self.config.depth)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds_to_residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
                std = residual_std if adds_to_residual else INIT_STD
                nn.init.normal_(parameter, std=std, generator=generator)


class _BlockLayer(nn.Module):
    """A block that finds its rotary tables by itself."""

    def __init__(self, block: nn.Module, config: DecoderConfig, activation_checkpointing: bool) -> None:
        super().__init__()
        self.block = block
        self.head_width = config.head_width
        self.activation_checkpointing = activation_checkpointing

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [batch, length, width]. Returns the same shape."""
        cos, sin = rotary_tables(hidden.shape[1], self.head_width, hidden)
        if self.activation_checkpointing and self.training:
            return checkpoint(self.block, hidden, cos, sin, use_reentrant=False)
        return self.block(hidden, cos, sin)


class Block(nn.Module):
    """Attention, then feed-forward; each reads a normalised copy of the residual stream and adds to it.

    The norm is RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), in front of each part.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """hidden: [batch, length, width]; cos, sin: from `rotary_tables`. Returns the shape of hidden."""
        hidden = hidden + self.attention(self.attention_norm(hidden), cos, sin)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class Attention(nn.Module):
    """Causal attention with several heads (Vaswani et al. 2017, arXiv 1706.03762) and rotary positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.query = _linear(config.width, config.width)
        self.key = _linear(config.width, config.width)
        self.value = _linear(config.width, config.width)
        self.output = _linear(config.width, config.width)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """hidden: [batch, length, width]; cos, sin: from `rotary_tables`. Returns the shape of hidden."""
        query = rotate(self._split_heads(self.query(hidden)), cos, sin)
        key = rotate(self._split_heads(self.key(hidden)), cos, sin)
        value = self._split_heads(self.value(hidden))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(2))

    def _split_heads(self, features: Tensor) -> Tensor:
        """[batch, length, width] -> [batch, heads, length, head_width]."""
        return features.unflatten(2, (-1, self.head_width)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: a linear map gated by the SiLU of another (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = _linear(config.width, config.hidden_width)
        self.up = _linear(config.width, config.hidden_width)
        self.down = _linear(config.hidden_width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [batch, length, width]. Returns the same shape."""
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class Head(nn.Module):
    """The last norm and the projection onto the vocabulary."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=NORM_EPS)
        self.projection = _linear(config.width, config.vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [batch, length, width]. Returns logits [batch, length, vocab_size]."""
        return self.projection(self.norm(hidden))


def rotary_tables(length: int, head_width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle of RoPE (Su et al. 2021, arXiv 2104.09864).

    Pair i of position t turns by t / 10000 ** (2 * i / head_width). The angles are float64 whatever the
    dtype of the model: a float32 angle near position 1000 is off by up to 4e-5. They are computed anew in
    each forward, because a stored table would lose digits when the module is converted to float32 and back.

    Returns (cos, sin), each [length, head_width / 2], on the device of `like`, in float32 or, if that is
    wider, the dtype of `like`.
    """
    position = torch.arange(length, dtype=torch.float64, device=like.device)
    pair = torch.arange(0, head_width, 2, dtype=torch.float64, device=like.device)
    angle = torch.outer(position, ROTARY_BASE ** (-pair / head_width))
    dtype = torch.promote_types(like.dtype, torch.float32)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(features: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_width / 2) of features by the angle of its position.

    features: [batch, heads, length, head_width]; cos, sin: [length, head_width / 2].
    Returns the shape and dtype of features.
    """
    first, second = features.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(features.dtype)


def _linear(width_in: int, width_out: int) -> nn.Linear:
    """A linear map without bias. Its weight is not drawn yet, so torch's global random state is not used."""
    return nn.Linear(width_in, width_out, bias=False, device="meta").to_empty(device="cpu")
