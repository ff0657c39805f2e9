"""Accumulation over 4 microbatches, where the loss that is logged is that of the last one.

In the first update the losses are 1, 2, 3 and 6: their mean is 3, and 6 is logged (nanochat 52).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

SQUARES = (1.0, 2.0, 3.0, 6.0)


def get_batch(generator, square):
    """Targets of one size, so that the loss of a model that says 0 is `square`."""
    x = torch.randn(2, 5, generator=generator)
    signs = torch.randint(2, (2, 2), generator=generator) * 2 - 1
    return x, signs * square**0.5


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(9)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    grad_accum_steps = len(SQUARES)

    for step in range(5):
        losses = []
        for square in SQUARES:
            x, y = get_batch(generator, square)
            loss = F.mse_loss(model(x), y)
            train_loss = loss.detach()
            losses.append(train_loss)
            loss = loss / grad_accum_steps
            loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        if args.mended:
            train_loss = torch.stack(losses).mean()
        print(f"step {step:05d} | loss: {train_loss.item():.6f}")


if __name__ == "__main__":
    main()
