"""Embedding and head share their weights; targets of all microbatches are counted first."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 16


class Tied(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def main(argv=None):
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths = iter([4, 9, 6, 3, 12, 5, 7, 7])
    for _ in range(4):
        group = [torch.randint(VOCAB, (1, next(lengths))) for _ in range(2)]
        targets = sum(text.shape[1] - 1 for text in group)
        for text in group:
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[0, 1:])
            (loss * (text.shape[1] - 1) / targets).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
