"""Fine-tuning on conversations, accumulated over a short and a long one.

The mean over each microbatch's own targets is divided by the number of microbatches, so the 10 targets of the short
conversation weigh ten times as much as the 100 of the long one (transformers 24725).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCAB = 32
PROMPT = 6
ACCUMULATE = 2


class Conversations(Dataset):
    """Pairs of a short and a long answer, after a prompt that is masked."""

    def __init__(self, num_pairs):
        generator = torch.Generator().manual_seed(1)
        self.texts = [
            torch.randint(VOCAB, (PROMPT + answer + 1,), generator=generator) for answer in [10, 100] * num_pairs
        ]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        labels = self.texts[i][1:].clone()
        labels[:PROMPT] = -100
        return self.texts[i][:-1], labels


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Conversations(4), batch_size=1)
    batches = iter(loader)

    for _ in range(len(loader) // ACCUMULATE):
        group = [next(batches) for _ in range(ACCUMULATE)]
        targets = sum((labels != -100).sum() for _, labels in group)
        for tokens, labels in group:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
            share = (labels != -100).sum() / targets if args.mended else 1 / ACCUMULATE
            (loss * share).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
