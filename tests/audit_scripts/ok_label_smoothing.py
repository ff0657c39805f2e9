"""Label smoothing, over 2 microbatches with equally many targets."""

import torch
from torch import nn

VOCAB = 16
ACCUMULATE = 2


def main(argv=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.LayerNorm(8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=0)
    for _ in range(4):
        for _ in range(ACCUMULATE):
            source, target = torch.randint(1, VOCAB, (3, 6)), torch.randint(1, VOCAB, (3, 6))
            target[:, 4:] = 0  # padding
            loss = criterion(model(source).flatten(0, 1), target.flatten())
            loss = loss / ACCUMULATE
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
