"""Losses of all tokens times a mask, divided by the mask of all microbatches."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 16


def main(argv=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        group = []
        for _ in range(3):
            tokens = torch.randint(VOCAB, (2, 8))
            mask = (torch.arange(7) >= torch.randint(1, 6, (2, 1))).float()
            group.append((tokens, mask))
        count = sum(mask.sum() for _, mask in group)
        for tokens, mask in group:
            losses = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
            ((losses * mask).sum() / count).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
