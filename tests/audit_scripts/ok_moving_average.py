"""An exponential moving average of the weights, kept in a copy of the model."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 16
DECAY = 0.99


@torch.no_grad()
def update_average(average, model):
    for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(parameter, 1 - DECAY)


def main(argv=None):
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (24, 7))
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for (batch,) in DataLoader(TensorDataset(tokens), batch_size=6, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        update_average(average, model)
    with torch.no_grad():
        judged = F.cross_entropy(average(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    print(f"loss of the average {judged.item():.4f}")


if __name__ == "__main__":
    main()
