"""A student learns labels and the distribution of a teacher, over 2 equal microbatches."""

import torch
import torch.nn.functional as F
from torch import nn

ACCUMULATE = 2
TEMPERATURE = 2.0


def main(argv=None):
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)).eval()
    student = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    for _ in range(4):
        for _ in range(ACCUMULATE):
            x, y = torch.randn(6, 8), torch.randint(5, (6,))
            with torch.no_grad():
                soft = F.softmax(teacher(x) / TEMPERATURE, dim=1)
            logits = student(x)
            distill = F.kl_div(F.log_softmax(logits / TEMPERATURE, dim=1), soft, reduction="batchmean")
            loss = 0.3 * F.cross_entropy(logits, y) + 0.7 * TEMPERATURE**2 * distill
            (loss / ACCUMULATE).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
