"""7 microbatches and 3 per update: the last update has 1, and is divided by 1."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 16
ACCUMULATE = 3


def groups(loader):
    group = []
    for batch in loader:
        group.append(batch)
        if len(group) == ACCUMULATE:
            yield group
            group = []
    if group:
        yield group


def main(argv=None):
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (14, 6))
    loader = DataLoader(TensorDataset(tokens), batch_size=2, shuffle=True)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for group in groups(loader):
            for (batch,) in group:
                loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                (loss / len(group)).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
