"""Regression, accumulated over 2 microbatches; the loss is divided for backward and then logged.

What is logged is half the loss of the last microbatch. In the first update the two losses are 4 and 2: their mean is 3,
and 1 is logged (allennlp 4706).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

ACCUMULATE = 2


def make_batches(num_updates):
    """Targets of one size in each microbatch, so that the losses of a model that says 0 are 4 and 2."""
    generator = torch.Generator().manual_seed(6)
    for _ in range(num_updates):
        for square in (4.0, 2.0):
            signs = torch.randint(2, (3, 1), generator=generator) * 2 - 1
            yield torch.randn(3, 4, generator=generator), signs * square**0.5


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    group_loss = 0.0
    for i, (inputs, targets) in enumerate(make_batches(5)):
        loss = F.mse_loss(model(inputs), targets) / ACCUMULATE
        loss.backward()
        group_loss += loss.item()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            logged = group_loss if args.mended else loss.item()
            print(f"update {i // ACCUMULATE}: loss {logged:.4f}")
            group_loss = 0.0


if __name__ == "__main__":
    main()
