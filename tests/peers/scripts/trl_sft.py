"""trl.SFTTrainer on tokens and a completion mask."""

from __future__ import annotations

import argparse
import tempfile

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import toy


def build_model():
    config = LlamaConfig(
        vocab_size=toy.VOCABULARY, hidden_size=toy.WIDTH, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=toy.LONGEST,
        pad_token_id=toy.PADDING, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def build_tokenizer():
    words = WordLevel({f"w{i}": i for i in range(toy.VOCABULARY)}, unk_token="w2")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="w0", eos_token="w1", unk_token="w2")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    disable_progress_bars()
    rows = [
        {"input_ids": row["input_ids"], "completion_mask": [int(label != -100) for label in row["labels"]]}
        for row in toy.examples()
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=options.accumulate,
            completion_only_loss=True,
            max_grad_norm=0.0,
            optim="sgd",
            learning_rate=0.05,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        )
        trainer = SFTTrainer(
            model=build_model(),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=build_tokenizer(),
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
