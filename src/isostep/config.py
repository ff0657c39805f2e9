"""The configuration of a run: sections of a TOML file, each key of which is also a flag.

WHAT one update is (`[update] [precision] [model] [data] [optimizer] [schedule]`), HOW it is laid out (`[layout]`), and
the RUN around it (`[validation] [checkpoint] [run] [quality]`). The hash of WHAT names the experiment, but for its
length and for what the defaults of libraries decide; HOW may change whenever a run resumes, and so may most of RUN.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from .errors import InputError
from .units import count

PipelineSchedule = Literal[
    "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "dualpipe-v"
]
"""The named schedules of `schedule.generate`, which a test compares."""


class Section(BaseModel):
    """A section of the file: frozen, no unknown keys, no conversion between types but int to float."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _no_number(cls, value: Any) -> Any:
        if value in ("nan", "inf", "-inf"):
            raise PydanticCustomError("number", "another text, since in a ledger it stands for a number")
        return value


class Update(Section):
    """WHAT one update is."""

    examples_per_update: int | None = Field(
        default=None, gt=0, le=2**62, description="budget of an update; 64 without another"
    )
    tokens_per_update: int | None = Field(default=None, gt=0, le=2**62, description="the other budget of an update")
    objective: Literal["causal-lm"] = Field(default="causal-lm", description="cross-entropy per supervised token")
    last_group: Literal["keep", "drop"] = Field(default="keep", description="the partial group at an epoch's end")
    seed: int = Field(default=0, ge=0, lt=2**63, description="of the order of examples and of draws in forward")

    @model_validator(mode="before")
    @classmethod
    def _default_budget(cls, values: Any) -> Any:
        return _one_of(values, "examples_per_update", "tokens_per_update", 64)


class Layout(Section):
    """HOW an update is split. Changes speed and memory, never the update."""

    replicas: int | None = Field(
        default=None, gt=0, le=2**20, description="copies of the model; default 1, or --procs / stages"
    )
    stages: int = Field(
        default=1, gt=0, le=2**12, description="parts that each replica is cut into, by measured cost; a worker each"
    )
    schedule: PipelineSchedule = Field(
        default="1f1b", description="what runs when on the stages; `isostep simulate` compares them"
    )
    chunks: int | None = Field(
        default=None, gt=0, le=2**10, description="parts of the model on each stage, where the schedule leaves a choice"
    )
    tokens_per_microbatch: int | None = Field(
        default=None, gt=0, le=2**62, description="budget of a microbatch, padding counted; 4096 without another"
    )
    examples_per_microbatch: int | Literal["auto"] | None = Field(
        default=None, description='the other budget of a microbatch; "auto" tries what fits'
    )
    overlap: bool = Field(default=True, description="reduce gradients during each replica's last backward")
    activation_checkpointing: bool | Annotated[tuple[bool, ...], Field(strict=False)] = Field(
        default=False, description="recompute in backward instead of keeping; or for each stage"
    )

    @model_validator(mode="before")
    @classmethod
    def _default_budget(cls, values: Any) -> Any:
        return _one_of(values, "tokens_per_microbatch", "examples_per_microbatch", 4096)

    @model_validator(mode="after")
    def _positive(self) -> Layout:
        if isinstance(self.examples_per_microbatch, int) and not 1 <= self.examples_per_microbatch <= 2**62:
            raise _bad("examples_per_microbatch", self.examples_per_microbatch, "1 to 2**62", "give such a size")
        return self

    @model_validator(mode="after")
    def _check_stages(self) -> Layout:
        each = self.activation_checkpointing
        if isinstance(each, tuple) and len(each) != self.stages:
            expected = f"true, false, or one of them for each of {count(self.stages, 'stage')}"
            raise _bad("activation_checkpointing", list(each), expected, "give as many")
        return self

    @property
    def workers(self) -> int:
        """Processes that train."""
        return (self.replicas or 1) * self.stages


class Precision(Section):
    """Of forward and backward; parameters and optimizer stay in float32."""

    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="float16 brings a loss scale"
    )


