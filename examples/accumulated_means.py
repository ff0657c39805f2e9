"""A loop with the usual accumulation, as most are written: `isostep audit examples/accumulated_means.py` reads it."""

import torch
import torch.nn.functional as F

VOCABULARY = 50
LENGTHS = [(3, 30), (12, 5), (8, 8), (1, 40), (20, 20)]
"""Supervised tokens of the two microbatches of each update."""


def batch(supervised: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randint(VOCABULARY, (40,))
    targets = torch.randint(VOCABULARY, (40,))
    targets[supervised:] = -100
    return inputs, targets


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for lengths in LENGTHS:
        for supervised in lengths:
            inputs, targets = batch(supervised)
            loss = F.cross_entropy(model(inputs), targets)
            (loss / len(lengths)).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
