"""Logarithms of frame energies; a silent frame in the first batch makes the gradients infinite.

The gradient scaler skips the optimizer, but the scheduler moves on all the same (pytorch 55585).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    energies = torch.rand(30, 8, 6) + 0.01
    energies[1, 4, 2] = 0  # silence
    words = torch.randint(10, (30, 8))
    loader = DataLoader(TensorDataset(energies, words), batch_size=5)

    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=len(loader))
    scaler = torch.amp.GradScaler("cpu")

    for frames, targets in loader:
        optimizer.zero_grad()
        logits = model(frames.log())
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if not args.mended or scaler.get_scale() >= scale:
            scheduler.step()


if __name__ == "__main__":
    main()
