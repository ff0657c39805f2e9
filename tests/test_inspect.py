"""`inspect`: every kind of finding and its contrary, the facts behind them, the text, and the command."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MinMaxObserver, disable_observer
from torch.nn.utils import parametrizations, spectral_norm

from isostep.cli import main
from isostep.errors import InputError
from isostep.inspection import KINDS, inspect
from isostep.models.decoder import Decoder, DecoderConfig


class StochasticDepth(nn.Module):
    """As in torchvision: the probability is called p."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p


class DropPath(nn.Module):
    """As in timm."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob


class Configured(nn.Sequential):
    """As in transformers: the model and its parts hold one `config`."""

    def __init__(self, config: SimpleNamespace, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.config = config


def with_config(**settings: object) -> nn.Module:
    config = SimpleNamespace(**settings)
    return Configured(config, Configured(config))


def observed_linear() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.activation_post_process = MinMaxObserver()
    return layer


def frozen_range() -> nn.Module:
    return nn.Sequential(FakeQuantize()).apply(disable_observer)


FOUND: list[tuple[str, Callable[[], nn.Module]]] = [
    ("batchnorm", lambda: nn.BatchNorm1d(2)),
    ("batchnorm", lambda: nn.LazyBatchNorm2d()),
    ("batchnorm", lambda: nn.SyncBatchNorm(2)),
    ("batchnorm", lambda: nn.BatchNorm2d(2, momentum=None)),
    ("batchnorm", lambda: nn.BatchNorm3d(2, track_running_stats=False)),
    ("batchnorm", lambda: nn.BatchNorm3d(2, track_running_stats=False).eval()),
    ("instancenorm", lambda: nn.InstanceNorm2d(2, track_running_stats=True)),
    ("spectral-norm", lambda: spectral_norm(nn.Linear(2, 2))),
    ("spectral-norm", lambda: parametrizations.spectral_norm(nn.Linear(2, 2))),
    ("embedding-max-norm", lambda: nn.Embedding(2, 2, max_norm=1.0)),
    ("embedding-max-norm", lambda: nn.EmbeddingBag(2, 2, max_norm=1.0).eval()),
    ("observer", FakeQuantize),
    ("observer", observed_linear),
    ("dropout", lambda: nn.Dropout(0.1)),
    ("dropout", lambda: nn.Dropout(1)),
    ("dropout", lambda: nn.Dropout2d(0.1)),
    ("dropout", lambda: nn.AlphaDropout(0.1)),
    ("dropout", lambda: nn.FeatureAlphaDropout(0.1)),
    ("dropout", lambda: nn.MultiheadAttention(2, 1, dropout=0.1)),
    ("dropout", lambda: nn.TransformerEncoderLayer(2, 1, 2, dropout=0.1)),
    ("dropout", lambda: nn.TransformerDecoderLayer(2, 1, 2, dropout=0.1)),
    ("dropout", lambda: nn.LSTM(2, 2, num_layers=2, dropout=0.1)),
    ("dropout", lambda: nn.GRU(2, 2, num_layers=2, dropout=0.1)),
    ("dropout", lambda: StochasticDepth(0.1)),
    ("dropout", lambda: DropPath(0.1)),
    ("dropout", lambda: with_config(attention_dropout=0.1)),
    ("dropout", lambda: with_config(attn_pdrop=0.1)),
    ("layerdrop", lambda: with_config(encoder_layerdrop=0.1)),
    ("router-jitter", lambda: with_config(router_jitter_noise=0.01)),
    ("balance-loss", lambda: with_config(router_aux_loss_coef=0.01)),
    ("balance-loss", lambda: with_config(router_z_loss_coef=2, output_router_logits=True)),
    ("random-module", nn.RReLU),
    ("random-module", lambda: nn.FractionalMaxPool2d(2, output_size=1).eval()),
]

NOT_FOUND: list[Callable[[], nn.Module]] = [
    lambda: nn.BatchNorm1d(2).eval(),
    lambda: nn.SyncBatchNorm(2).eval(),
    lambda: nn.GroupNorm(1, 2),
    lambda: nn.LayerNorm(2),
    lambda: nn.InstanceNorm2d(2),
    lambda: nn.InstanceNorm2d(2, track_running_stats=True).eval(),
    lambda: spectral_norm(nn.Linear(2, 2)).eval(),
    lambda: parametrizations.spectral_norm(nn.Linear(2, 2)).eval(),
    lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
    lambda: nn.Embedding(2, 2),
    frozen_range,
    lambda: nn.Dropout(0.0),
    lambda: nn.Dropout(0.1).eval(),
    lambda: nn.MultiheadAttention(2, 1),
    lambda: nn.MultiheadAttention(2, 1, dropout=0.1).eval(),
    lambda: nn.TransformerEncoderLayer(2, 1, 2, dropout=0.0),
    lambda: nn.LSTM(2, 2, num_layers=2),
    lambda: DropPath(0.0),
    lambda: nn.RReLU().eval(),
    lambda: nn.RReLU(0.2, 0.2),
    lambda: nn.FractionalMaxPool2d(2, output_size=1, _random_samples=torch.zeros(1, 1, 2)),
    lambda: with_config(attention_dropout=0.0, layerdrop=0.0, router_jitter_noise=0, router_aux_loss_coef=0.0),
    lambda: with_config(attention_dropout=0.1, router_aux_loss_coef=0.1).eval(),
    lambda: with_config(router_aux_loss_coef=0.01, output_router_logits=False),
    lambda: with_config(summary_first_dropout=0.1, drop_last=True, num_dropped=3, classifier_dropout=None),
    lambda: Decoder(DecoderConfig(8, 8, 8, 1, 1)),
]


def kinds_of(model: nn.Module) -> set[str]:
    return {finding.kind for finding in inspect(model).findings}


@pytest.mark.parametrize(("kind", "build"), FOUND)
def test_found_alone_and_inside_a_model(kind: str, build: Callable[[], nn.Module]) -> None:
    assert kinds_of(build()) == {kind}
    inside = inspect(nn.ModuleDict({"part": build()}))
    assert {finding.kind for finding in inside.findings} == {kind}
    assert all(finding.where.startswith("part") for finding in inside.findings)
    assert all(finding.severity == KINDS[kind].severity for finding in inside.findings)


@pytest.mark.parametrize("build", NOT_FOUND)
def test_not_found(build: Callable[[], nn.Module]) -> None:
    inspection = inspect(build())
    assert inspection.findings == ()
    inspection.raise_if_refused()


def test_every_kind_has_a_positive_case() -> None:
    assert {kind for kind, _ in FOUND} | {"gradient-hook"} == set(KINDS)  # which has a test of its own


def test_dropout_of_a_single_recurrent_layer_is_not_applied() -> None:
    with pytest.warns(UserWarning, match="dropout option adds dropout after all but last"):
        layer = nn.LSTM(2, 2, dropout=0.1)
    assert kinds_of(layer) == set()


def test_a_config_that_several_modules_share_is_reported_once() -> None:
    findings = inspect(with_config(attention_dropout=0.1)).findings
    assert [finding.where for finding in findings] == [""]
    assert findings[0].reason.startswith("SimpleNamespace.attention_dropout = 0.1: ")


# The facts behind the refused kinds.


def test_batchnorm_statistics_depend_on_the_split() -> None:
    zeros, twos = torch.zeros(4, 1), torch.full((4, 1), 2.0)

    def running_mean(*microbatches: Tensor) -> float:
        layer = nn.BatchNorm1d(1, momentum=0.1)
        for microbatch in microbatches:
            layer(microbatch)
        assert layer.running_mean is not None
        return layer.running_mean.item()

    assert running_mean(torch.cat((zeros, twos))) == pytest.approx(0.1)
    assert running_mean(zeros, twos) == pytest.approx(0.2)
    assert running_mean(twos, zeros) == pytest.approx(0.18)


def test_batchnorm_gradients_depend_on_the_split_and_those_of_groupnorm_do_not() -> None:
    examples = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def gradient(norm: nn.Module, num_microbatches: int) -> Tensor:
        layer = nn.Linear(4, 4, bias=False).double()
        nn.init.eye_(layer.weight)
        for microbatch in examples.chunk(num_microbatches):
            norm(layer(microbatch)).pow(3).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    def change(build: Callable[[], nn.Module]) -> float:
        whole = gradient(build().double(), 1)
        split = gradient(build().double(), 4)
        return ((split - whole).abs().max() / whole.abs().max()).item()

    assert change(lambda: nn.BatchNorm1d(4)) > 1e-2
    assert change(lambda: nn.BatchNorm1d(4).eval()) < 1e-13
    assert change(lambda: nn.GroupNorm(2, 4)) < 1e-13


def test_spectral_norm_moves_with_each_forward() -> None:
    layer = parametrizations.spectral_norm(nn.Linear(64, 64))
    assert isinstance(layer, nn.Linear)
    weights = [layer.weight.detach().clone() for _ in range(2)]
    assert not torch.equal(*weights)
    layer.eval()
    weights = [layer.weight.detach().clone() for _ in range(2)]
    assert torch.equal(*weights)


def test_embedding_max_norm_changes_the_rows_that_it_looks_up() -> None:
    layer = nn.Embedding(3, 4, max_norm=0.1)
    before = layer.weight.detach().clone()
    layer(torch.tensor([1]))
    assert (layer.weight != before).any(dim=1).tolist() == [False, True, False]


# Refusing, allowing, and the text.


def model_with_findings() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.1)) for _ in range(5)), nn.Dropout(0.2))


def test_refused_unless_allowed() -> None:
    inspection = inspect(model_with_findings())
    assert [finding.where for finding in inspection.refused] == ["0.0", "1.0", "2.0", "3.0", "4.0"]
    with pytest.raises(InputError, match=r"Sequential: got 'batchnorm in 0\.0 and 4 more', expected .*; use GroupNorm"):
        inspection.raise_if_refused()
    with pytest.raises(InputError, match="batchnorm in 0"):
        inspection.raise_if_refused(allow=["dropout"])
    inspection.raise_if_refused(allow=["batchnorm"])
    assert inspection.allowing({"batchnorm"}).refused == ()
    with pytest.raises(InputError, match="kind: got 'batch-norm', expected one of batchnorm, "):
        inspection.raise_if_refused(allow=["batch-norm"])


def test_text_groups_what_is_alike() -> None:
    lines = str(inspect(model_with_findings())).splitlines()
    assert lines[0] == "Sequential: 5 refused, 6 noted"
    heads = [line for line in lines if line.startswith(("refused: ", "noted: "))]
    assert heads == [
        "refused: batchnorm in 0.0, 1.0, 2.0 and 2 more",
        "noted: dropout in 0.1, 1.1, 2.1 and 2 more",
        "noted: dropout in 5",
    ]
    assert lines[-1].startswith("not seen by looking at modules: ")


def test_text_says_when_the_model_is_in_eval_mode() -> None:
    model = model_with_findings()
    assert "eval mode" not in str(inspect(model))
    assert "in eval mode" in str(inspect(model.eval()))


def test_text_names_the_model_itself() -> None:
    assert "refused: batchnorm in the model itself" in str(inspect(nn.BatchNorm1d(2)))


# The command.

MODELS = """
from dataclasses import dataclass
from torch import nn

