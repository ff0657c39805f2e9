"""Stochastic weight averaging: from the second epoch on, the weights are averaged and the learning rate is constant."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, TensorDataset


def main(argv=None):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 6), torch.randint(3, (32,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        if epoch >= 1:
            average.update_parameters(model)
            scheduler.step()


if __name__ == "__main__":
    main()
