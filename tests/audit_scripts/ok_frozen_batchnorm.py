"""BatchNorm in eval mode, as is usual in fine-tuning, over 2 equal microbatches."""

import torch
import torch.nn.functional as F
from torch import nn

ACCUMULATE = 2


def main(argv=None):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    norm.eval()
    for _ in range(4):
        for _ in range(ACCUMULATE):
            loss = F.cross_entropy(model(torch.randn(4, 6)), torch.randint(3, (4,)))
            (loss / ACCUMULATE).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
