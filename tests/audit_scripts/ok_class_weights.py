"""Classes with weights over 3 microbatches: the weighted sum, divided by the weights of all targets."""

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 4
ACCUMULATE = 3


def main(argv=None):
    torch.manual_seed(0)
    weight = torch.tensor([0.5, 1.0, 2.0, 4.0])
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(4):
        group = [(torch.randn(5, 6), torch.randint(CLASSES, (5,))) for _ in range(ACCUMULATE)]
        weight_of_all = sum(weight[classes].sum() for _, classes in group)
        for inputs, classes in group:
            loss = F.cross_entropy(model(inputs), classes, weight=weight, reduction="sum") / weight_of_all
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
