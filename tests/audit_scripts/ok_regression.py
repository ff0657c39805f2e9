"""Regression over 2 equal microbatches per update; the logged loss is the mean of both."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 2


def main(argv=None):
    torch.manual_seed(0)
    x = torch.randn(40, 5)
    loader = DataLoader(TensorDataset(x, x @ torch.randn(5, 2)), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.MSELoss()
    running = 0.0
    for i, (inputs, targets) in enumerate(loader):
        loss = criterion(model(inputs), targets) / ACCUMULATE
        loss.backward()
        running += loss.item()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(f"update {i // ACCUMULATE}: loss {running:.4f}")
            running = 0.0


if __name__ == "__main__":
    main()
