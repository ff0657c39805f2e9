"""Data-parallel training by hand: gradient sums are added up over ranks and divided by the count of all.

For two ranks.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCAB = 16


def main(argv=None):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(30 + dist.get_rank())
    for _ in range(4):
        count = torch.zeros(())
        for _ in range(2):
            tokens = torch.randint(VOCAB, (1, 8), generator=generator)
            labels = tokens[:, 1:].clone()
            labels[:, : int(torch.randint(0, 6, (), generator=generator))] = -100
            logits = model(tokens[:, :-1]).flatten(0, 1)
            F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum").backward()
            count += (labels != -100).sum()
        dist.all_reduce(count)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= count
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
