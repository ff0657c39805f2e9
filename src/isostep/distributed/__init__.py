"""Everything that touches torch.distributed, and nothing else in the package does."""
