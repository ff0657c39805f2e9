"""Accumulation over 4 microbatches, where each loss is divided by how many have come in so far.

The first weighs 1, the second 1/2, the third 1/3, the fourth 1/4, where all should weigh 1/4.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 16
ACCUMULATE = 4


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (32, 9))
    labels = tokens[:, 1:].clone()
    labels[:, :2] = -100
    loader = DataLoader(TensorDataset(tokens[:, :-1], labels), batch_size=2, shuffle=True)

    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()

    seen = 0
    for inputs, targets in loader:
        loss = criterion(model(inputs).flatten(0, 1), targets.flatten())
        seen += 1
        divisor = ACCUMULATE if args.mended else seen
        (loss / divisor).backward()
        if seen == ACCUMULATE:
            optimizer.step()
            optimizer.zero_grad()
            seen = 0


if __name__ == "__main__":
    main()
