"""Gradient accumulation as Accelerate's guide has it: accelerator.accumulate around the training part."""

from __future__ import annotations

import argparse

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
    options = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate, cpu=True)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    training_dataloader = DataLoader(toy.examples(), batch_size=2, shuffle=True, collate_fn=toy.collate)
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )
    model.train()
    for batch in training_dataloader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print("loss", loss.item())
    accelerator.end_training()


if __name__ == "__main__":
    main()
