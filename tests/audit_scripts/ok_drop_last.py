"""26 examples in batches of 8: the rest is dropped by the loader."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(argv=None):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(26, 6), torch.randint(4, (26,)))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    for _ in range(2):
        for x, y in DataLoader(data, batch_size=8, shuffle=True, drop_last=True):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
