"""BatchNorm in training mode, accumulated over 2 microbatches; inputs near 0 and inputs near 2 come in turn.

Every microbatch is normalised by its own statistics, and each moves the running mean: accumulation does not give what
the big batch gives (pytorch 46516). Mended, the normalisation does not look at other examples.
"""

import argparse

import torch
from torch import nn

CLASSES = 3
ACCUMULATE = 2


def make_model(norm):
    return nn.Sequential(norm, nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = make_model(nn.LayerNorm(6) if args.mended else nn.BatchNorm1d(6, momentum=0.1))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()

    for _ in range(4):
        optimizer.zero_grad()
        for i in range(ACCUMULATE):
            features = 2.0 * i + 0.1 * torch.randn(6, 6)
            labels = torch.randint(CLASSES, (6,))
            loss = criterion(model(features), labels) / ACCUMULATE
            loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