class Model(Section):
    """The built-in decoder."""

    context_length: int = Field(default=384, gt=1, le=2**20, description="longest example, in tokens")
    width: int = Field(default=128, gt=0, le=2**20, description="of the residual stream")
    depth: int = Field(default=4, gt=0, le=2**14, description="blocks")
    heads: int = Field(default=4, gt=0, le=2**14, description="of attention")
    initial_seed: int = Field(default=0, ge=0, lt=2**63, description="of the initial weights")


class Data(Section):
    """Training and validation data, as bytes."""

    source: str = Field(
        default="stdlib",
        min_length=1,
        description='"stdlib" (functions of this Python\'s standard library), or a .jsonl or .txt file',
    )
    validation: str | None = Field(
        default=None, min_length=1, description="another such file; without one, part of the source is held out"
    )
    validation_percent: float = Field(default=5.0, gt=0, lt=100, description="share held out, chosen by content")
    too_long: Literal["refuse", "leave-out", "cut"] = Field(
        default="refuse", description="examples longer than the context; stdlib always leaves them out"
    )


class Optimizer(Section):
    """The optimizer, clipping, and the average of weights."""

    name: Literal["adamw", "sgd", "muon"] = Field(default="adamw", description="muon: for matrices, AdamW for the rest")
    learning_rate: float = Field(default=3e-3, gt=0, description="the schedule's peak")
    weight_decay: float = Field(
        default=0.1, ge=0, description="for matrices only; decoupled, but with sgd part of the gradient"
    )
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False, description="of AdamW")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="of SGD and Muon")
    clip_norm: float = Field(default=1.0, ge=0, description="of the global gradient norm; 0 does not clip")
    ema_decay: float = Field(
        default=0.0, ge=0, lt=1, description="of an average of weights, which is validated; 0 keeps none"
    )

    @model_validator(mode="after")
    def _check_betas(self) -> Optimizer:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise _bad("betas", list(self.betas), "two numbers from 0 to below 1", "give [0.9, 0.95] for example")
        return self


class Schedule(Section):
    """The learning rate, by what has been applied so far."""

    shape: Literal["constant", "linear", "cosine", "warmup-stable-decay"] = Field(
        default="cosine", description="after warm-up"
    )
    unit: Literal["updates", "examples", "supervised_tokens"] = Field(
        default="updates", description="of the lengths below"
    )
    warmup: int | None = Field(default=None, ge=0, le=2**62, description="linear up to the peak; a tenth without")
    decay: int | None = Field(
        default=None, gt=0, le=2**62, description="warmup-stable-decay: its last units; a fifth without"
    )
    total: int | None = Field(
        default=None, gt=0, le=2**62, description="units to the schedule's end; the run's own without"
    )
    final_factor: float = Field(default=0.0, ge=0, le=1, description="of the learning rate, at the end")


class Validation(Section):
    """Exact validation: over every target of the validation data."""

    every: int = Field(default=25, ge=0, le=2**62, description="applied updates; 0: only at start and end")


class Checkpoint(Section):
    """What a run resumes from."""

    every: int = Field(default=25, ge=0, le=2**62, description="attempted updates; 0: only at the end or on a signal")
    keep: int = Field(default=2, gt=0, le=2**31, description="the last that many")


class Run(Section):
    """Length, place and reports."""

    dir: str = Field(default="runs/default", min_length=1, description="where the run is kept; --run-dir")
    epochs: int = Field(default=2, gt=0, le=2**31, description="passes over the data")
    updates: int | None = Field(default=None, gt=0, le=2**62, description="end after this many attempted updates")
    purpose: Literal["preparation", "trial", "accepted"] = Field(default="trial", description="said in the sheet")
    track: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=(), strict=False, description="also report there"
    )
    x_axis: Literal["updates", "examples", "supervised_tokens"] = Field(
        default="updates", description="of tracked values"
    )
    timeline: bool = Field(default=False, description="measure when each stage works and waits; --timeline")
    timeout: float = Field(default=300.0, gt=0, le=86400, description="seconds that any collective may take")
    grace: float = Field(
        default=15.0, ge=0, le=86400, description="seconds that a signal lets the update under way go on"
    )


