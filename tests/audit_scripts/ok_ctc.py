"""Connectionist temporal classification, one batch per update."""

import torch
import torch.nn.functional as F
from torch import nn

FRAMES = 12
PHONES = 6


def main(argv=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, PHONES))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(4):
        frames = torch.randn(3, FRAMES, 4)
        targets = torch.randint(1, PHONES, (3, 5))
        log_probs = model(frames).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(log_probs, targets, torch.tensor([12, 12, 10]), torch.tensor([5, 3, 4]), zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
