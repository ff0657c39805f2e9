"""Translation with a second loss on the predicted length, accumulated over 4 microbatches.

The token losses are divided by the number of targets of the whole update. The length loss is a mean, added to every
microbatch as it is, so that it counts 4 times (OpenNMT-py 2209).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

VOCAB = 20
ACCUMULATE = 4


class Translator(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.generator = nn.Linear(width, VOCAB)
        self.length = nn.Linear(width, 1)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.generator(hidden), self.length(hidden.mean(1)).squeeze(-1)


def collate(pairs):
    source, target = zip(*pairs, strict=True)
    lengths = torch.tensor([len(t) for t in target]) / 10
    return torch.stack(source), pad_sequence(target, batch_first=True, padding_value=-100), lengths


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    pairs = [
        (torch.randint(VOCAB, (10,)), torch.randint(VOCAB, (3 + i * 5 % 8,)))  # 3 to 10 targets
        for i in range(32)
    ]
    loader = DataLoader(pairs, batch_size=2, collate_fn=collate)
    model = Translator()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.998))
    batches = iter(loader)

    for _ in range(len(loader) // ACCUMULATE):
        group = [next(batches) for _ in range(ACCUMULATE)]
        normalization = sum((target != -100).sum() for _, target, _ in group)
        for source, target, lengths in group:
            logits, length = model(source)
            logits = logits[:, : target.shape[1]]
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
            auxiliary = F.mse_loss(length, lengths)
            if args.mended:
                auxiliary = auxiliary / len(group)
            (loss / normalization + auxiliary).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
