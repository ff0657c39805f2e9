"""BatchNorm in training mode, where every update is one batch of one process."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(argv=None):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 1, 5, 5), torch.randint(3, (32,)))
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for images, labels in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
