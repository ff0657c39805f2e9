"""The scripts, how they are run, and the weight that each gives a token by its library's own arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from measure import SCRIPTS, Examples

RECORD = Path(__file__).parent / "record.py"
SECONDS = 80


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of one update, as the rules below need it."""

    tokens: int
    of_update: int
    """Tokens of the update, over all ranks."""
    of_rank: int
    first_labels: int
    """Supervised labels at position 0 in the whole update: they have no prediction, and some counts include them."""
    microbatches: int
    """Of this rank in this update."""
    accumulate: int
    replicas: int


Rule = Callable[[Microbatch], float]

RULES: dict[str, Rule] = {
    "tokens of the update": lambda m: 1 / m.of_update,
    "labels of the update": lambda m: 1 / (m.of_update + m.first_labels),
    "tokens of the update, averaged over replicas": lambda m: 1 / (m.of_update * m.replicas),
    "tokens of the replica": lambda m: 1 / (m.of_rank * m.replicas),
    "mean of all microbatches": lambda m: 1 / (m.tokens * m.microbatches * m.replicas),
    "mean of A microbatches": lambda m: 1 / (m.tokens * m.accumulate * m.replicas),
    "sum of the replica's means": lambda m: 1 / (m.tokens * m.replicas),
    "sum of all means": lambda m: 1 / m.tokens,
}


@dataclass(frozen=True)
class Recipe:
    """One way to call one script."""

    name: str
    package: str
    script: str
    rule: str
    arguments: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    """What its build_model takes."""
    layouts: tuple[tuple[int, int], ...] = ((4, 1), (4, 2), (1, 1), (1, 2))
    """A and D."""
    fused: bool = False
    """The loss is computed by a kernel of the library's own, and may not be observed."""


def _trainer(variant: str, rule: str, *layouts: tuple[int, int]) -> Recipe:
    return Recipe(
        f"Trainer, {variant}", "transformers", "transformers_trainer", rule, ("--variant", variant), (variant,), layouts
    )  # fmt: skip


BOTH = ((4, 1), (4, 2))
RECIPES = (
    _trainer("plain", "tokens of the update", *BOTH, (1, 1), (1, 2)),
    _trainer("gpt2", "labels of the update", *BOTH),
    _trainer("per-device-tokens", "tokens of the replica", (4, 2)),
    _trainer("loss-function", "tokens of the update", (4, 2)),
    _trainer("custom-loss", "sum of the replica's means", *BOTH),
    _trainer("custom-loss-declared", "mean of all microbatches", (4, 2)),
    _trainer("custom-loss-tokens", "tokens of the update, averaged over replicas", *BOTH),
    _trainer("kwargs-ignored", "sum of all means", *BOTH),
    _trainer("no-kwargs", "mean of all microbatches", *BOTH),
    Recipe(
        "Trainer, clipped", "transformers", "transformers_trainer", "tokens of the update", ("--max-grad-norm", "1.0"),
        ("plain",), BOTH,
    ),
    Recipe("accumulate()", "accelerate", "accelerate_basic", "mean of A microbatches"),
    Recipe("counted tokens", "accelerate", "accelerate_exact", "tokens of the update"),
    Recipe(
        "counted labels", "accelerate", "accelerate_exact", "labels of the update", ("--count", "all"), layouts=BOTH
    ),
    Recipe("accumulate_grad_batches", "lightning", "lightning_module", "mean of A microbatches"),
    Recipe("Fabric, loop as printed", "lightning", "fabric_loop", "sum of the replica's means"),
    Recipe(
        "Fabric, loss / A", "lightning", "fabric_loop", "mean of A microbatches", ("--group", "counted"), layouts=BOTH
    ),
    Recipe("SFTTrainer", "trl", "trl_sft", "tokens of the update", fused=True),
    Recipe("fully_shard, loss / A", "torch", "fsdp2", "mean of A microbatches", layouts=((4, 2), (1, 2))),
    Recipe("fully_shard, by token", "torch", "fsdp2", "tokens of the update", ("--by", "token"), layouts=((4, 2),)),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    accumulate: int
    replicas: int

    @property
    def name(self) -> str:
        return f"{self.recipe.script}-{self.recipe.name}-A{self.accumulate}-D{self.replicas}".replace(" ", "_")

    @property
    def command(self) -> list[str]:
        """The script and its arguments."""
        script = str(SCRIPTS / f"{self.recipe.script}.py")
        return [script, "--accumulate", str(self.accumulate), *self.recipe.arguments]

    @property
    def launcher(self) -> list[str]:
        if self.replicas == 1:
            return [sys.executable]
        return [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.replicas),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1",
        ]  # fmt: skip

    def expected(self, update: dict[str, Any]) -> list[float]:
        """By the rule, for each microbatch of a measured update."""
        weights = update["weights"]
        examples = _examples()
        first = sum(examples.rows[i]["labels"][0] != -100 for entry in weights for i in entry["examples"])
        found = []
        for entry in weights:
            ours = [other for other in weights if other["rank"] == entry["rank"]]
            microbatch = Microbatch(
                entry["tokens"], update["tokens"], sum(other["tokens"] for other in ours), first, len(ours),
                self.accumulate, self.replicas,
            )  # fmt: skip
            found.append(RULES[self.recipe.rule](microbatch))
        return found


CASES = tuple(Case(recipe, *layout) for recipe in RECIPES for layout in recipe.layouts)


@cache
def _examples() -> Examples:
    return Examples()


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The finished command. One thread, no network, nothing left over from a launcher."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(
        list(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder
    ) as process:
        try:
            output, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher then ends its workers
            try:
                output, errors = process.communicate(timeout=20)
            finally:
                process.kill()
            raise AssertionError(f"not done in {SECONDS} s: {output[-2000:]}{errors[-2000:]}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def losses(output: str) -> list[float]:
    """What a script printed."""
    return [float(line.split()[1]) for line in output.splitlines() if line.startswith("loss ")]
