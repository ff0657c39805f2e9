"""SGD whose forward and backward are in a closure."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(argv=None):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(30, 5), torch.randint(3, (30,)))
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    for inputs, classes in DataLoader(data, batch_size=6, shuffle=True):

        def closure(inputs=inputs, classes=classes):
            optimizer.zero_grad()
            loss = criterion(model(inputs), classes)
            loss.backward()
            return loss

        optimizer.step(closure)


if __name__ == "__main__":
    main()
