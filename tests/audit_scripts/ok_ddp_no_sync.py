"""Accumulation on two ranks: no_sync covers forward and backward of all microbatches but the last. For two ranks."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB = 16
ACCUMULATE = 3


def main(argv=None):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (48, 6))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i, (inputs, targets) in enumerate(loader):
        last = (i + 1) % ACCUMULATE == 0
        with nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / ACCUMULATE
            loss.backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
