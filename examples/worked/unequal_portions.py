"""Three replicas with 1, 1 and 4 examples: sums over a common count are right, the mean of means is not.

The model is one parameter w = 1, the loss of an example is (w - y)^2 / 2, the learning rate is 0.1.
The fault: each replica takes its own mean, and the means are averaged, as data parallel libraries do.
"""

import torch

LEARNING_RATE = 0.1
PORTIONS = [[0.0], [2.0], [4.0, 4.0, 4.0, 4.0]]


def gradient(divisors: list[int]) -> float:
    """Gradient of w when each replica divides its sum of losses by its divisor, summed over replicas."""
    w = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    for targets, divisor in zip(PORTIONS, divisors, strict=True):
        losses = (w - torch.tensor(targets, dtype=torch.float64)) ** 2 / 2
        (losses.sum() / divisor).backward()
    assert w.grad is not None
    return w.grad.item()


examples = sum(len(targets) for targets in PORTIONS)
right = gradient([examples] * len(PORTIONS))
fault = gradient([len(PORTIONS) * len(targets) for targets in PORTIONS])

print(f"fault: mean of replica means, gradient {fault:.6g}, w = {1 - LEARNING_RATE * fault:.6g}")
print(f"right: sums / {examples} examples, gradient {right:.6g}, w = {1 - LEARNING_RATE * right:.6g}")
assert abs(right - -2) < 1e-12
assert abs(fault - -1) < 1e-12
assert abs((1 - LEARNING_RATE * right) - 1.2) < 1e-12
