"""Speech frames with a corrupt recording in the second update: a microbatch whose loss is not finite is left out, and
its update is skipped.

The gradients of the other three microbatches are not cleared and stay in the next update (as in espnet 3283, but the
loss is looked at before backward).
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 4
CORRUPT = 5  # of the recordings, one per microbatch


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    frames = torch.randn(20, 6, 5)
    frames[CORRUPT, 3] = math.nan
    phones = torch.randint(7, (20, 6))
    loader = DataLoader(TensorDataset(frames, phones), batch_size=1)

    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(loader)

    for _ in range(len(loader) // ACCUMULATE):
        group = [next(batches) for _ in range(ACCUMULATE)]
        if args.mended:
            optimizer.zero_grad()
        finite = True
        for inputs, targets in group:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            if torch.isfinite(loss):
                (loss / ACCUMULATE).backward()
            else:
                finite = False
        if not finite:
            print("loss is not finite, skipping the update")
            continue
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
