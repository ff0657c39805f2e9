"""A small group that is hard on purpose: unequal lengths and counts, examples without any target, two terms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..grouping import GroupPlan
from ..models.decoder import Decoder, DecoderConfig
from ..objective import Batch, Outputs, Term, causal_lm, logits_of

VOCAB_SIZE = 61
LONGEST = 24
WIDTH = 16
DEPTH = 2
COEFFICIENT = 0.01
CLIP_NORM = 0.05
NUM_WITHOUT_TARGETS = 4


def build_model(dtype: torch.dtype, chunks: int = 1, tied: bool = False) -> Decoder:
    """The decoder that is updated: the same weights in every process.

    chunks: that it can be cut into, an embedding and a head being layers too. tied: the head is the embedding's matrix.
    """
    depth = max(DEPTH, chunks - 2)
    config = DecoderConfig(VOCAB_SIZE, LONGEST, WIDTH, depth, heads=2, tie_embeddings=tied)
    return Decoder(config, seed=7).to(dtype)


def smallest_gradient(dtype: torch.dtype) -> int:
    """Bytes of the embedding's gradient. No rank, whatever it holds of the model, reduces fewer at once."""
    return VOCAB_SIZE * WIDTH * dtype.itemsize


def build_examples(num_examples: int, seed: int) -> list[dict[str, Tensor]]:
    """Random token ids with labels. The first examples in the order of epoch 0 have no target at all, so that
    microbatches and whole replicas exist that have none.
    """
    generator = torch.Generator().manual_seed(seed)
    order = GroupPlan(num_examples=num_examples, examples_per_update=1, examples_per_microbatch=1, seed=seed)
    untargeted = set(order.ids_of(0, 0, min(NUM_WITHOUT_TARGETS, num_examples - 1)))
    examples = []
    for i in range(num_examples):
        length = int(torch.randint(3, LONGEST + 1, (), generator=generator))
        ids = torch.randint(VOCAB_SIZE, (length,), generator=generator)
        labels = ids.clone()
        masked = int(torch.randint(length - 1, (), generator=generator))
        labels[: length if i in untargeted else masked] = -100
        examples.append({"id": torch.tensor(i), "input_ids": ids, "labels": labels})
    return examples


def squared_log_partition(coefficient: float) -> Term:
    """Mean over all real tokens of (log sum exp logits)^2: a second term with a denominator of its own.

    The z-loss of PaLM (Chowdhery et al. 2022, section 5).
    """

    def loss_sum(outputs: Outputs, batch: Batch) -> Tensor:
        return (logits_of(outputs).logsumexp(-1).square() * batch["attention_mask"]).sum()

    return Term("squared_log_partition", loss_sum, lambda batch: batch["attention_mask"].sum(), coefficient)


def objective() -> Sequence[Term]:
    return (causal_lm, squared_log_partition(COEFFICIENT))