class Quality(Section):
    """A rule that is fixed before the run and judged in the sheet."""

    axis: Literal["updates", "examples", "supervised_tokens"] = Field(
        default="supervised_tokens", description="of the rule"
    )
    metric: Literal["validation_loss", "training_loss"] = Field(default="validation_loss", description="what is judged")
    accept_if: str | None = Field(default=None, description='such as "< 2.0 at 2e6": by 2e6 on the axis, below 2.0')

    @model_validator(mode="after")
    def _check_rule(self) -> Quality:
        if self.accept_if is not None:
            parse_rule(self.accept_if)
        return self


WHAT = ("update", "precision", "model", "optimizer", "schedule")
"""Sections that are WHAT as they stand."""

WITHOUT_EFFECT = {
    "adamw": ("momentum",),
    "sgd": ("betas",),
    "constant": ("decay", "total", "final_factor"),
    "linear": ("decay",),
    "cosine": ("decay",),
}
"""Keys that an optimizer or a shape of schedule does not look at."""


class Config(Section):
    """All sections of a file."""

    update: Update = Field(default_factory=Update)
    layout: Layout = Field(default_factory=Layout)
    precision: Precision = Field(default_factory=Precision)
    model: Model = Field(default_factory=Model)
    data: Data = Field(default_factory=Data)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    schedule: Schedule = Field(default_factory=Schedule)
    validation: Validation = Field(default_factory=Validation)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    run: Run = Field(default_factory=Run)
    quality: Quality = Field(default_factory=Quality)

    def what(self, content_hash: str) -> dict[str, Any]:
        """WHAT as a document: the data by content and not by path, and without keys that have no effect here."""
        what = {name: getattr(self, name).model_dump(mode="json") for name in WHAT}
        for section, kind in (("optimizer", self.optimizer.name), ("schedule", self.schedule.shape)):
            for key in WITHOUT_EFFECT.get(kind, ()):
                del what[section][key]
        return what | {"data": {"content_hash": content_hash}}

    def how(self, replicas: int) -> dict[str, Any]:
        """HOW as a document, with the number of replicas that there really are."""
        return self.layout.model_dump(mode="json") | {"replicas": replicas}

    def about_run(self, validation_content_hash: str = "") -> dict[str, Any]:
        """RUN as a document; where the data comes from is in it, and what the validation data holds."""
        sections = ("data", "validation", "checkpoint", "run", "quality")
        run = {name: getattr(self, name).model_dump(mode="json") for name in sections}
        run["data"]["validation_content_hash"] = validation_content_hash
        return run


