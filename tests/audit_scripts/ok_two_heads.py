"""Two tasks with a head each, in one batch; the second task has labels for some of the examples only."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 12), nn.ReLU())
        self.topic = nn.Linear(12, 5)
        self.language = nn.Linear(12, 3)

    def forward(self, x):
        hidden = self.trunk(x)
        return self.topic(hidden), self.language(hidden)


def main(argv=None):
    torch.manual_seed(0)
    languages = torch.randint(3, (40,))
    languages[torch.rand(40) < 0.4] = -100
    data = TensorDataset(torch.randn(40, 8), torch.randint(5, (40,)), languages)
    model = TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, topics, spoken in DataLoader(data, batch_size=10):
        topic, language = model(x)
        loss = F.cross_entropy(topic, topics) + F.cross_entropy(language, spoken)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
