"""Two examples per microbatch, 8 microbatches per replica, 2 replicas: 32 examples per update, 16 a replica.

Each replica has 2 pipeline stages here, so there are 4 ranks.
The fault: ranks are counted as replicas. The batch seems to be 64, and a gradient divided by 64 is half.
"""

import torch

EXAMPLES_PER_MICROBATCH, MICROBATCHES_PER_REPLICA, REPLICAS, STAGES = 2, 8, 2, 2

w = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
examples_of_replica = [0] * REPLICAS
for replica in range(REPLICAS):
    for _ in range(MICROBATCHES_PER_REPLICA):
        targets = torch.zeros(EXAMPLES_PER_MICROBATCH, dtype=torch.float64)
        ((w - targets) ** 2 / 2).sum().backward()
        examples_of_replica[replica] += len(targets)

examples_per_update = sum(examples_of_replica)
world_size = REPLICAS * STAGES
believed = EXAMPLES_PER_MICROBATCH * MICROBATCHES_PER_REPLICA * world_size
assert w.grad is not None
right, fault = w.grad.item() / examples_per_update, w.grad.item() / believed

print(f"fault: {world_size} ranks taken for replicas, {believed} examples per update, gradient {fault:.6g}")
print(
    f"right: {REPLICAS} replicas of {examples_of_replica[0]} examples, "
    f"{examples_per_update} examples per update, gradient {right:.6g}"
)
assert examples_of_replica == [16, 16]
assert examples_per_update == 32
assert right == 1.0
assert fault == 0.5
