"""A plain loop over fully_shard, with each microbatch averaged alone or by the tokens of the whole update."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import toy


def build_model():
    return toy.Decoder()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--by", choices=("microbatch", "token"), default="microbatch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = build_model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = toy.examples()
    batches = list(
        DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=True), collate_fn=toy.collate)
    )
    for first in range(0, len(batches), options.accumulate):
        group = batches[first : first + options.accumulate]
        tokens = torch.tensor(sum(int(batch["labels"][:, 1:].ne(-100).sum()) for batch in group))
        dist.all_reduce(tokens)
        for index, batch in enumerate(group):
            model.set_requires_gradient_sync(index == len(group) - 1)
            logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
            labels = batch["labels"][:, 1:].flatten()
            if options.by == "token":
                loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") * world / tokens
            else:
                loss = F.cross_entropy(logits, labels, ignore_index=-100) / options.accumulate
            loss.backward()
            if dist.get_rank() == 0:
                print("loss", loss.item())
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
