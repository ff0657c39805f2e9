"""The loop divides by the number of microbatches; the helper that runs backward could as well and is told 1.

There is one division (accelerate 3533, where readers took it for two).
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 16
ACCUMULATE = 4


class Runner:
    def __init__(self, accumulate=1):
        self.accumulate = accumulate

    def backward(self, loss):
        (loss / self.accumulate).backward()


def main(argv=None):
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (32, 7))
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    runner = Runner(accumulate=1)
    for i, (batch,) in enumerate(DataLoader(TensorDataset(tokens), batch_size=2)):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss = loss / ACCUMULATE
        runner.backward(loss)
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
