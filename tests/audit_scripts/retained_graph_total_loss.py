"""The loss of an epoch is added up as a tensor, for a line of log at its end.

The sum holds on to the graph of every batch until then, and memory grows with each of them (horovod 641).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 4
EPOCHS = 2


def train_epoch(model, loader, optimizer, mended):
    model.train()
    total_loss = 0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total_loss += loss.item() if mended else loss
    return total_loss / len(loader)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 1, 6, 6), torch.randint(CLASSES, (48,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(1, EPOCHS + 1):
        total = train_epoch(model, loader, optimizer, args.mended)
        print(f"epoch {epoch}: train loss {float(total):.4f}")


if __name__ == "__main__":
    main()
