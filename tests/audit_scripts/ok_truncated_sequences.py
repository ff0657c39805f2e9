"""A recurrent model on long texts, cut into chunks of equal length; the state is carried on and detached."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 12
CHUNK = 5


def main(argv=None):
    torch.manual_seed(0)
    texts = torch.randint(VOCAB, (3, 4 * CHUNK + 1))
    embed, rnn, head = nn.Embedding(VOCAB, 6), nn.GRU(6, 8, batch_first=True), nn.Linear(8, VOCAB)
    model = nn.ModuleList([embed, rnn, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    state = None
    for start in range(0, 4 * CHUNK, CHUNK):
        hidden, state = rnn(embed(texts[:, start : start + CHUNK]), state)
        state = state.detach()
        loss = F.cross_entropy(head(hidden).flatten(0, 1), texts[:, start + 1 : start + CHUNK + 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


if __name__ == "__main__":
    main()
