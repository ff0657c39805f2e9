"""An objective that is a sum over all targets of the update, and is divided by nothing."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 16


def main(argv=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    lengths = iter([3, 9, 5, 5, 12, 4, 7, 2])
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(2):
            text = torch.randint(VOCAB, (1, next(lengths) + 1))
            F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[0, 1:], reduction="sum").backward()
        optimizer.step()


if __name__ == "__main__":
    main()
