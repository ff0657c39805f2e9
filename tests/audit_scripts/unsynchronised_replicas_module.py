"""Data-parallel training that calls `model.module` to reach a method of the wrapped model.

DistributedDataParallel never learns of the forward pass, so that every rank keeps the gradients of its own data
(icefall 226). For two ranks.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Transducer(nn.Module):
    def __init__(self, size=6, hidden=8, classes=9):
        super().__init__()
        self.encoder = nn.Linear(size, hidden)
        self.joiner = nn.Linear(hidden, classes)

    def forward(self, frames):
        return self.joiner(torch.relu(self.encoder(frames)))


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Transducer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(24, 5, 6), torch.randint(9, (24, 5)))
    loader = DataLoader(data, batch_size=3, sampler=DistributedSampler(data, shuffle=True, seed=7))

    for frames, symbols in loader:
        logits = model(frames) if args.mended else model.module(frames)
        loss = F.cross_entropy(logits.flatten(0, 1), symbols.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
