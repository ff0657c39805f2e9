"""Eight examples on two ranks: each rank shuffles them and takes its part.

The ranks shuffle with seeds of their own, so that some examples come twice in an epoch and others never (CrowdDet 36).
For two ranks.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

CLASSES = 4
EPOCHS = 4


class ShardedSampler(Sampler):
    def __init__(self, size, seed):
        self.size = size
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self):
        return self.size // dist.get_world_size()

    def __iter__(self):
        order = torch.randperm(self.size, generator=self.generator).tolist()
        return iter(order[dist.get_rank() :: dist.get_world_size()])


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8, 12), torch.randint(CLASSES, (8,)))
    seed = 1 if args.mended else 1 + dist.get_rank()
    loader = DataLoader(data, batch_size=4, sampler=ShardedSampler(len(data), seed))

    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, CLASSES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for _ in range(EPOCHS):
        for images, classes in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), classes).backward()
            optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
