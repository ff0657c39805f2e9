"""Trackers: the values of a run to TensorBoard and Weights & Biases, against the axis that the run chose.

Both packages are imported when a tracker is made and not before. Replica 0 has the trackers.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import InputError

AXES = ("updates", "examples", "supervised_tokens")
INSTALL = "pip install isostep[track]"
WANDB_ID = "wandb-id.txt"


class Tracker(Protocol):
    """Somewhere that values are reported to."""

    def log(self, values: Mapping[str, float | None], *, updates: int, examples: int, supervised_tokens: int) -> None:
        """Report values at this place: what the run has applied so far. A value of None is left out."""
        ...

    def close(self) -> None:
        """Return when everything is handed over."""
        ...


def trackers(
    names: Sequence[str],
    run_dir: str | Path,
    x_axis: str,
    config_document: Mapping[str, Any],
    *,
    resumed_at: int | None = None,
) -> list[Tracker]:
    """The named trackers of a run, "tensorboard" and "wandb", against "updates", "examples" or "supervised_tokens".

    A run directory that has been tracked before is continued. resumed_at: where on the axis the run resumes; what
    TensorBoard was told of later places is hidden. Raises InputError for an unknown name or axis, for a package that
    is not installed, and where the service cannot be reached.
    """
    if x_axis not in AXES:
        raise InputError.of("x_axis", x_axis, f"one of {', '.join(AXES)}", "choose one")
    made: list[Tracker] = []
    try:
        for name in names:
            if name not in _KINDS:
                raise InputError.of("tracker", name, f"one of {', '.join(_KINDS)}", "choose from these")
            made.append(_KINDS[name](Path(run_dir), x_axis, config_document, resumed_at))
    except BaseException:
        for tracker in made:
            tracker.close()
        raise
    return made


class _TensorBoard:
    """Event files in RUN_DIR/tensorboard."""

    def __init__(self, run_dir: Path, x_axis: str, document: Mapping[str, Any], resumed_at: int | None) -> None:
        module = _imported("torch.utils.tensorboard", "tensorboard")
        purge = None if resumed_at is None else resumed_at + 1
        self._x_axis = x_axis
        self._writer = module.SummaryWriter(log_dir=str(run_dir / "tensorboard"), purge_step=purge)
        self._writer.add_text("configuration", _as_markdown(document), resumed_at or 0)

    def log(self, values: Mapping[str, float | None], *, updates: int, examples: int, supervised_tokens: int) -> None:
        place = {"updates": updates, "examples": examples, "supervised_tokens": supervised_tokens}[self._x_axis]
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, place)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A run of Weights & Biases, whose id is kept in the run directory."""

    def __init__(self, run_dir: Path, x_axis: str, document: Mapping[str, Any], resumed_at: int | None) -> None:
        module = _imported("wandb", "wandb")
        try:
            self._run = module.init(
                project="isostep", name=run_dir.name, dir=str(run_dir), id=_kept_id(run_dir), resume="allow",
                config=dict(document),
            )  # fmt: skip
        except Exception as error:
            got = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
            remedy = "run `wandb login`, or set WANDB_MODE=offline"
            raise InputError.of("wandb", got, "a run that can be opened", remedy) from None
        for axis in AXES:
            self._run.define_metric(axis, hidden=True)
        self._run.define_metric("*", step_metric=x_axis)

    def log(self, values: Mapping[str, float | None], *, updates: int, examples: int, supervised_tokens: int) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        self._run.log(known | {"updates": updates, "examples": examples, "supervised_tokens": supervised_tokens})

    def close(self) -> None:
        self._run.finish()


_KINDS = {"tensorboard": _TensorBoard, "wandb": _WandB}


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        got = f"no {package} ({' '.join(str(error).split())})"[:200]
        raise InputError.of("run.track", got, "an installed package", f"{INSTALL}, or track elsewhere") from None


def _kept_id(run_dir: Path) -> str:
    """The id under which this run directory is tracked; made and kept the first time."""
    path = run_dir / WANDB_ID
    if path.exists() and (kept := path.read_text(encoding="ascii").strip()):
        return kept
    new = uuid.uuid4().hex[:12]
    path.write_text(new + "\n", encoding="ascii")
    return new


def _as_markdown(document: Mapping[str, Any]) -> str:
    """A document of sections as a table, for TensorBoard's text page."""
    rows = ["| key | value |", "|---|---|"]
    for section, keys in document.items():
        pairs = keys.items() if isinstance(keys, Mapping) else [("", keys)]
        rows += [f"| {section}{'.' if key else ''}{key} | {value} |" for key, value in pairs]
    return "\n".join(rows)
