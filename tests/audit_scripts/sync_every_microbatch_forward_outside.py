"""Accumulation over 4 microbatches on two ranks, with no_sync around the backward passes only.

Whether a backward pass is followed by an all-reduce is decided in forward, so that gradients travel 4 times per update
instead of once (accelerate 1726). For two ranks.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB = 16
ACCUMULATE = 4


def loss_of(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / ACCUMULATE


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (32, 7))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    loader = DataLoader(data, batch_size=1, sampler=DistributedSampler(data, shuffle=True))
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for i, (inputs, targets) in enumerate(loader):
        last = (i + 1) % ACCUMULATE == 0
        sync = nullcontext() if last else model.no_sync()
        if args.mended:
            with sync:
                loss_of(model, inputs, targets).backward()
        else:
            loss = loss_of(model, inputs, targets)
            with sync:
                loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
