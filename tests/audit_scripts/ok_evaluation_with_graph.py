"""Evaluation between updates in eval mode, but without no_grad: losses with a graph that nobody runs backward."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def evaluate(model, criterion, features, classes):
    model.eval()
    loss = criterion(model(features), classes).item()
    model.train()
    return loss


def main(argv=None):
    torch.manual_seed(0)
    features, classes = torch.randn(40, 6), torch.randint(4, (40,))
    loader = DataLoader(TensorDataset(features[:32], classes[:32]), batch_size=8)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            print(f"epoch {epoch}: test loss {evaluate(model, criterion, features[32:], classes[32:]):.4f}")


if __name__ == "__main__":
    main()
