"""`isostep train`: a configuration becomes a trained model in a run directory."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from ..cli import MAX_PROCS, json_path, process_count, write_json
from ..config import Config, default_of, expected_of, keys, load
from ..errors import InputError, IsostepError
from ..ledger import CheckpointAnnounced
from ..ledger.sheet import read_run, sheet
from ..ledger.sheet_text import sheet_text
from ..schedule.generate import generate

EPILOG = """example:
  isostep train --procs 2 --run-dir runs/first
  isostep train run.toml --optimizer.name muon --run.epochs 3
  isostep train --procs 4 --layout.stages 2 --layout.schedule zb-h1 --timeline

Without a file it trains a small decoder on the functions of the standard library of this Python: given signature and
docstring, write the body. Needs no download. The same command again resumes a run that was stopped or killed, with as
many workers as you like, or says that it is complete. Ends with a sheet: what was done, and the proof that every
example of an epoch was used exactly once. Layout and workers change speed and memory, never the update.
docs/config.md has all keys.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.usage = "isostep train [RUN.toml] [--procs N] [--run-dir FOLDER] [--section.key VALUE ...]"
    parser.add_argument("config", nargs="?", metavar="RUN.toml", help="configuration; flags win over it")
    parser.add_argument(
        "--procs", type=process_count, metavar="N", help="local workers: layout.replicas x layout.stages"
    )
    parser.add_argument("--run-dir", metavar="FOLDER", help="where the run is kept: run.dir (default runs/default)")
    parser.add_argument("--timeline", action="store_true", help="measure when each stage works and waits: run.timeline")
    parser.add_argument(
        "--allow-changed-what",
        action="store_true",
        help="resume although WHAT changed; the ledger and the sheet say so",
    )
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the sheet here, - for standard output")
    section = ""
    group = parser
    for key, field in keys():
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            group = parser.add_argument_group(f"[{section}]")
        default = f" (default {default_of(field)})" if default_of(field) else ""
        text = f"{field.description}: {expected_of(field)}{default}".replace("%", "%%")
        may_be_bare = bool in (field.annotation, *get_args(field.annotation))
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if may_be_bare else {}
        group.add_argument(f"--{key.replace('_', '-')}", dest=key, metavar="VALUE", help=text, **bare)


def run(args: argparse.Namespace) -> int:
    config = with_workers(load(args.config, flags_of(args)), args.procs)
    check_stages(config)

    from ..distributed.launch import check_world, launched_rank, run_workers
    from ..train import train_worker

    layout = config.layout
    check_world(layout.replicas, layout.stages)
    if launched_rank() is None and layout.workers > MAX_PROCS:
        name = "layout.replicas" if layout.stages == 1 else "layout.replicas x layout.stages"
        raise InputError.of(name, layout.workers, f"at most {MAX_PROCS} local workers", "start them by torchrun")
    arguments = config, args.allow_changed_what, args.json == "-"
    folder = Path(config.run.dir)
    patience = max(30.0, config.run.grace + 15)
    try:
        run_workers(layout.workers, train_worker, *arguments, timeout=config.run.timeout, patience=patience)
    except KeyboardInterrupt:
        if launched_rank():
            raise
        raise KeyboardInterrupt(stopped(folder, args.json)) from None
    except IsostepError as error:
        if error.exit_code == 2 or launched_rank():
            raise
        raise type(error)(f"{error}{how_to_resume(folder)}") from None
    if launched_rank():
        return 0
    document = write_sheet(folder)
    write_json(args.json, document)
    if args.json != "-":
        print(sheet_text(document))
    return 0 if document["coverage"]["proved"] else 1


def how_to_resume(folder: Path) -> str:
    """What is saved of a run that failed, and how it goes on."""
    with suppress(IsostepError):
        events = read_run(folder)
        saved = [event.after_attempted for event in events if isinstance(event, CheckpointAnnounced)]
        return f"; the same command resumes {folder} after update {saved[-1]}" if saved else ""
    return ""


def flags_of(args: argparse.Namespace) -> dict[str, str]:
    """The keys that were given as flags, as text."""
    given = vars(args) | {"run.dir": args.run_dir if args.run_dir is not None else vars(args)["run.dir"]}
    if args.timeline:
        given["run.timeline"] = "true"
    return {key: given[key] for key, _ in keys() if given[key] is not None}


def check_stages(config: Config) -> None:
    """Raise InputError for stages that no schedule or decoder of this size has, before anything is started."""
    layout = config.layout
    if layout.stages == 1:
        return
    order = generate(layout.schedule, layout.stages, 2 * layout.stages, layout.chunks)
    if order.num_chunks > config.model.depth + 2:
        got = f"{layout.stages} x {order.chunks} chunks"
        expected = f"at most {config.model.depth + 2}: embedding, head and [model] depth {config.model.depth}"
        raise InputError.of("layout.stages", got, expected, "take fewer stages or chunks, or a deeper model")


def with_workers(config: Config, procs: int | None) -> Config:
    """The replicas that so many workers make with the stages of each. Raises InputError where some would be left."""
    if procs is None:
        return config
    stages = config.layout.stages
    if procs % stages:
        raise InputError.of("--procs", procs, f"a multiple of layout.stages {stages}", "give replicas x stages")
    return config.model_copy(update={"layout": config.layout.model_copy(update={"replicas": procs // stages})})


def stopped(folder: Path, json_file: str | None) -> str:
    """What to tell after a signal. Writes the sheet if the run had begun."""
    try:
        document = write_sheet(folder)
    except IsostepError:
        return ""
    write_json(json_file, document)
    attempted = document["updates"]["attempted"]
    if document["state"] != "stopped":
        return ""
    return f"stopped after update {attempted}; everything is saved in {folder}: give the same command to resume"


def write_sheet(folder: Path) -> dict[str, Any]:
    """The sheet of a run, also as files in its folder. Raises IsostepError where they cannot be written."""
    document = sheet(read_run(folder))
    for name, text in (("sheet.json", json.dumps(document, indent=2)), ("sheet.txt", sheet_text(document))):
        partial = folder / f"{name}.partial"
        try:
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(folder / name)
        except OSError as error:
            raise IsostepError(
                f"{folder / name}: got {error.strerror}, expected room and access for it; mend that, then give the "
                "same command"
            ) from None
    return document
