"""Accelerate's recipe for samples of variable size: the tokens of the whole update are counted first."""

from __future__ import annotations

import argparse
import contextlib
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import toy


def build_model():
    config = LlamaConfig(
        vocab_size=toy.VOCABULARY, hidden_size=toy.WIDTH, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=toy.LONGEST,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--count", choices=("shifted", "all"), default="shifted", help="which labels are counted")
    options = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    first = 1 if options.count == "shifted" else 0
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate, cpu=True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataloader = DataLoader(toy.examples(), batch_size=2, shuffle=True, collate_fn=toy.collate)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)

    model.train()
    training_iterator = iter(dataloader)
    remainder = len(dataloader) % options.accumulate or options.accumulate
    total_updates = math.ceil(len(dataloader) / options.accumulate)
    for update_step in range(total_updates):
        batches = options.accumulate if update_step != total_updates - 1 else remainder
        batch_samples = [next(training_iterator) for _ in range(batches)]
        num_items_in_batch = sum(batch["labels"][..., first:].ne(-100).sum() for batch in batch_samples)
        num_items_in_batch = accelerator.gather(num_items_in_batch).sum().item()
        losses = []
        for i, batch in enumerate(batch_samples):
            last = i == len(batch_samples) - 1
            with contextlib.nullcontext() if last or accelerator.num_processes == 1 else model.no_sync():
                outputs = model(**batch, use_cache=False, num_items_in_batch=num_items_in_batch)
                # Accelerate divides by the accumulation steps, and DDP by the processes.
                loss = outputs.loss * options.accumulate * accelerator.num_processes
                accelerator.backward(loss)
                losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        total = accelerator.gather(sum(losses)).sum().item()
        accelerator.print("loss", total / (accelerator.num_processes * options.accumulate))
    accelerator.end_training()


if __name__ == "__main__":
    main()
