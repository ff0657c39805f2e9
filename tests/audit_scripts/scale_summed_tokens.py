"""The loss is a sum over tokens, and the number of tokens is used for the printed metric only.

The 4 microbatches of an update have 3, 1, 7 and 5 targets: each weighs 1 instead of 1/16, and the gradient grows with
the number of targets (torchtitan 2972).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 16
TARGETS = (3, 1, 7, 5)


def batches(num_updates):
    for _ in range(num_updates):
        group = []
        for count in TARGETS:
            tokens = torch.randint(VOCAB, (2, 5))
            labels = torch.randint(VOCAB, (10,))
            labels[count:] = -100
            group.append((tokens, labels.view(2, 5)))
        yield group


def cross_entropy_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=-100)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 12), nn.GELU(), nn.Linear(12, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    for step, group in enumerate(batches(4)):
        optimizer.zero_grad()
        num_tokens = sum(int((labels != -100).sum()) for _, labels in group)
        loss_sum = 0.0
        for tokens, labels in group:
            loss = cross_entropy_loss(model(tokens), labels)
            if args.mended:
                (loss / num_tokens).backward()
            else:
                loss.backward()
            loss_sum += loss.item()
        optimizer.step()
        print(f"step {step} loss {loss_sum / num_tokens:.4f}")


if __name__ == "__main__":
    main()
