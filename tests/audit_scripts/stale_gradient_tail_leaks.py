"""An epoch of 63 microbatches with 8 per update: 7 are left over, and their gradients are not cleared.

They stay in the gradients, so that the first update of the next epoch holds 15 microbatches (torchtune 2745).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 12
ACCUMULATE = 8
EPOCHS = 2


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (63, 6))
    labels = torch.randint(VOCAB, (63, 6))
    labels[:, :2] = -100
    loader = DataLoader(TensorDataset(tokens, labels), batch_size=1, shuffle=True)
    full_groups = len(loader) // ACCUMULATE * ACCUMULATE

    model = nn.Sequential(nn.Embedding(VOCAB, 6), nn.Linear(6, VOCAB))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()

    for _ in range(EPOCHS):
        for i, (inputs, targets) in enumerate(loader):
            if args.mended and i == full_groups:
                break
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
            (loss / ACCUMULATE).backward()
            if (i + 1) % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
