"""A generator and a discriminator, with an optimizer each, in turn."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LATENT = 3


def main(argv=None):
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(40, 4) + 1), batch_size=8, shuffle=True)
    generator = nn.Sequential(nn.Linear(LATENT, 8), nn.ReLU(), nn.Linear(8, 4))
    discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))

    for (real,) in loader:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(torch.randn(len(real), LATENT))

        discriminator.zero_grad()
        loss_real = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        loss_fake = F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
        (loss_real + loss_fake).backward()
        discriminator_optimizer.step()

        generator.zero_grad()
        F.binary_cross_entropy_with_logits(discriminator(fake), ones).backward()
        generator_optimizer.step()


if __name__ == "__main__":
    main()
