"""A gradient scaler, with gradients unscaled before they are clipped."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 16


def main(argv=None):
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (20, 9))
    loader = DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    for step, (batch,) in enumerate(loader):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}  loss {loss.item():.4f}  norm {norm.item():.4f}")


if __name__ == "__main__":
    main()
