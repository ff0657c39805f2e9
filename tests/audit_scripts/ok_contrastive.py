"""Pairs of views: cross entropy over the matrix of similarities, both ways; one batch per update."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TEMPERATURE = 0.2


def main(argv=None):
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(32, 10)), batch_size=8, shuffle=True)
    encoder = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 6))
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    for (x,) in loader:
        left = F.normalize(encoder(x + 0.1 * torch.randn_like(x)), dim=1)
        right = F.normalize(encoder(x + 0.1 * torch.randn_like(x)), dim=1)
        similarity = left @ right.T / TEMPERATURE
        labels = torch.arange(len(x))
        loss = (F.cross_entropy(similarity, labels) + F.cross_entropy(similarity.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
