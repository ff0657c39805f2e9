"""Four microbatches forward through three pipeline stages take 6 ticks, in which the stages are busy 2/3.

A stage works on microbatch i one tick after the stage before it did. The result is that of the whole model.
The fault: one microbatch at a time. Each tick then keeps a single stage busy: 12 ticks, busy 1/3.
"""

import torch

STAGES, NUM_MICROBATCHES = 3, 4

torch.manual_seed(0)
stages = [torch.nn.Linear(4, 4) for _ in range(STAGES)]
microbatches = [torch.randn(2, 4) for _ in range(NUM_MICROBATCHES)]


def run(start_every: int) -> tuple[list[list[str]], list[torch.Tensor]]:
    """The table of ticks, [stage][tick], and the outputs; a microbatch enters every `start_every` ticks."""
    ticks = start_every * (NUM_MICROBATCHES - 1) + STAGES
    table = [["."] * ticks for _ in range(STAGES)]
    outputs = list(microbatches)
    for tick in range(ticks):
        for index in range(NUM_MICROBATCHES):
            stage = tick - start_every * index
            if 0 <= stage < STAGES:
                outputs[index] = stages[stage](outputs[index])
                table[stage][tick] = str(index)
    return table, outputs


def busy(table: list[list[str]]) -> float:
    cells = [cell for row in table for cell in row]
    return sum(cell != "." for cell in cells) / len(cells)


fault, _ = run(start_every=STAGES)
right, outputs = run(start_every=1)
for name, table in (("fault", fault), ("right", right)):
    print(f"{name}: {len(table[0])} ticks, busy {busy(table):.3f}")
    print("\n".join(f"  stage {stage}  {' '.join(row)}" for stage, row in enumerate(table)))

assert len(right[0]) == 6
assert abs(busy(right) - 2 / 3) < 1e-12
assert len(fault[0]) == 12
for microbatch, output in zip(microbatches, outputs, strict=True):
    torch.testing.assert_close(output, torch.nn.Sequential(*stages)(microbatch), rtol=0, atol=0)
