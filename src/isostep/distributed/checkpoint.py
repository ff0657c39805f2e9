"""Checkpoints through torch.distributed.checkpoint: written in the background, whole or not there at all.

A checkpoint is a folder. It is written under another name; when its files and their digests are on disk it gets its
own name in one step, and only then is it announced. A process that is killed at any moment leaves the last announced
checkpoint as it was, and a folder of the other name, which the next start removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from ..config import hash_of
from ..errors import InputError, IsostepError
from ..ledger.ledger import sync_folder

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
PARTIAL = ".partial"


def folder_of(after_attempted: int) -> str:
    """The path of a checkpoint, relative to its run."""
    return f"{CHECKPOINTS}/update-{after_attempted:08d}"


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time, and keeps the last `keep` announced ones.

    group: the ranks that hold one replica; all of them build one and make the same calls. Its first rank completes what
    they have written. announce(after_attempted, path, digest): called there in the background, as soon as a checkpoint
    is durable.
    """

    def __init__(
        self, run_dir: Path, keep: int, group: dist.ProcessGroup, announce: Callable[[int, str, str], None]
    ) -> None:
        self._run_dir, self._keep, self._group, self._announce = run_dir, keep, group, announce
        self._leads = dist.get_rank(group) == 0
        self._background = ThreadPoolExecutor(1, "isostep-checkpoint")
        self._under_way: tuple[int, Future[None]] | None = None
        self._announced: list[str] = []

    def clear(self, announced: list[str]) -> None:
        """Take up the announced checkpoints of an earlier start, oldest first; remove every other folder."""
        self._announced = list(announced)
        if not self._leads:
            return
        for folder in (self._run_dir / CHECKPOINTS).glob("update-*"):
            if f"{CHECKPOINTS}/{folder.name}" not in announced:
                shutil.rmtree(folder)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is under way, so that `start` would wait."""
        return self._under_way is not None and not self._under_way[1].done()

    def start(self, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], after_attempted: int) -> None:
        """Copy the tensors and write them in the background, when what was under way is finished.

        Raises IsostepError where the checkpoint before could not be written.
        """
        self.finish()
        path = self._run_dir / folder_of(after_attempted)
        assert folder_of(after_attempted) not in self._announced, "an announced checkpoint is never written again"
        partial = path.with_name(path.name + PARTIAL)
        try:
            if self._leads:  # the others write when all have planned, so not before this
                for folder in (path, partial):
                    shutil.rmtree(folder, ignore_errors=True)
                partial.mkdir(parents=True, exist_ok=True)
                sync_folder(self._run_dir)
            saving = async_save(
                dict(tensors),
                storage_writer=FileSystemWriter(partial, sync_files=True),
                process_group=self._group,
            )
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise _failed(after_attempted, error) from error
        assert isinstance(saving, Future)
        written = self._background.submit(self._complete, saving, path, dict(manifest), after_attempted)
        self._under_way = after_attempted, written

    def poll(self) -> int | None:
        """The number of the checkpoint that was under way, if it has been announced by now. Raises as `start`."""
        return None if self.busy else self.finish()

    def finish(self) -> int | None:
        """Wait until the checkpoint that is under way is announced; returns its number. Raises as `start`."""
        if self._under_way is None:
            return None
        (after_attempted, written), self._under_way = self._under_way, None
        try:
            written.result()
        except BaseException as error:  # what torch raises here is no Exception
            path = self._run_dir / folder_of(after_attempted)
            shutil.rmtree(path.with_name(path.name + PARTIAL), ignore_errors=True)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise _failed(after_attempted, error) from error
        return after_attempted

    def _complete(self, saving: Future[Any], path: Path, manifest: dict[str, Any], after_attempted: int) -> None:
        """In the background: when the tensors are written, their digests, the folder's name, and the announcement."""
        saving.result()
        if not self._leads:
            return
        partial = path.with_name(path.name + PARTIAL)
        manifest["files"] = {file.name: _digest(file) for file in sorted(partial.iterdir())}
        manifest["digest"] = digest_of(manifest)
        with open(partial / MANIFEST, "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(partial)
        partial.rename(path)
        sync_folder(path.parent)
        self._announce(after_attempted, folder_of(after_attempted), manifest["digest"])
        self._announced.append(folder_of(after_attempted))
        while len(self._announced) > self._keep:
            shutil.rmtree(self._run_dir / self._announced.pop(0), ignore_errors=True)


def digest_of(manifest: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a manifest without its own "digest"."""
    return hash_of({key: value for key, value in manifest.items() if key != "digest"})


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _failed(after_attempted: int, error: BaseException) -> IsostepError:
    reason = reason_of(_cause(error))
    return IsostepError(
        f"checkpoint after update {after_attempted}: got {reason}, expected room and access for it; mend that and give "
        "the same command, which resumes from the last checkpoint"
    )


def _cause(error: BaseException) -> BaseException:
    """What torch has wrapped into an error of its own, the first one where there are several."""
    if isinstance(error, CheckpointException):
        return next((failure for failure, _ in error.failures.values()), error)
    return error


def reason_of(error: BaseException) -> str:
    """Why a file could not be written, in one line: torch speaks of its positions where there was no room."""
    text = str(error).strip().partition("\n")[0]
    return "no room for the whole file" if "unexpected pos" in text or "failed writing" in text else text


def manifest_of(path: Path, digest: str = "") -> dict[str, Any]:
    """The manifest of a checkpoint whose files all are as they were written. Raises InputError for any other.

    digest: that it was announced with, if known.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
        odd = None if manifest["digest"] == digest_of(manifest) == (digest or manifest["digest"]) else MANIFEST
        odd = odd or next((name for name, digest in files.items() if _digest(path / name) != digest), None)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _corrupt(path, f"{type(error).__name__}: {error}") from None
    if odd is not None:
        raise _corrupt(path, f"other bytes in {odd}")
    return manifest


def _corrupt(path: Path, got: str) -> InputError:
    return InputError.of(
        f"checkpoint {path}", got, "the files as they were written",
        "restore them, or remove that folder to resume from the checkpoint before it, or from the start",
    )  # fmt: skip


def load_tensors(
    path: Path,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    wanted: Callable[[str], bool] = lambda _: True,
) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names are wanted here.

    Every rank of the group, or of the world, calls this, and fails if one does.
    """
    reader = FileSystemReader(path)
    try:
        metadata = reader.read_metadata().state_dict_metadata
    except OSError as error:
        raise InputError.of(
            f"checkpoint {path}", error.strerror, "one that every worker can read", "put the run on a shared disk"
        ) from None
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and wanted(name)
    }
    try:
        load(tensors, storage_reader=reader, process_group=group)
    except CheckpointException as error:  # which is no Exception
        raise _corrupt(path, " ".join(str(_cause(error)).split())[:200]) from None
    return tensors
