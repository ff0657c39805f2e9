"""A gradient scaler over 4 equal microbatches per update, without clipping."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 4


def main(argv=None):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(5, (64,)))
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for i, (inputs, classes) in enumerate(DataLoader(data, batch_size=4, shuffle=True)):
        loss = criterion(model(inputs), classes) / ACCUMULATE
        scaler.scale(loss).backward()
        if (i + 1) % ACCUMULATE == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
