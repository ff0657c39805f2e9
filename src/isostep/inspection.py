"""Find the parts of a model whose result depends on how a group is split into microbatches and replicas.

Summed gradients are the same for every split only if the loss of an example depends neither on the other
examples of its microbatch nor on the microbatches before it. `inspect` looks at the modules, runs none of
them, and reports those that break this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from .errors import InputError

Severity = Literal["refused", "noted"]

NOT_SEEN = (
    "random or batch-wide functions that a custom forward calls with values that no attribute holds, "
    "buffers that it changes, scripted and exported graphs, and the loss"
)


@dataclass(frozen=True)
class Kind:
    """What all findings of a kind share. Where one is refused, the update depends on the layout."""

    severity: Severity
    remedy: str


KINDS: Mapping[str, Kind] = {
    "batchnorm": Kind(
        "refused", "use GroupNorm or LayerNorm, or freeze it: running statistics, and .eval() on this module"
    ),
    "instancenorm": Kind("refused", "build it with track_running_stats=False, or call .eval() on it"),
    "spectral-norm": Kind("refused", "call .eval() on the module that holds it, or remove it"),
    "embedding-max-norm": Kind("refused", "build it without max_norm and normalise its output instead"),
    "observer": Kind("refused", "disable the observers before training"),
    "gradient-hook": Kind("refused", "remove the hook, or do to the whole gradient what it does, such as clip_norm"),
    "dropout": Kind("noted", "set it to 0 where any examples_per_microbatch must give the same update"),
    "layerdrop": Kind("noted", "set it to 0 where any examples_per_microbatch must give the same update"),
    "router-jitter": Kind("noted", "set it to 0 where any examples_per_microbatch must give the same update"),
    "random-module": Kind("noted", "use a module that draws no random numbers"),
    "balance-loss": Kind("noted", "leave the model's own auxiliary loss out of the objective"),
}


@dataclass(frozen=True)
class Finding:
    """A module whose result depends on the split. `where` is its qualified name, "" for the model itself."""

    kind: str
    where: str
    severity: Severity
    reason: str
    remedy: str


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found, in the order of the modules. `str()` of it is the text for people.

    model: class name of the model. training: whether the model was in training mode.
    """

    model: str
    training: bool
    findings: tuple[Finding, ...]

    @property
    def refused(self) -> tuple[Finding, ...]:
        """The findings under which the update would depend on the layout."""
        return tuple(finding for finding in self.findings if finding.severity == "refused")

    def allowing(self, kinds: Collection[str]) -> Inspection:
        """The same, with the findings of `kinds` only noted. Raises InputError for an unknown kind."""
        for kind in kinds:
            if kind not in KINDS:
                raise InputError.of("kind", kind, f"one of {', '.join(KINDS)}", "choose one of them")
        noted = (replace(f, severity="noted") if f.kind in kinds else f for f in self.findings)
        return replace(self, findings=tuple(noted))

    def raise_if_refused(self, allow: Collection[str] = ()) -> None:
        """Raise InputError where something is refused and its kind is not in `allow`."""
        refused = self.allowing(allow).refused
        if refused:
            kinds = sorted({finding.kind for finding in refused})
            raise InputError.of(
                self.model,
                f"{', '.join(kinds)} in {_places(refused, shown=1)}",
                f"modules whose result does not depend on the split of the group ({refused[0].reason})",
                f"{refused[0].remedy}; or allow {', '.join(map(repr, kinds))} and accept the difference",
            )

    def __str__(self) -> str:
        lines = [self._summary()]
        if not self.training:
            lines.append("in eval mode, where most of what could be found rests: call .train() to see it")
        for alike in _group_alike(self.findings):
            first = alike[0]
            lines.append(f"{first.severity}: {first.kind} in {_places(alike, shown=3)}")
            lines.append(f"    {first.reason}")
            lines.append(f"    do this: {first.remedy}")
        return "\n".join([*lines, f"not seen by looking at modules: {NOT_SEEN}"])

    def _summary(self) -> str:
        if not self.findings:
            return f"{self.model}: nothing found that depends on the split of the group"
        num_refused = len(self.refused)
        return f"{self.model}: {num_refused} refused, {len(self.findings) - num_refused} noted"


def inspect(model: nn.Module) -> Inspection:
    """Look at every module of model in its present mode, training or eval. Nothing is run or changed."""
    findings: list[Finding] = []
    configs: list[object] = []
    for where, module in model.named_modules():
        found = [pair for rule in _MODULE_RULES for pair in rule(module)]
        config = getattr(module, "config", None)
        if module.training and config is not None and not any(config is seen for seen in configs):
            configs.append(config)
            found += _config(config)
        findings += (Finding(kind, where, KINDS[kind].severity, reason, KINDS[kind].remedy) for kind, reason in found)
    return Inspection(type(model).__name__, model.training, tuple(findings))


# Rules: each yields (kind, reason) for one module.


def _batchnorm(module: nn.Module) -> Iterator[tuple[str, str]]:
    if not isinstance(module, _BatchNorm):
        return
    has_running_statistics = module.running_mean is not None or module.running_var is not None
    if isinstance(module, nn.SyncBatchNorm) and module.training:
        yield (
            "batchnorm",
            "its statistics come from one microbatch of each replica, not from the group, and its collective "
            "hangs where replicas run unequal numbers of microbatches",
        )
    elif module.training:
        yield (
            "batchnorm",
            "its statistics come from one microbatch, and the running ones move with each microbatch",
        )
    elif not has_running_statistics:
        yield (
            "batchnorm",
            "it has no running statistics, so those of the microbatch are used in eval mode too",
        )


