"""The training loop divides by the number of microbatches, and so does the helper that runs the backward pass.

With 16 microbatches per update, every target weighs 1/16 of what it should (accelerate 1767).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 16
ACCUMULATE = 16


class Trainer:
    """Runs backward, and the optimizer whenever enough microbatches have come in."""

    def __init__(self, model, optimizer, accumulate):
        self.model, self.optimizer, self.accumulate = model, optimizer, accumulate
        self.microbatches = 0

    def backward(self, loss):
        (loss / self.accumulate).backward()
        self.microbatches += 1
        if self.microbatches % self.accumulate == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), ACCUMULATE)

    tokens = torch.randint(VOCAB, (4 * ACCUMULATE, 6))
    labels = torch.randint(VOCAB, (4 * ACCUMULATE, 6))
    labels[:, :3] = -100
    for batch, targets in DataLoader(TensorDataset(tokens, labels), batch_size=1, shuffle=True):
        loss = F.cross_entropy(model(batch).flatten(0, 1), targets.flatten())
        if not args.mended:
            loss = loss / ACCUMULATE
        trainer.backward(loss)


if __name__ == "__main__":
    main()
