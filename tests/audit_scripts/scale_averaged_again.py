"""Sums over the targets are divided by their count over all ranks, and then DistributedDataParallel averages.

The average over two ranks divides by 2 once more, so every target weighs half of what it should (torchtune 2172).
For two ranks.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

VOCAB = 24


def make_dataset(size):
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(3, 12, (size,), generator=generator).tolist()
    return [torch.randint(VOCAB, (n,), generator=generator) for n in lengths]


def collate(texts):
    tokens = pad_sequence(texts, batch_first=True)
    labels = pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=-100)
    return tokens[:, :-1], labels


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    dataset = make_dataset(24)
    sampler = DistributedSampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_size=3, sampler=sampler, collate_fn=collate)

    sampler.set_epoch(0)
    for tokens, labels in loader:
        num_tokens = (labels != -100).sum()
        dist.all_reduce(num_tokens)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        loss = loss / num_tokens
        if args.mended:
            loss = loss * dist.get_world_size()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
