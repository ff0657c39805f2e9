"""The model gives log-probabilities and the loss is nll_loss, as in many old examples."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(27, 4)

    def forward(self, x):
        x = F.relu(self.conv(x))
        x = self.dropout(torch.flatten(x, 1))
        return F.log_softmax(self.fc(x), dim=1)


def train(model, loader, optimizer, epoch):
    model.train()
    for index, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if index % 2 == 0:
            print(f"Train Epoch: {epoch} [{index * len(data)}/{len(loader.dataset)}]\tLoss: {loss.item():.6f}")


def main(argv=None):
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(24, 1, 5, 5), torch.randint(4, (24,)))
    loader = DataLoader(data, batch_size=6, shuffle=True)
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    for epoch in range(1, 3):
        train(model, loader, optimizer, epoch)


if __name__ == "__main__":
    main()
