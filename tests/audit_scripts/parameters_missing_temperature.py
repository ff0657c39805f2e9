"""Matching images and captions: the loss is a module with a temperature that can be learned.

The temperature gets gradients and no optimizer holds it, so it stays where it began.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TwoTowers(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.image = nn.Linear(12, width)
        self.caption = nn.Linear(9, width)

    def forward(self, images, captions):
        return F.normalize(self.image(images), dim=-1), F.normalize(self.caption(captions), dim=-1)


class ContrastiveLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, images, captions):
        logits = self.log_scale.exp() * images @ captions.T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(32, 12), torch.randn(32, 9)), batch_size=8, shuffle=True)
    model, criterion = TwoTowers(), ContrastiveLoss()
    groups = [{"params": model.parameters(), "weight_decay": 0.01}]
    if args.mended:
        groups.append({"params": criterion.parameters(), "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=1e-3)

    for images, captions in loader:
        model.zero_grad()
        criterion.zero_grad()
        criterion(*model(images, captions)).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
