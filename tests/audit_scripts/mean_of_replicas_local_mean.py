"""Data-parallel training on answers of unequal length: in each update rank 0 has 1 target and rank 1 has 7.

Each rank takes the mean over its own targets and DistributedDataParallel averages the ranks, so the single target of
rank 0 weighs 1/2 and those of rank 1 weigh 1/14, instead of 1/8 each (transformers 34242). For two ranks.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB = 20


class Answers(Dataset):
    def __init__(self, lengths):
        generator = torch.Generator().manual_seed(2)
        self.lengths = lengths
        self.tokens = torch.randint(VOCAB, (len(lengths), 10), generator=generator)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        labels = self.tokens[i].roll(-1)
        labels[self.lengths[i] :] = -100
        return self.tokens[i], labels


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, 6), nn.Linear(6, VOCAB)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    data = Answers([1, 7] * 4)
    loader = DataLoader(data, batch_size=1, sampler=DistributedSampler(data, shuffle=False))

    for tokens, labels in loader:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
        if args.mended:
            mine = (labels != -100).sum()
            total = mine.clone()
            dist.all_reduce(total)
            loss = loss * mine / total * world
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
