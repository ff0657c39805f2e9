"""Speech frames with a corrupt recording in the second update; a gradient scaler skips what is not finite.

Gradients are cleared only where the optimizer ran. The NaN of the second of 4 microbatches stays in them, and no later
update is ever finite (espnet 3283).
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
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    for i, (inputs, targets) in enumerate(loader):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        scaler.scale(loss / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE:
            continue
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if torch.isfinite(norm) or args.mended:
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
