"""Two ranks, two microbatches each, unequal counts: sums over the count of all, times the number of ranks.

For two ranks.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCAB = 16
ACCUMULATE = 2


def microbatch(generator):
    tokens = torch.randint(VOCAB, (2, 9), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(2, 8, generator=generator) < 0.5] = -100
    labels[0, 0] = 1
    return tokens[:, :-1], labels


def main(argv=None):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, 8), nn.GELU(), nn.Linear(8, VOCAB)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        group = [microbatch(generator) for _ in range(ACCUMULATE)]
        count = sum((labels != -100).sum() for _, labels in group)
        dist.all_reduce(count)
        for i, (tokens, labels) in enumerate(group):
            with nullcontext() if i + 1 == ACCUMULATE else model.no_sync():
                logits = model(tokens).flatten(0, 1)
                loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
                (loss * world / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
