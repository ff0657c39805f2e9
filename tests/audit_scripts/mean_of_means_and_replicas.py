"""Two replicas, each accumulating over two microbatches; the four have 1, 7, 3 and 5 targets.

Means are taken per microbatch, averaged over the microbatches of a rank and again over ranks: every one of the four
weighs 1/4, however many targets it has. Each target should weigh 1/16 (torchtitan 2206). For two ranks.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCAB = 20
TARGETS = (1, 7, 3, 5)
ACCUMULATE = 2


def make_batches(num_updates, rank, world):
    """The microbatches of this rank, every world-th of them all."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for count in TARGETS * num_updates:
        tokens = torch.randint(VOCAB, (1, 8), generator=generator)
        labels = torch.randint(VOCAB, (1, 8), generator=generator)
        labels[:, count:] = -100
        batches.append((tokens, labels))
    return batches[rank::world]


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, 8), nn.Tanh(), nn.Linear(8, VOCAB)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss(ignore_index=-100)

    batches = make_batches(4, rank, world)
    for start in range(0, len(batches), ACCUMULATE):
        group = batches[start : start + ACCUMULATE]
        total = sum((labels != -100).sum() for _, labels in group)
        dist.all_reduce(total)
        for i, (tokens, labels) in enumerate(group):
            with nullcontext() if i == len(group) - 1 else model.no_sync():
                loss = criterion(model(tokens).flatten(0, 1), labels.flatten())
                share = (labels != -100).sum() * world / total if args.mended else 1 / len(group)
                (loss * share).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
