"""Pretraining with a loss mask: the tokens that count are multiplied by 1, the others by 0.

Every microbatch divides by the sum of its own mask. Where the masks sum to 2 and 14, the tokens of the first weigh
1/4 each instead of 1/16, those of the second 1/28 (levanter 842).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 24
LENGTH = 16
MASK_SUMS = (2, 14)


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def microbatch(generator, mask_sum):
    tokens = torch.randint(VOCAB, (1, LENGTH + 1), generator=generator)
    mask = torch.zeros(1, LENGTH)
    mask[:, LENGTH - mask_sum :] = 1
    return tokens[:, :-1], tokens[:, 1:], mask


def token_losses(model, tokens, targets):
    return F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none")


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for _ in range(4):
        group = [microbatch(generator, mask_sum) for mask_sum in MASK_SUMS]
        mask_of_all = sum(mask.sum() for _, _, mask in group)
        optimizer.zero_grad()
        for tokens, targets, mask in group:
            losses = token_losses(model, tokens, targets) * mask
            divisor = mask_of_all if args.mended else mask.sum() * len(group)
            (losses.sum() / divisor).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
