"""Policy training where one of the 4 microbatches of an update is fully masked, and all 4 are counted.

Its masked mean is 0, so the other three are divided by 4 and weigh 3/4 of what they should (NeMo-RL 212).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 16
ACCUMULATE = 4


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum().clamp(min=1)


def rollouts(generator, valid):
    """Tokens, next tokens and a mask over 2 answers of 6 tokens, the prompt of 2 being masked."""
    tokens = torch.randint(VOCAB, (2, 9), generator=generator)
    mask = torch.zeros(2, 8)
    if valid:
        mask[:, 2:] = 1
    return tokens[:, :-1], tokens[:, 1:], mask


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(8)
    policy = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)

    for update in range(4):
        group = [rollouts(generator, valid=i != update) for i in range(ACCUMULATE)]
        total = sum(mask.sum() for _, _, mask in group)
        optimizer.zero_grad()
        for tokens, actions, mask in group:
            losses = F.cross_entropy(policy(tokens).transpose(1, 2), actions, reduction="none")
            share = mask.sum() / total if args.mended else 1 / ACCUMULATE
            (masked_mean(losses, mask) * share).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
