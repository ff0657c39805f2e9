"""A gradient scaler and clipping to norm 1, without unscaling the gradients before.

The gradients have a norm of about 0.5 and need no clipping; times the loss scale of 65536 they are far above 1, and
what is left of them after unscaling is 1/65536 (pytorch/examples 1196).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 16


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (20, 9))
    loader = DataLoader(TensorDataset(tokens), batch_size=4)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)

    for (batch,) in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        scaler.scale(loss).backward()
        if args.mended:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    main()
