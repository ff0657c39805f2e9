"""Accumulation over 4 microbatches, with gradients cleared before each of them.

Only the last microbatch reaches the update (RAE 67).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 4


class Autoencoder(nn.Module):
    def __init__(self, size=12, hidden=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, hidden), nn.GELU())
        self.decoder = nn.Linear(hidden, size)

    def forward(self, x):
        return self.decoder(self.encoder(x))


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(32, 12)), batch_size=2, shuffle=True)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for i, (batch,) in enumerate(loader):
        if not args.mended or i % ACCUMULATE == 0:
            optimizer.zero_grad()
        loss = F.mse_loss(model(batch), batch) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()


if __name__ == "__main__":
    main()
