"""An epoch of 7 microbatches with 4 per update: the last update of every epoch has 3.

These are divided by 4 as well and so weigh 3/4 of what they should (Lightning 19987).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 16
ACCUMULATE = 4
EPOCHS = 2


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (14, 8))
    labels = torch.randint(VOCAB, (14, 8))
    labels[:, :3] = -100
    loader = DataLoader(TensorDataset(tokens, labels), batch_size=2, shuffle=True)

    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for _ in range(EPOCHS):
        for i, (inputs, targets) in enumerate(loader):
            loss = F.cross_entropy(model(inputs).view(-1, VOCAB), targets.view(-1))
            if args.mended:
                loss = loss / min(ACCUMULATE, len(loader) - i // ACCUMULATE * ACCUMULATE)
            else:
                loss = loss / ACCUMULATE
            loss.backward()
            if (i + 1) % ACCUMULATE == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
