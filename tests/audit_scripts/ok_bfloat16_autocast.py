"""Parameters in float32, computation in bfloat16, 2 microbatches per update."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 16
ACCUMULATE = 2


def main(argv=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        for _ in range(ACCUMULATE):
            tokens = torch.randint(VOCAB, (2, 9))
            with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / ACCUMULATE).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