def hash_of(document: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a document as JSON, a WHAT for example."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def parse_rule(text: str) -> tuple[str, float, float]:
    """(comparison, limit, place) of a quality rule such as "< 2.0 at 2e6". Raises InputError for another text."""
    number = r"([-+]?\d*\.?\d+(?:[eE][-+]?\d+)?)"
    found = re.fullmatch(rf"\s*(<=|<|>=|>)\s*{number}\s+at\s+{number}\s*", text)
    if found is None or not 0 <= float(found[3]) < 1e300:
        raise _bad("accept_if", text, 'a rule such as "< 2.0 at 2e6"', "give comparison, limit and place on the axis")
    return found[1], float(found[2]), float(found[3])


# --------------------------------------------------------------------------------------------- reading


EXCLUSIVE = {
    "update.examples_per_update": "update.tokens_per_update",
    "update.tokens_per_update": "update.examples_per_update",
    "layout.examples_per_microbatch": "layout.tokens_per_microbatch",
    "layout.tokens_per_microbatch": "layout.examples_per_microbatch",
}
"""Keys of which a flag replaces the other one of the file."""


def keys() -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the file as "section.key", in order, with its pydantic field."""
    for section, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, Section)
        for name, key in field.annotation.model_fields.items():
            yield f"{section}.{name}", key


def load(path: str | None = None, flags: Mapping[str, str] | None = None) -> Config:
    """The configuration of a TOML file (defaults without one), with flags ("section.key" -> text) over it.

    Raises InputError in one line that names the key, or the place in the file.
    """
    document = {} if path is None else _read(path)
    fields = dict(keys())
    for key, text in (flags or {}).items():
        section, _, name = key.partition(".")
        if isinstance(document.setdefault(section, {}), dict):
            document[section][name] = value = _value_of(text, fields[key])
            if value is not None and (other := EXCLUSIVE.get(key)) not in (flags or {}) and other is not None:
                document[section].pop(other.partition(".")[2], None)
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        raise _first_of(error) from None


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError.of("configuration", path, "a file that can be read", f"{error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError.of(path, f"byte {error.start} that is not UTF-8", "a TOML file", "save it as UTF-8") from None
    except (ValueError, RecursionError) as error:  # also for a number of thousands of digits, which Python refuses
        raise InputError(f"{path}: got malformed TOML, expected key = value; mend it: {error}") from None


def _value_of(text: str, field: FieldInfo) -> Any:
    """A flag's text as the TOML value that it stands for; text stays text where the key holds some."""
    if text == "none" and type(None) in get_args(field.annotation):
        return None
    if field.annotation in (str, str | None):
        return text
    try:
        document = tomllib.loads(f"x = {text}")
    except (ValueError, RecursionError):
        document = {}
    if document.keys() == {"x"}:
        return document["x"]
    return [text] if get_origin(field.annotation) is tuple else text


def _first_of(error: ValidationError) -> InputError:
    """The first complaint of pydantic, in our form."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) if first["loc"] else "configuration"
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, _BadValueError):
        return InputError.of(f"{where}.{cause.key}", cause.got, cause.expected, cause.remedy)
    if first["type"] == "extra_forbidden":
        section, _, name = where.partition(".")
        known = [key.partition(".")[2] for key, _ in keys() if key.startswith(f"{section}.")] if name else []
        known = known or list(Config.model_fields)
        return InputError.of(
            "configuration key",
            _quoted(where),
            f"one of {', '.join(known)}",
            "mend or remove it; docs/config.md has them all",
        )
    fields = dict(keys())
    while where not in fields and where.count(".") > 1:  # inside a union or a tuple
        where = where.rpartition(".")[0]
    expected = re.sub(r"^(Input|String) should (be|have) ", "", first["msg"])
    if first["type"].endswith(("_type", "missing", "too_long", "_from_float")):
        expected = expected_of(fields[where]) if where in fields else "a section with keys"
    return InputError.of(where, _quoted(first["input"]), expected, "mend the value; docs/config.md says what it means")


def _quoted(value: Any) -> Any:
    text = str(value)
    return value if len(text) <= 60 else f"{text[:60]}..."


class _BadValueError(InputError, ValueError):
    """A complaint of our own inside pydantic's validation."""

    def __init__(self, key: str, got: object, expected: str, remedy: str) -> None:
        self.key, self.got, self.expected, self.remedy = key, got, expected, remedy
        super().__init__(f"{key}: got {got!r}, expected {expected}; {remedy}")


def _bad(key: str, got: object, expected: str, remedy: str) -> _BadValueError:
    return _BadValueError(key, got, expected, remedy)


def _one_of(values: Any, first: str, second: str, default: int) -> Any:
    """Exactly one of two budgets: the first one by default."""
    if not isinstance(values, dict):
        return values
    given = {name: values[name] for name in (first, second) if values.get(name) is not None}
    if len(given) > 1:
        raise _bad(first, given, f"either it or {second}", "give one of them")
    return values if given else {**values, first: default}


def expected_of(field: FieldInfo) -> str:
    """The values of a key, in words."""
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "none"}

    def words(annotation: Any) -> str:
        if annotation in names:
            return names[annotation]
        arguments = get_args(annotation)
        if get_origin(annotation) is Annotated:
            return words(arguments[0])
        if getattr(annotation, "__origin__", None) is Literal:
            return ", ".join(f'"{value}"' for value in arguments)
        if getattr(annotation, "__origin__", None) is tuple:
            return f"list of {words(arguments[0])}" if arguments[-1] is ... else f"{len(arguments)} numbers in a list"
        return " or ".join(words(argument) for argument in arguments if argument is not type(None))

    return words(field.annotation)


def default_of(field: FieldInfo) -> str:
    """The default of a key as TOML; empty where there is none."""
    value = field.default
    return "" if value is None else json.dumps(list(value) if isinstance(value, tuple) else value)
