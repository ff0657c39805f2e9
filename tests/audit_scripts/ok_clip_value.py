"""Gradients clipped by value; one batch per update."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(argv=None):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 6), 5 * torch.randn(40, 2))
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for inputs, targets in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()


if __name__ == "__main__":
    main()
