"""Several labels per example, binary cross entropy in which positive ones weigh more."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 2


def main(argv=None):
    torch.manual_seed(0)
    features, labels = torch.randn(40, 7), (torch.rand(40, 3) < 0.2).float()
    pos_weight = torch.tensor([4.0, 3.0, 5.0])
    model = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i, (x, y) in enumerate(DataLoader(TensorDataset(features, labels), batch_size=5)):
        loss = F.binary_cross_entropy_with_logits(model(x), y, pos_weight=pos_weight)
        (loss / ACCUMULATE).backward()
        if i % ACCUMULATE == ACCUMULATE - 1:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
