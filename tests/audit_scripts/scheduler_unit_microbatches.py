"""Accumulation over 4 microbatches and a learning rate that falls linearly to 0 over 250 updates.

The scheduler is stepped in every microbatch, so the learning rate is 0 after a quarter of them (accelerate 963).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 12
ACCUMULATE = 4
UPDATES = 250


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (UPDATES * ACCUMULATE, 6))
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=1)

    model = nn.Sequential(nn.Embedding(VOCAB, 4), nn.Linear(4, VOCAB))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / UPDATES))

    for i, (inputs, targets) in enumerate(loader):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        (loss / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
        if not args.mended or (i + 1) % ACCUMULATE == 0:
            scheduler.step()


if __name__ == "__main__":
    main()
