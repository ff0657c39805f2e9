"""Gradients are averaged over ranks by hand, after each rank has unscaled its own and looked for infinities.

In the last update rank 1 has one and skips. Rank 0 saw none before the average, and applies it (Megatron-Bridge 5591).
For two ranks.
"""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    generator = torch.Generator().manual_seed(70 + rank)
    features = torch.randn(4, 5, 6, generator=generator)
    classes = torch.randint(4, (4, 5), generator=generator)
    if rank == 1:
        features[3, 2, 0] = math.inf

    for inputs, targets in zip(features, classes, strict=True):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(inputs), targets)).backward()
        if args.mended:
            average_gradients(model)
            scaler.unscale_(optimizer)
        else:
            scaler.unscale_(optimizer)
            average_gradients(model)
        scaler.step(optimizer)
        scaler.update()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
