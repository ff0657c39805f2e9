"""The loop of Fabric's page on gradient accumulation, and the loop that it stands for."""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

import toy


def build_model():
    return toy.Decoder()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--group", choices=("printed", "counted"), default="printed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = build_model()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.02))
    dataloader = fabric.setup_dataloaders(
        DataLoader(toy.examples(), batch_size=2, shuffle=True, collate_fn=toy.collate)
    )
    model.train()
    for iteration, batch in enumerate(dataloader):
        if options.group == "printed":
            is_accumulating = iteration % options.accumulate != 0
        else:
            is_accumulating = (iteration + 1) % options.accumulate != 0 and iteration + 1 != len(dataloader)
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            output = F.log_softmax(model(batch["input_ids"])[:, :-1], dim=-1)
            loss = F.nll_loss(output.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
            fabric.backward(loss if options.group == "printed" else loss / options.accumulate)
        fabric.print("loss", loss.item())
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
