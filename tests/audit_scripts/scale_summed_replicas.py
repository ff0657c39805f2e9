"""Data-parallel training without a wrapper: gradients are reduced over ranks by hand after backward.

all_reduce adds up where the loop assumed an average, so on two ranks every gradient is twice as large (dinov3 250).
For two ranks.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 5


def reduce_gradients(model, world, mended):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if mended:
            parameter.grad /= world


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    data = TensorDataset(torch.randn(32, 10), torch.randint(CLASSES, (32,)))
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for features, classes in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(features), classes).backward()
        reduce_gradients(model, dist.get_world_size(), args.mended)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
