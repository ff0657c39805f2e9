"""Three replicas, one example each: all of them make the same update, from the mean of three gradients.

The model is one parameter w = 1, the loss of an example is (w - y)^2 / 2, the targets are 0, 2 and 4.
The fault: without the all-reduce each replica goes its own way.
"""

import torch

LEARNING_RATE = 0.1
TARGETS = [0.0, 2.0, 4.0]


def local_gradient(target: float) -> torch.Tensor:
    w = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    loss = (w - target) ** 2 / 2
    loss.backward()
    assert w.grad is not None
    return w.grad


gradients = torch.stack([local_gradient(target) for target in TARGETS])
alone = 1 - LEARNING_RATE * gradients
common = 1 - LEARNING_RATE * gradients.sum() / len(TARGETS)

print(f"fault: each replica alone reaches w = {[round(w, 6) for w in alone.tolist()]}")
print(f"right: all replicas reach w = {common.item():.6g}")
torch.testing.assert_close(alone, torch.tensor([0.9, 1.1, 1.3], dtype=torch.float64))
torch.testing.assert_close(common, torch.tensor(1.1, dtype=torch.float64))
