"""Models of transformers through the engine, against the torch-only reference; and the README's example."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, PretrainedConfig, Qwen3Config

from isostep import Updater, groups
from isostep.verification.problem import COEFFICIENT, build_examples, objective
from isostep.verification.reference import gradient_error, mean_of_means, reference_update

EXAMPLE = Path(__file__).parents[1] / "examples" / "transformers_loop.py"
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    "gpt2": GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "mixtral": MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4),
}


class Logits(nn.Module):
    """The same model as the reference calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_family_has_the_reference_gradient(family: str) -> None:
    torch.manual_seed(0)
    experts = {"experts_implementation": "eager"} if family == "mixtral" else {}
    model = AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="sdpa", **experts).double().train()
    examples = build_examples(13, 0)
    reference = reference_update(Logits(model), examples, COEFFICIENT, 1e9)
    control = mean_of_means(Logits(model), examples, COEFFICIENT, 1e9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients: dict[str, Tensor] = {}
    optimizer.register_step_pre_hook(
        lambda *_: gradients.update({f"model.{n}": p.grad.clone() for n, p in model.named_parameters()})
    )
    updater = Updater(model, optimizer, objective())
    for examples_per_microbatch in (1, 3, 13):
        for group in groups(examples, examples_per_update=13, examples_per_microbatch=examples_per_microbatch):
            updater.update(group)
        assert gradient_error(gradients, reference.gradients)[0] <= 1e-12
    assert gradient_error(control, reference.gradients)[0] > 1e-9


def _losses(*launcher: str) -> list[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(EXAMPLE)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=True)
    return [line for line in finished.stdout.splitlines() if line.startswith("epoch")]


@pytest.mark.grid
def test_readme_example_alone_and_on_two_workers() -> None:
    alone = _losses()
    assert len(alone) == 8
    first, last = (float(line.split()[3]) for line in (alone[0], alone[-1]))
    assert last < first - 1
    both = _losses("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-endpoint", "127.0.0.1:0",
                   "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1")  # fmt: skip
    assert [line.split()[4:] for line in both] == [line.split()[4:] for line in alone]  # tokens of each update
    assert both[0] == alone[0]  # loss before the first update, to six digits
