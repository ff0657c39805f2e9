"""Transfer learning: the backbone is frozen and the head replaced by one for the new classes.

The optimizer was made before, with the old head, so that the new one is never trained.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 16), nn.ReLU())
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 10), torch.randint(3, (24,)))
    loader = DataLoader(data, batch_size=6, shuffle=True)
    model = Classifier(classes=100)
    model.backbone.requires_grad_(False)
    if args.mended:
        model.head = nn.Linear(16, 3)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if not args.mended:
        model.head = nn.Linear(16, 3)

    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
