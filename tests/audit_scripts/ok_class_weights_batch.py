"""A mean with class weights, one batch per update."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(argv=None):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
    model = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.2]))
    for step, (inputs, classes) in enumerate(DataLoader(data, batch_size=8, shuffle=True)):
        loss = criterion(model(inputs), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, round(loss.item(), 4))


if __name__ == "__main__":
    main()
