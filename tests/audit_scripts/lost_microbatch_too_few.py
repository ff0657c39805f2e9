"""A small data set: 3 microbatches per epoch, and an update after every 4.

The count begins anew in every epoch, so the optimizer never runs (AnimaLoraStudio 305).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 4
EPOCHS = 4


class Adapter(nn.Module):
    """A low-rank change of a frozen layer."""

    def __init__(self, size=8, rank=2):
        super().__init__()
        self.base = nn.Linear(size, size)
        self.base.requires_grad_(False)
        self.down = nn.Linear(size, rank, bias=False)
        self.up = nn.Linear(rank, size, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(6, 8), torch.randn(6, 8))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    model = Adapter()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    for _ in range(EPOCHS):
        for i, (inputs, targets) in enumerate(loader):
            in_group = min(ACCUMULATE, len(loader) - i // ACCUMULATE * ACCUMULATE)
            (F.mse_loss(model(inputs), targets) / in_group).backward()
            if (i + 1) % ACCUMULATE == 0 or (args.mended and i + 1 == len(loader)):
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
