"""Batches of one example are dealt to the ranks in turn; 25 examples do not come out even on two ranks.

The rank that comes out short begins again at the first example, which counts twice in the epoch (accelerate 2316, with
24 examples on 5 ranks). For two ranks.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

VOCAB = 18


class DealtBatches:
    """The batches of a batch sampler, dealt to ranks; all ranks get equally many."""

    def __init__(self, batches, rank, world, drop_uneven):
        self.batches, self.rank, self.world, self.drop_uneven = list(batches), rank, world, drop_uneven

    def __len__(self):
        return len(self.batches) // self.world if self.drop_uneven else -(-len(self.batches) // self.world)

    def __iter__(self):
        for i in range(len(self)):
            yield self.batches[(i * self.world + self.rank) % len(self.batches)]


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (25, 6))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    dealt = DealtBatches(
        BatchSampler(SequentialSampler(data), 1, drop_last=False),
        dist.get_rank(),
        dist.get_world_size(),
        drop_uneven=args.mended,
    )
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for inputs, targets in DataLoader(data, batch_sampler=dealt):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
