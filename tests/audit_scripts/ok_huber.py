"""Robust losses on boxes and depths, over 2 equal microbatches."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 2


def main(argv=None):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 6), torch.randn(32, 4), torch.randn(32, 1))
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i, (x, boxes, depths) in enumerate(DataLoader(data, batch_size=4, shuffle=True)):
        predicted = model(x)
        loss = F.smooth_l1_loss(predicted[:, :4], boxes, beta=0.5) + F.huber_loss(predicted[:, 4:], depths)
        (loss / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
