"""Validation after every second update, under no_grad."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 16


@torch.no_grad()
def validate(model, tokens):
    model.eval()
    losses = [
        F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).item() for batch in tokens.split(4)
    ]
    model.train()
    return sum(losses) / len(losses)


def main(argv=None):
    torch.manual_seed(0)
    train, held_out = torch.randint(VOCAB, (24, 7)), torch.randint(VOCAB, (8, 7))
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Dropout(0.1), nn.Linear(8, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, (batch,) in enumerate(DataLoader(TensorDataset(train), batch_size=4, shuffle=True)):
        if step % 2 == 0:
            print(f"step {step}: validation loss {validate(model, held_out):.4f}")
        optimizer.zero_grad()
        F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
