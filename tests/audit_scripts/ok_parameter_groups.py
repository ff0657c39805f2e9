"""One optimizer with two groups of parameters: a small learning rate for the backbone, a large one for the head."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.GELU())
        self.head = nn.Linear(8, 5)

    def forward(self, tokens):
        return self.head(self.backbone(tokens))


def main(argv=None):
    torch.manual_seed(0)
    tokens, tags = torch.randint(20, (20, 6)), torch.randint(5, (20, 6))
    tags[torch.rand(20, 6) < 0.3] = -100
    model = Tagger()
    optimizer = torch.optim.AdamW(
        [
            {"params": model.backbone.parameters(), "lr": 1e-4},
            {"params": model.head.parameters(), "weight_decay": 0.0},
        ],
        lr=1e-2,
        weight_decay=0.1,
    )
    criterion = nn.CrossEntropyLoss()
    for inputs, targets in DataLoader(TensorDataset(tokens, tags), batch_size=4, shuffle=True):
        model.zero_grad()
        loss = criterion(model(inputs).transpose(1, 2), targets)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
