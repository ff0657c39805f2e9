"""A warmup whose first learning rate is 0, so that the first update moves nothing."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 16
WARMUP = 3
UPDATES = 8


def factor(step):
    if step < WARMUP:
        return step / WARMUP
    return max(0.0, (UPDATES - step) / (UPDATES - WARMUP))


def main(argv=None):
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (UPDATES * 4, 6))
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, factor)
    for (batch,) in DataLoader(TensorDataset(tokens), batch_size=4):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
