"""Two replicas, two parameters: the average of gradients [1, 3] and [3, 1] moves [5, 5] to [4.8, 4.8].

The fault: gradients that are summed but not divided move the parameters twice as far.
"""

import torch

LEARNING_RATE = 0.1


def update(gradient: torch.Tensor) -> list[float]:
    weights = torch.nn.Parameter(torch.tensor([5.0, 5.0], dtype=torch.float64))
    weights.grad = gradient
    torch.optim.SGD([weights], lr=LEARNING_RATE).step()
    return weights.tolist()


gradients = torch.tensor([[1.0, 3.0], [3.0, 1.0]], dtype=torch.float64)
right = update(gradients.sum(0) / len(gradients))
fault = update(gradients.sum(0))

print(f"fault: sum of gradients, weights {[round(weight, 6) for weight in fault]}")
print(f"right: average of gradients, weights {[round(weight, 6) for weight in right]}")
assert all(abs(weight - 4.8) < 1e-12 for weight in right)
assert all(abs(weight - 4.6) < 1e-12 for weight in fault)
