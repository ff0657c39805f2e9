"""What mends a fault, as lines to paste, in the idiom of the library that the script uses. Imports no torch.

The lines use these names. batches: the microbatches of one update on this rank, the short ones at the end of an epoch
included. loss_sum(model, batch): the script's loss with reduction="sum". loader, i: the loader, and the number of the
microbatch in it. tokens: how many targets the loss sums over the whole update. $A, $D and $factor stand for numbers.
"""

from __future__ import annotations

import re
from string import Template
from textwrap import dedent

from .remedy_around import AROUND
from .remedy_weights import SCALE, WEIGHTS, Lines

LIBRARIES = ("pytorch", "ddp", "accelerate", "transformers", "lightning", "fabric", "trl")

CAUSES = ("A", "1/A", "D", "1/D", "A x D", "1/(A x D)", "N", "constant")
"""What a factor on every weight comes from; N is the number of tokens of the update."""

CLOSE = 1e-3
"""How far, relatively, a factor may be from A or D to be taken for it."""

WORDS = {"Trainer": "SFTTrainer", "TrainingArguments": "SFTConfig"}
"""What trl calls it where transformers' lines serve."""

REMEDIES: dict[str, Lines] = {**WEIGHTS, **AROUND}
"""The lines for each kind but scale, whose lines depend on the cause."""

IDEAS = {
    "mean-of-means": "sum the losses, and divide by the targets of the whole update",
    "mean-of-replicas": "divide by the targets of all ranks; where gradients are averaged, multiply by the ranks",
    "scale": "divide exactly once, by one number",
    "count-mismatch": "count the targets that the loss sums: after the shift, without ignored ones",
    "term-scale": "give each term its own denominator over the whole update",
    "partial-group": "divide by the microbatches that the update has",
    "stale-gradient": "clear the gradients before each update, also after a skipped one and at the end of an epoch",
    "lost-microbatch": "clear the gradients only after the optimizer ran, and let the last group have its update",
    "unsynchronised-replicas": "call the wrapped model, and let the last backward of each update synchronise",
    "duplicate-example": "give every rank its own part of one common order, without padding",
    "uneven-weights": "sum the losses, and divide by the targets of the whole update",
    "scheduler-unit": "step the scheduler once per update, and give its length in updates",
    "skip-advances-scheduler": "step the scheduler only where the optimizer ran",
    "clip-before-unscale": "undo the loss scale first, then clip",
    "clip-per-microbatch": "clip once, after the last microbatch",
    "scaler-disagrees": "let the scaler look at reduced gradients, and share one scale",
    "sync-every-microbatch": "put forward and backward of all but the last microbatch under no_sync",
    "retained-graph": "keep numbers: detach a loss before it is summed or stored",
    "low-precision-sum": "keep the parameters in float32, and let autocast choose what is computed in less",
    "batchnorm": "freeze the statistics, or normalise without a batch",
    "wrong-log": "log the sum of the losses over the targets of the update, over all ranks",
    "no-update": "run the optimizer after backward, on the parameters of the model, at a learning rate above 0",
    "dropout-shared": "seed each rank differently once the model is built",
    "parameters-missing": "give the optimizer the parameters of the whole model, as it is trained",
}
"""What mends each kind, in a sentence."""


def remedy(
    kind: str,
    library: str,
    *,
    accumulate: int | None = None,
    replicas: int | None = None,
    factor: float | None = None,
    cause: str | None = None,
) -> str:
    """The lines that mend a fault of this kind. An unknown library gets those of plain PyTorch.

    Args:
        kind: one of `document.KINDS`; KeyError for any other.
        library: one of `LIBRARIES`.
        accumulate: A, to be written into the lines; "A" where it is unknown.
        replicas: D, likewise.
        factor: what is seen over what is right. Of kind scale, it tells the cause where none is given.
        cause: of kind scale, one of `CAUSES`, or words; those that speak of tokens or a count mean N.
    """
    if kind == "scale":
        if cause not in CAUSES and cause and re.search(r"\b(tokens|count)\b", cause):
            cause = "N"
        causes = (cause,) if cause in CAUSES else causes_of(factor, accumulate, replicas)
        texts = [_of(SCALE[name], library) for name in causes]
    else:
        texts = [_of(REMEDIES[kind], library)]
    numbers = {
        "A": "A" if accumulate is None else accumulate,
        "D": "D" if replicas is None else replicas,
        "factor": "one factor" if factor is None else f"{factor:.4g}",
    }
    return Template("\n# or:\n".join(dict.fromkeys(texts))).substitute(numbers)


def causes_of(factor: float | None, accumulate: int | None, replicas: int | None) -> tuple[str, ...]:
    """The causes that explain a factor; several where A and D are the same number, "constant" where none does."""
    a, d = accumulate or 1, replicas or 1
    sizes = {"A": a, "1/A": 1 / a, "D": d, "1/D": 1 / d}
    if a > 1 and d > 1:
        sizes |= {"A x D": a * d, "1/(A x D)": 1 / (a * d)}
    near = [
        cause for cause, size in sizes.items() if factor is not None and size != 1 and abs(factor / size - 1) <= CLOSE
    ]
    return tuple(near) or ("constant",)


def _of(lines: Lines, library: str) -> str:
    """The lines for a library. Those of transformers serve trl too, those of pytorch all others."""
    if library == "trl" and "trl" not in lines and "transformers" in lines:
        text = re.sub(rf"\b({'|'.join(WORDS)})\b", lambda word: WORDS[word[0]], lines["transformers"])
    else:
        text = lines.get(library, lines["pytorch"])
    return dedent(text).strip("\n")
