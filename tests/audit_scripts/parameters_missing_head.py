"""A reward head on top of an encoder: both get gradients, but the optimizer was given the encoder only."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 16


class Encoder(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.mix = nn.Linear(width, width)

    def forward(self, tokens):
        return torch.tanh(self.mix(self.embed(tokens))).mean(1)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    data = TensorDataset(torch.randint(VOCAB, (24, 6)), torch.randn(24))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    encoder, head = Encoder(), nn.Linear(8, 1)
    parameters = list(encoder.parameters())
    if args.mended:
        parameters += head.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    for tokens, rewards in loader:
        optimizer.zero_grad()
        head.zero_grad()
        loss = F.mse_loss(head(encoder(tokens)).squeeze(-1), rewards)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
