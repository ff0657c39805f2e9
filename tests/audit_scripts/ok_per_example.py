"""The objective is a mean over examples, each of which is a mean over its targets: here of 2 and of 8 (NeMo 8343)."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 16
TARGETS = (2, 8)


def main(argv=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        optimizer.zero_grad()
        for targets in TARGETS:
            tokens = torch.randint(VOCAB, (1, 10))
            labels = torch.randint(VOCAB, (1, 10))
            labels[:, targets:] = -100
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
            (loss / len(TARGETS)).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
