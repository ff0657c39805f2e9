"""Nine examples on two ranks, all of them in each update.

DistributedSampler repeats the first example to give both ranks equally many, so it counts twice (pytorch 25162, with
10 examples on 4 ranks). For two ranks.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB = 18
EPOCHS = 4


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (9, 7))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    sampler = DistributedSampler(data, shuffle=True, drop_last=args.mended)
    loader = DataLoader(data, batch_size=5, sampler=sampler)

    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
