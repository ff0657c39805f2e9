"""L-BFGS, which calls the closure several times per step, on all the data."""

import torch
import torch.nn.functional as F
from torch import nn


def main(argv=None):
    torch.manual_seed(0)
    x = torch.randn(30, 4)
    y = (x[:, :1] - 0.5 * x[:, 1:2]).tanh()
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for step in range(4):
        loss = optimizer.step(closure)
        print(f"step {step}: loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
