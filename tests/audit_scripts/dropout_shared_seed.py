"""Two ranks with the same seed, so that the models begin alike.

They go on drawing the same numbers: dropout drops the same positions in the batches of both ranks. Mended, every rank
is given a seed of its own once the model is made. For two ranks.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB = 20
SEED = 1234


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    tokens = torch.randint(VOCAB, (40, 9))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True))
    model = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Dropout(0.2), nn.Linear(16, VOCAB))
    model = DistributedDataParallel(model)
    if args.mended:
        torch.manual_seed(SEED + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
