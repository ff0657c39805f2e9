"""A cosine schedule, stepped once per update of 2 microbatches."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 16
ACCUMULATE = 2


def main(argv=None):
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (40, 6))
    loader = DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, T_max=len(loader) // ACCUMULATE)
    for i, (batch,) in enumerate(loader, start=1):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        (loss / ACCUMULATE).backward()
        if i % ACCUMULATE == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
