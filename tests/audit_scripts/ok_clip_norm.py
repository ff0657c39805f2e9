"""Accumulation over 3 microbatches of unequal counts, divided by the count of all; clipped once, by norm."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 16


def microbatch(generator):
    tokens = torch.randint(VOCAB, (2, 8), generator=generator)
    prompts = torch.randint(1, 7, (2, 1), generator=generator)
    labels = tokens.roll(-1, dims=1)
    labels[torch.arange(8) < prompts] = -100
    return tokens, labels


def main(argv=None):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        group = [microbatch(generator) for _ in range(3)]
        count = sum((labels != -100).sum() for _, labels in group)
        for tokens, labels in group:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
            (loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
