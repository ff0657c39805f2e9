"""transformers.Trainer, plain and with losses of one's own."""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

import toy


def causal_loss(logits, labels, reduction="mean"):
    return F.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100, reduction=reduction
    )


class TakesKwargs(nn.Module):
    """A model of one's own; what it does not know it ignores, num_items_in_batch too."""

    def __init__(self):
        super().__init__()
        self.decoder = toy.Decoder()

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        logits = self.decoder(input_ids)
        return {"loss": causal_loss(logits, labels), "logits": logits}


class NoKwargs(TakesKwargs):
    def forward(self, input_ids, attention_mask=None, labels=None):
        return super().forward(input_ids, attention_mask, labels)


class MeanLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = causal_loss(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


class DeclaredMeanLoss(MeanLoss):
    loss_is_scaled_for_ga = False


class TokenLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = causal_loss(outputs.logits, labels, reduction="sum") / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def loss_function(outputs, labels, num_items_in_batch=None):
    return causal_loss(outputs.logits, labels, reduction="sum") / num_items_in_batch


TRAINERS = {"custom-loss": MeanLoss, "custom-loss-declared": DeclaredMeanLoss, "custom-loss-tokens": TokenLoss}
MODELS = {"kwargs-ignored": TakesKwargs, "no-kwargs": NoKwargs}
VARIANTS = ("plain", "gpt2", "per-device-tokens", "loss-function", *TRAINERS, *MODELS)


def build_model(variant):
    if variant in MODELS:
        return MODELS[variant]()
    if variant == "gpt2":
        config = GPT2Config(
            vocab_size=toy.VOCABULARY, n_positions=toy.LONGEST, n_embd=toy.WIDTH, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    config = LlamaConfig(
        vocab_size=toy.VOCABULARY, hidden_size=toy.WIDTH, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=toy.LONGEST,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--variant", choices=VARIANTS, default="plain")
    parser.add_argument("--max-grad-norm", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=options.accumulate,
            average_tokens_across_devices=options.variant != "per-device-tokens",
            max_grad_norm=options.max_grad_norm,
            optim="sgd",
            learning_rate=0.05,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = TRAINERS.get(options.variant, Trainer)(
            model=build_model(options.variant),
            args=arguments,
            train_dataset=toy.examples(),
            data_collator=toy.collate,
            compute_loss_func=loss_function if options.variant == "loss-function" else None,
        )
        trainer.train()
        if trainer.is_world_process_zero():
            for row in trainer.state.log_history:
                if "loss" in row:
                    print("loss", row["loss"])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
