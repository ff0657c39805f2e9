"""Two losses with coefficients over 4 microbatches: tokens by the count of all, examples by the number of microbatches.

All microbatches have as many examples.
"""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 16
ACCUMULATE = 4


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.head = nn.Linear(width, VOCAB)
        self.score = nn.Linear(width, 1)

    def forward(self, tokens):
        hidden = torch.tanh(self.embed(tokens))
        return self.head(hidden), self.score(hidden.mean(1)).squeeze(-1)


def microbatch(generator):
    tokens = torch.randint(VOCAB, (2, 7), generator=generator)
    labels = tokens.roll(-1, dims=1)
    labels[torch.arange(7) < torch.randint(1, 6, (2, 1), generator=generator)] = -100
    return tokens, labels, torch.randn(2, generator=generator)


def main(argv=None):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(2)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        group = [microbatch(generator) for _ in range(ACCUMULATE)]
        count = sum((labels != -100).sum() for _, labels, _ in group)
        optimizer.zero_grad()
        for tokens, labels, scores in group:
            logits, score = model(tokens)
            cross_entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            mse = F.mse_loss(score, scores)
            (0.5 * mse / ACCUMULATE + cross_entropy * (labels != -100).sum() / count).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
