"""SGD with Nesterov momentum and weight decay; a penalty on the weights by hand as well."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(argv=None):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 6), torch.randint(3, (32,)))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        penalty = sum(p.abs().sum() for p in model.parameters() if p.dim() > 1)
        (F.cross_entropy(model(x), y) + 1e-4 * penalty).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
