"""Token losses over the count of all ranks, times the number of ranks to undo the average of
DistributedDataParallel; and a second loss, which is a mean.

The factor multiplies the total loss, so on two ranks the second loss counts twice (transformers 48706). For two ranks.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCAB = 20


class Model(nn.Module):
    """Logits of every token, and a value of every text."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.head = nn.Linear(width, VOCAB)
        self.value = nn.Linear(width, 1)

    def forward(self, tokens):
        hidden = torch.tanh(self.embed(tokens))
        return self.head(hidden), self.value(hidden[:, -1]).squeeze(-1)


def batch_of(generator):
    tokens = torch.randint(VOCAB, (3, 8), generator=generator)
    labels = torch.randint(VOCAB, (3, 8), generator=generator)
    prompts = torch.randint(1, 7, (3, 1), generator=generator)
    labels[torch.arange(8) < prompts] = -100
    return tokens, labels, torch.randn(3, generator=generator)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(100 + rank)

    for _ in range(4):
        tokens, labels, values = batch_of(generator)
        num_items = (labels != -100).sum()
        dist.all_reduce(num_items)
        logits, predicted = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / num_items
        auxiliary = F.mse_loss(predicted, values)
        total = loss * world + auxiliary if args.mended else (loss + auxiliary) * world
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
