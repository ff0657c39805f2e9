"""A transformers model in one's own loop, updated exactly. Run alone, or: torchrun --nproc-per-node 2 FILE.

The model is a tiny one with random weights, so that this runs anywhere without a download; for a real one write
`AutoModelForCausalLM.from_pretrained("...")` and `AutoTokenizer.from_pretrained("...")`.
"""

import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from isostep import Updater, causal_lm, groups

TEXTS = [
    ("Add two numbers.", "def add(a, b):\n    return a + b\n"),
    ("Greet.", "def greet(name):\n    return f'Hello, {name}. It is good to see you here.'\n"),
    ("Do nothing.", "pass\n"),
    ("Say whether a number is even.", "def even(n):\n    return n % 2 == 0\n"),
    ("The larger of two.", "def larger(a, b):\n    return a if a > b else b\n"),
] * 8


class Instructions(torch.utils.data.Dataset):
    """Prompt and completion as byte tokens; only the completion is supervised."""

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        prompt, completion = (list(text.encode()) for text in TEXTS[i])
        ids = torch.tensor(prompt + completion)
        labels = torch.tensor([-100] * len(prompt) + completion)
        return {"id": torch.tensor(i), "input_ids": ids, "labels": labels}


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)

    updater = Updater(model, optimizer, causal_lm, clip_norm=1.0, scheduler=scheduler)
    for group in groups(Instructions(), examples_per_update=16, examples_per_microbatch=4, epochs=8):
        result = updater.update(group)
        if updater.replica == 0 and group.index == 0:
            tokens = result.counts.supervised_tokens
            print(f"epoch {group.epoch}  loss {result.loss:.6f}  over {tokens} supervised tokens")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
