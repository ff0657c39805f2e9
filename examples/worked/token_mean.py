"""Two microbatches, 512 tokens at mean loss 2 and 1536 at mean loss 4: the loss of the update is 3.5, not 3.

The fault: every microbatch takes its own mean, which is then divided by the number of microbatches. A token
of the short microbatch counts three times as much as a token of the long one.
"""

import torch

MICROBATCHES = [torch.full((512,), 2.0), torch.full((1536,), 4.0)]


def accumulate(mean_of_means: bool) -> tuple[float, list[float]]:
    """The loss, and how many tokens one token of each microbatch stands for: 1 / its weight."""
    tokens = sum(len(losses) for losses in MICROBATCHES)
    total, stands_for = 0.0, []
    for losses in MICROBATCHES:
        losses = losses.double().requires_grad_()
        loss = losses.mean() / len(MICROBATCHES) if mean_of_means else losses.sum() / tokens
        loss.backward()
        assert losses.grad is not None
        total += loss.item()
        stands_for.append(1 / losses.grad[0].item())
    return total, stands_for


fault, (short, long) = accumulate(mean_of_means=True)
print(f"fault: mean of means, loss {fault:.6g}, token weights 1/{short:.0f} and 1/{long:.0f}")
assert abs(fault - 3) < 1e-12
assert abs(long / short - 3) < 1e-12

right, (short, long) = accumulate(mean_of_means=False)
print(f"right: sums / tokens, loss {right:.6g}, token weights 1/{short:.0f} and 1/{long:.0f}")
assert abs(right - 3.5) < 1e-12
assert short == long == 2048
