"""A schedule over 20 updates, stepped once per rank in every update "because there are more batches".

On two ranks the learning rate is 0 halfway (accelerate 1382). For two ranks.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB = 16
UPDATES = 20


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (UPDATES * world * 2, 7))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))

    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=UPDATES)

    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        for _ in range(1 if args.mended else world):
            scheduler.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
