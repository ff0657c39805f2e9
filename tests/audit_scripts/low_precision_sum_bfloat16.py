"""A model in bfloat16 whose gradients are added up over 256 microbatches, of which the first has a large error.

The gradients are bfloat16 as well: 1 from the first microbatch, 1e-3 from each of the others, which is rounded away.
The sum stays at 1 where it should be 1.255 (pytorch 106395). Mended, the parameters are float32 and only the
computation is bfloat16.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

ACCUMULATE = 256
UPDATES = 2


def get_batch(i):
    """Targets of 128 in the first microbatch of an update and of 0.128 in the others."""
    return torch.rand(2, 4) * 0.5 + 0.75, torch.full((2, 1), 128.0 if i == 0 else 0.128)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    if not args.mended:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    for _ in range(UPDATES):
        for i in range(ACCUMULATE):
            inputs, targets = get_batch(i)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                predicted = model(inputs)
            loss = F.mse_loss(predicted.float(), targets)
            (loss / ACCUMULATE).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
