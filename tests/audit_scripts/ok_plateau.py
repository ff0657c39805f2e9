"""ReduceLROnPlateau, stepped per epoch with the loss of a validation set."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset


def main(argv=None):
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(40, 1)
    loader = DataLoader(TensorDataset(x[:32], y[:32]), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for epoch in range(3):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            validation = F.mse_loss(model(x[32:]), y[32:]).item()
        scheduler.step(validation)
        print(f"epoch {epoch}: validation loss {validation:.4f}")


if __name__ == "__main__":
    main()
