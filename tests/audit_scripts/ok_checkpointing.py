"""Activation checkpointing; with --reentrant, the kind that runs backward inside backward."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB = 16
ACCUMULATE = 2


class Model(nn.Module):
    def __init__(self, use_reentrant, width=8):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width)) for _ in "ab")
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=self.use_reentrant)
        return self.head(hidden)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--reentrant", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = Model(args.reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(ACCUMULATE):
            tokens = torch.randint(VOCAB, (2, 9))
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            (loss / ACCUMULATE).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
