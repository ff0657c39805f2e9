"""A frozen backbone under a head that is trained; the optimizer holds all parameters."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(argv=None):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(12, 16), nn.ReLU())
    backbone.requires_grad_(False)
    model = nn.Sequential(backbone, nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(40, 12), torch.randint(4, (40,)))
    for step, (x, y) in enumerate(DataLoader(data, batch_size=8, shuffle=True)):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{step}: {loss.item():.3f}")


if __name__ == "__main__":
    main()
