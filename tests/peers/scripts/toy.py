"""Data and a model for the scripts beside this file: random tokens, very unequal numbers of supervised ones."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 64
PADDING = 0
WIDTH = 32
LONGEST = 32
EXAMPLES = 38
"""19 batches of two: neither four microbatches nor two replicas divide them."""


def examples(count: int = EXAMPLES, seed: int = 0) -> list[dict[str, list[int]]]:
    """Prompts whose labels are ignored, and completions of 1 to 20 tokens; every third has no prompt."""
    source = random.Random(seed)
    found = []
    for index in range(count):
        prompt = [source.randrange(1, VOCABULARY) for _ in range(0 if index % 3 == 0 else source.randrange(1, 9))]
        length = source.choice((1, 2, 3, 20)) + (not prompt)
        completion = [source.randrange(1, VOCABULARY) for _ in range(length)]
        found.append({"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion})
    return found


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """One batch, padded on the right."""
    longest = max(len(row["input_ids"]) for row in rows)
    filled = [longest - len(row["input_ids"]) for row in rows]
    return {
        "input_ids": torch.tensor([r["input_ids"] + [PADDING] * n for r, n in zip(rows, filled, strict=True)]),
        "attention_mask": torch.tensor([[1] * (longest - n) + [0] * n for n in filled]),
        "labels": torch.tensor([r["labels"] + [-100] * n for r, n in zip(rows, filled, strict=True)]),
    }


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """A causal language model of two layers; returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)
