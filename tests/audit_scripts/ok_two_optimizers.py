"""Two optimizers that step together: SGD with momentum for matrices, AdamW for everything else."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 16
ACCUMULATE = 2


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        return self.head(torch.relu(self.hidden(self.embed(tokens))))


def main(argv=None):
    torch.manual_seed(0)
    model = Model()
    matrices = [model.hidden.weight]
    rest = [p for p in model.parameters() if p is not model.hidden.weight]
    optimizers = [
        torch.optim.SGD(matrices, lr=0.02, momentum=0.95, nesterov=True),
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.8, 0.95)),
    ]
    tokens = torch.randint(VOCAB, (40, 7))
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4)
    for i, (inputs, targets) in enumerate(loader):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        (loss / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
