"""Regression with a penalty on the slope of the model, which is differentiated twice."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def slope_penalty(model, x):
    x = x.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum(1).mean()


def main(argv=None):
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    loader = DataLoader(TensorDataset(x, x.norm(dim=1, keepdim=True)), batch_size=10, shuffle=True)
    model = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets) + 0.1 * slope_penalty(model, inputs)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
