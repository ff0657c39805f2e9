"""A resumed run, in which only rank 0 reads the state of the gradient scaler.

Rank 0 goes on with a scale of 1024, rank 1 begins with 2048. The gradients that are averaged carry both, and each rank
divides by its own, so that the replicas drift apart (pytorch 136009). For two ranks.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCAB = 16


def checkpoint():
    """What the last run saved of its scaler."""
    return {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
    if rank == 0 or args.mended:
        scaler.load_state_dict(checkpoint())

    generator = torch.Generator().manual_seed(50 + rank)
    for _ in range(5):
        tokens = torch.randint(VOCAB, (2, 7), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