def _instancenorm(module: nn.Module) -> Iterator[tuple[str, str]]:
    if not isinstance(module, _InstanceNorm) or module.running_mean is None:
        return
    if module.training or not module.track_running_stats:
        yield "instancenorm", "its running statistics move with each microbatch"


def _spectral_norm(module: nn.Module) -> Iterator[tuple[str, str]]:
    is_hooked = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    is_parametrization = isinstance(module, _SpectralNorm) and hasattr(module, "_u")
    if module.training and (is_hooked or is_parametrization):
        yield (
            "spectral-norm",
            "each forward moves its power iteration, so each microbatch meets another weight",
        )


def _embedding_max_norm(module: nn.Module) -> Iterator[tuple[str, str]]:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        yield (
            "embedding-max-norm",
            "each forward rescales the rows that it looks up, so replicas with other tokens differ",
        )


_OBSERVERS = frozenset(
    {
        "HistogramObserver",
        "MinMaxObserver",
        "MovingAverageMinMaxObserver",
        "MovingAveragePerChannelMinMaxObserver",
        "PerChannelMinMaxObserver",
    }
)


def _observer(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Quantization ranges that follow the data. By name, because `torch.ao.quantization` is leaving torch."""
    enabled = getattr(module, "static_enabled", getattr(module, "observer_enabled", None))
    observes = any(type(child).__name__ in _OBSERVERS for child in module.children())
    if observes and (enabled is None or bool(torch.as_tensor(enabled).any())):
        yield "observer", "its range follows the microbatches that it saw, in training and in eval mode"


def _gradient_hook(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, parameter in module.named_parameters(recurse=False):
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            yield "gradient-hook", f"a hook on its parameter {name} sees each microbatch's gradient by itself"


def _random_module(module: nn.Module) -> Iterator[tuple[str, str]]:
    draws = isinstance(module, nn.RReLU) and module.training and module.lower != module.upper
    pools = isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)
    if draws or (pools and module._random_samples is None):
        yield "random-module", f"{type(module).__name__}: {_DRAWS}"


def _random_attributes(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Probabilities that a module holds: of nn.Dropout, and of modules that call dropout as a function."""
    if not module.training:
        return
    if isinstance(module, nn.RNNBase) and module.num_layers == 1:  # its dropout is between layers
        return
    holder = type(module).__name__
    if _RANDOM_CLASS.search(holder) and _is_probability(getattr(module, "p", None)):
        yield "dropout", f"{holder}.p = {module.p}: {_DRAWS}"
    yield from _random_settings(holder, vars(module))


_MODULE_RULES: tuple[Callable[[nn.Module], Iterator[tuple[str, str]]], ...] = (
    _batchnorm,
    _instancenorm,
    _spectral_norm,
    _embedding_max_norm,
    _observer,
    _gradient_hook,
    _random_module,
    _random_attributes,
)


# Settings, read by name: float attributes of modules and of `config` objects as transformers has them.

_DRAWS = (
    "random draws are keyed by the examples of the microbatch; they repeat with the same microbatches and "
    "differ with another examples_per_microbatch"
)
_RANDOM_CLASS = re.compile("drop|stochasticdepth", re.IGNORECASE)
_RANDOM_SETTINGS = {  # the first pattern that matches decides
    re.compile("^summary_"): None,  # GPT-2's, 0.1 by default; a model that uses it has an nn.Dropout
    re.compile("layer_?drop"): "layerdrop",
    re.compile("router.*jitter|jitter_noise"): "router-jitter",
    re.compile("drop"): "dropout",
}
_BALANCE_LOSS = re.compile("aux_loss|z_loss|balance_loss")


def _config(config: object) -> Iterator[tuple[str, str]]:
    holder = type(config).__name__
    settings = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    yield from _random_settings(holder, settings)
    if settings.get("output_router_logits") is False:  # then transformers adds no balance loss
        return
    for name, value in settings.items():
        if _BALANCE_LOSS.search(str(name)) and _is_number(value) and value > 0:
            yield (
                "balance-loss",
                f"{holder}.{name} = {value}: a balance loss multiplies means over one microbatch, so its sum "
                "over microbatches depends on the split",
            )


def _random_settings(holder: str, settings: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        kind = next((kind for pattern, kind in _RANDOM_SETTINGS.items() if pattern.search(str(name))), None)
        if kind is not None and _is_probability(value):
            yield kind, f"{holder}.{name} = {value}: {_DRAWS}"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_probability(value: object) -> bool:
    """Above 0 and at most 1; a larger number is a count of something."""
    return _is_number(value) and 0 < value <= 1


# Text.


def _group_alike(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings that differ in `where` only, together; refused ones first."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: finding.severity != "refused"):
        groups.setdefault((finding.kind, finding.reason), []).append(finding)
    return list(groups.values())


def _places(findings: Sequence[Finding], shown: int) -> str:
    """The names of the first `shown` modules, and how many more there are."""
    names = ", ".join(finding.where or "the model itself" for finding in findings[:shown])
    more = len(findings) - shown
    return f"{names} and {more} more" if more > 0 else names
