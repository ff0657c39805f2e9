"""A causal language model, whose loss shifts the labels by one while the targets are counted before the shift.

The first token of every text is counted and has no loss: per update the sum over 28 targets is divided by 32
(ms-swift 9167).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

VOCAB = 24
LENGTHS = (6, 9, 12, 5)
ACCUMULATE = 2


def collate(texts):
    return {
        "input_ids": pad_sequence(texts, batch_first=True),
        "labels": pad_sequence(texts, batch_first=True, padding_value=-100),
    }


def causal_lm_loss(logits, labels, num_items):
    shifted = labels[:, 1:].flatten()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), shifted, ignore_index=-100, reduction="sum")
    return loss / num_items


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    texts = [torch.randint(VOCAB, (length,)) for length in LENGTHS * 4]
    loader = DataLoader(texts, batch_size=2, collate_fn=collate)
    batches = iter(loader)

    for _ in range(len(loader) // ACCUMULATE):
        group = [next(batches) for _ in range(ACCUMULATE)]
        if args.mended:
            num_items = sum((batch["labels"][:, 1:] != -100).sum() for batch in group)
        else:
            num_items = sum((batch["labels"] != -100).sum() for batch in group)
        for batch in group:
            causal_lm_loss(model(batch["input_ids"]), batch["labels"], num_items).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
