"""A denoising model, whose batch is cut into 4 microbatches to fit into memory.

The mean loss of each is run backward as it is, so the gradient is 4 times that of the batch (guided-diffusion 111).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MICROBATCH = 4


class Denoiser(nn.Module):
    def __init__(self, size=8, hidden=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size + 1, hidden), nn.SiLU(), nn.Linear(hidden, size))

    def forward(self, noisy, level):
        return self.layers(torch.cat([noisy, level], dim=1))


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    images = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(images), batch_size=16, shuffle=True)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    for (batch,) in loader:
        optimizer.zero_grad()
        for start in range(0, len(batch), MICROBATCH):
            micro = batch[start : start + MICROBATCH]
            level = torch.rand(len(micro), 1)
            noise = torch.randn_like(micro)
            predicted = model((1 - level) * micro + level * noise, level)
            loss = F.mse_loss(predicted, noise)
            if args.mended:
                loss = loss * len(micro) / len(batch)
            loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