@dataclass
class Shape:
    width: "int" = 2

def good():
    print("building")
    return nn.Linear(Shape().width, 2)

def refused():
    return nn.BatchNorm1d(2)

def no_model():
    return 3

def raises():
    raise RuntimeError("first line\\nsecond line")

def leaves():
    raise SystemExit(0)

def needs(argument):
    return nn.Identity()

a_number = 3
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "some_models.py"
    path.write_text(MODELS)
    return path


def test_command_returns_0_for_the_built_in_decoder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect"]) == 0
    assert capsys.readouterr().out.startswith("Decoder: nothing found")


def test_command_returns_1_for_a_refused_model(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{models}:good"]) == 0
    assert main(["inspect", f"{models}:refused"]) == 1
    assert "refused: batchnorm" in capsys.readouterr().out
    assert main(["inspect", f"{models}:refused", "--allow", "batchnorm"]) == 0
    assert "noted: batchnorm" in capsys.readouterr().out


def test_command_finds_an_importable_module(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models.parent)
    assert main(["inspect", "some_models:refused"]) == 1
    assert main(["inspect", "torch.nn:Identity"]) == 0


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("{file}:no_model", "no_model: got 'int', expected a torch.nn.Module"),
        ("{file}:raises", "raises: got 'RuntimeError: first line"),
        ("{file}:leaves", "leaves: got 'SystemExit: 0'"),
        ("{file}:needs", 'needs: got "TypeError: needs() missing 1 required'),
        ("{file}:absent", "absent', expected a function absent in"),
        ("{file}:a_number", "a_number', expected a function a_number in"),
        ("{file}", "expected MODULE:FUNCTION"),
        ("absent.py:build", "model: got 'absent.py', expected a file that exists"),
        ("absent_module:build", 'absent_module: got "ModuleNotFoundError'),
        ("{broken}:build", "broken.py: got 'SyntaxError"),
        (":build", "expected MODULE:FUNCTION"),
        ("{file}:good --allow nonsense", "kind: got 'nonsense', expected one of batchnorm"),
        ("{file}:good --json /absent/folder/x.json", "--json: got '/absent/folder/x.json'"),
    ],
)
def test_command_returns_2_and_one_line_for_bad_input(
    models: Path, capsys: pytest.CaptureFixture[str], target: str, named: str
) -> None:
    broken = models.parent / "broken.py"
    broken.write_text("def build(:")
    assert main(["inspect", *target.format(file=models, broken=broken).split()]) == 2
    captured = capsys.readouterr()
    line = captured.err.removeprefix("building\n")
    assert named in line
    assert line.startswith("isostep: ")
    assert line.count("\n") == 1
    assert captured.out == ""


def test_command_writes_json(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = models.parent / "findings.json"
    assert main(["inspect", f"{models}:refused", "--json", str(path)]) == 1
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert document["model"] == "BatchNorm1d"
    assert document["training"] is True
    assert document["refused"] is True
    assert [set(finding) for finding in document["findings"]] == [{"kind", "where", "severity", "reason", "remedy"}]
    assert "refused: batchnorm" in capsys.readouterr().out


def test_command_prints_json_and_nothing_else(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{models}:good", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["findings"] == []
    assert captured.err == "building\n"


def test_help_has_an_example_and_needs_no_torch() -> None:
    script = "import sys; from isostep.cli import main\nsys.exit(main(['inspect', '--help']) or 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "isostep inspect my_model.py:build" in result.stdout


def test_hooks_on_parameters_are_refused() -> None:
    """A hook that clamps does so per microbatch, so its result depends on the split."""
    model = nn.Linear(2, 2)
    assert not inspect(model).refused
    handle = model.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    (finding,) = inspect(model).refused
    assert finding.kind == "gradient-hook"
    assert "weight" in finding.reason
    handle.remove()
    assert not inspect(model).refused
    model.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    assert [f.kind for f in inspect(model).refused] == ["gradient-hook"]
