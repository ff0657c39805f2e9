"""The optimizer is made, and then the model is replaced by the one of a checkpoint.

The optimizer holds the parameters of the first model, which get no gradients: nothing is ever trained.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 16


def restore(model, state):
    """A model like this one, with the parameters of a checkpoint."""
    restored = copy.deepcopy(model)
    restored.load_state_dict(state)
    return restored


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (20, 7))
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    state = {name: value + 0.01 for name, value in model.state_dict().items()}

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = restore(model, state)
    if args.mended:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
