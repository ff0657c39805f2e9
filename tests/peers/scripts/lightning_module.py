"""A LightningModule and a Trainer with accumulate_grad_batches."""

from __future__ import annotations

import argparse
import logging
import os
import warnings

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import toy


def build_model():
    config = GPT2Config(
        vocab_size=toy.VOCABULARY, n_positions=toy.LONGEST, n_embd=toy.WIDTH, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class LanguageModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = build_model()

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        if self.global_rank == 0:
            print("loss", loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    L.seed_everything(0, verbose=False)
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        accumulate_grad_batches=options.accumulate,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    model = LanguageModel()
    model.model.train()
    trainer.fit(model, DataLoader(toy.examples(), batch_size=2, shuffle=True, collate_fn=toy.collate))


if __name__ == "__main__":
    main()
