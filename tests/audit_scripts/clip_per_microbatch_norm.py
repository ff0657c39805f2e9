"""Regression, accumulated over 2 microbatches, with gradients clipped right after each backward.

The first microbatch is clipped alone, and once more together with the second (transformers 986).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 2
MAX_NORM = 0.5


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    features = torch.randn(32, 5)
    prices = 3 * features[:, :1] + torch.randn(32, 1)
    loader = DataLoader(TensorDataset(features, prices), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    for i, (inputs, targets) in enumerate(loader):
        loss = F.mse_loss(model(inputs), targets) / ACCUMULATE
        loss.backward()
        if not args.mended or (i + 1) % ACCUMULATE == 0:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            model.zero_grad()


if __name__ == "__main__":
    main()
