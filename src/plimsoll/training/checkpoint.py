"""Atomic checkpoints of model, optimizer, random states and training progress.

    checkpoints/step-00000100/
        model.pt  optimizer.pt  random.pt   tensors (torch.save, read back with weights_only)
        progress.json                       step, data cursor, fallbacks, schedule, scaler, fingerprint of the job
        manifest.json                       bytes and CRC-32 of each of the other files; written last

A kill or a full disk at any moment leaves the previous checkpoint intact. Loading checks every byte. It refuses a
damaged checkpoint and a checkpoint of another job; the error gives the reason and names an earlier good checkpoint.
Saving makes no second copy of the tensors. Does NOT handle a model that is sharded over ranks: see
`plimsoll.training.sharded_checkpoint`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plimsoll.device.off_device import keeps_states_outside
from plimsoll.errors import CheckpointError, OutputError
from plimsoll.records.base import sync, write_atomically
from plimsoll.step.failpoints import failpoint

_TENSOR_FILES = ("model.pt", "optimizer.pt", "random.pt")
_CHUNK_BYTES = 1 << 20
_NAMES = (re.compile(r"step-(\d+)"), re.compile(r"\.step-(\d+)\.old-\d+"))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk, with the content of its ``progress.json``."""

    folder: Path
    step: int
    progress: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """The total size of the checkpoint's files in bytes."""
        return sum(file.stat().st_size for file in self.folder.iterdir())

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, read_use: Callable[[], object] = lambda: None
    ) -> Any:
        """Load the checkpoint into the model and the optimizer.

        Args:
            model: the model.
            optimizer: the optimizer.
            read_use: a function that measures the memory of the process. It is called while the files are mapped.

        Returns:
            The random state that was passed to `save`.

        Raises:
            CheckpointError: if the states belong to another optimizer.
        """
        # The weights are copied into the model, and a second copy may not fit. So the file is mapped instead of read.
        # The mapping is shared, because a limit counts private mappings as memory.
        with _as_shared_file():
            weights = torch.load(self.folder / "model.pt", map_location="cpu", mmap=True, weights_only=True)
        model.load_state_dict(weights)
        read_use()
        del weights
        with _as_shared_file() if keeps_states_outside(optimizer) else contextlib.nullcontext(False) as is_mapped:
            states = torch.load(self.folder / "optimizer.pt", map_location="cpu", mmap=is_mapped, weights_only=True)
            self._require_made_by(optimizer, states)
            optimizer.load_state_dict(states)
            read_use()
            del states
        return torch.load(self.folder / "random.pt", map_location="cpu", weights_only=True)

    def _require_made_by(self, optimizer: torch.optim.Optimizer, states: dict[str, Any]) -> None:
        """Raise if the states belong to another optimizer class. Some techniques of a plan replace the optimizer."""
        saved, known = set(states["param_groups"][0]), set(optimizer.param_groups[0])
        if saved - known and known - saved:  # a newer torch only adds settings
            raise CheckpointError(
                f"the checkpoint of step {self.step} has the states of another optimizer than "
                f"{type(optimizer).__name__}, with {', '.join(sorted(saved - known))} in place of "
                f"{', '.join(sorted(known - saved))}: resume with the budget it was trained with, or start a new run "
                "in another --out"
            )


@contextlib.contextmanager
def _as_shared_file() -> Iterator[bool]:
    """Make `torch.load` in the block map files as shared memory, which no memory limit counts.

    Writing to a loaded tensor would change its file. So callers must copy the tensors and not write to them. The
    yielded ``True`` is for the argument ``mmap`` of `torch.load`.
    """
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        yield True


def save(
    root: Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    random_state: Any,
    progress: dict[str, Any],
    keep: int,
) -> Checkpoint:
    """Write the checkpoint of ``step``, and remove the oldest checkpoints.

    Args:
        root: folder of all checkpoints.
        step: number of completed optimizer steps.
        model: the model.
        optimizer: the optimizer.
        random_state: random state of the backend.
        progress: content of ``progress.json``.
        keep: number of checkpoints to keep.

    Returns:
        The new checkpoint.

    Raises:
        OutputError: if the checkpoint cannot be written (disk full, no permission); earlier checkpoints stay intact.
    """
    # Files are written and synced in a temporary folder, which is then renamed. Old checkpoints are removed after that.
    folder = root / f"step-{step:08d}"
    temporary = root / f".{folder.name}.tmp-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        temporary.mkdir()
        for name, content in zip(
            _TENSOR_FILES, (model.state_dict(), optimizer.state_dict(), random_state), strict=True
        ):
            _write_tensors(temporary / name, content)
            failpoint("checkpoint")
        write_atomically(temporary / "progress.json", json.dumps(progress | {"step": step}).encode())
        manifest = {name: _facts(temporary / name) for name in (*_TENSOR_FILES, "progress.json")}
        write_atomically(temporary / "manifest.json", json.dumps(manifest).encode())
        sync(temporary)
        _put_in_place(temporary, folder)
    except OSError as error:
        raise OutputError(
            f"cannot write the checkpoint of step {step} to {root}: {error.strerror or error}; earlier checkpoints are "
            "intact: free some space and continue with --resume"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _keep_last(root, step, keep)
    return Checkpoint(folder, step, progress | {"step": step})


def load(root: Path, fingerprint: dict[str, str], step: int | None = None) -> Checkpoint:
    """Open the checkpoint of ``step``, or the newest checkpoint.

    Args:
        root: folder of all checkpoints.
        fingerprint: facts about the job, which must equal the facts in the checkpoint.
        step: step of the checkpoint; ``None`` for the newest.

    Raises:
        CheckpointError: if the checkpoint does not exist, is damaged, or belongs to another job. The error names an
            earlier good checkpoint.
    """
    steps = _steps(root)
    if not steps:
        raise CheckpointError(
            f"there is no checkpoint in {root}: give the command without --resume, and with --force if the run has "
            "completed steps, which are then repeated"
        )
    if step is not None and step not in steps:
        raise CheckpointError(
            f"there is no checkpoint of step {step} in {root}: choose one of {', '.join(map(str, steps))}"
        )
    chosen = steps[-1] if step is None else step
    fault = _fault(root, chosen, fingerprint)
    if fault is None:
        return _open(root, chosen)
    good = next(
        (other for other in reversed(steps) if other < chosen and _fault(root, other, fingerprint) is None), None
    )
    remedy = (
        f"the checkpoint of step {good} is intact: resume it with --from-step {good}"
        if good is not None
        else "start again with another --out"
    )
    raise CheckpointError(f"the checkpoint of step {chosen} in {root} {fault}; {remedy}")


def remove_later(root: Path, step: int) -> None:
    """Remove the checkpoints of steps after ``step``, because the run is resumed after ``step`` and repeats them."""
    _remove_leftovers(root)
    for later in _steps(root):
        if later > step:
            _remove(root, later)


def newest_good(root: Path, fingerprint: dict[str, str]) -> Checkpoint | None:
    """Return the newest intact checkpoint of this job, or ``None`` if no checkpoint is intact and of this job.

    Args:
        root: folder of all checkpoints.
        fingerprint: facts about the job, which must equal the facts in the checkpoint.
    """
    good = (step for step in reversed(_steps(root)) if _fault(root, step, fingerprint) is None)
    step = next(good, None)
    return None if step is None else _open(root, step)


def _keep_last(root: Path, step: int, keep: int) -> None:
    """Remove the oldest checkpoints until ``keep`` are left, but never the new checkpoint of ``step``."""
    with contextlib.suppress(OSError):  # a checkpoint that cannot be removed is harmless; the next call retries
        others = [other for other in _steps(root) if other != step]
        for old in others[: max(len(others) + 1 - keep, 0)]:
            _remove(root, old)


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename ``temporary``, a finished checkpoint, to ``folder``.

    A checkpoint already in ``folder`` is moved aside first, and deleted after the renaming.
    """
    aside = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    if folder.exists():
        folder.rename(aside)
    try:
        temporary.rename(folder)
    finally:
        if aside.exists() and not folder.exists():
            aside.rename(folder)
    sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _remove(root: Path, step: int) -> None:
    # Rename first, so that a kill does not leave an incomplete folder under a valid name.
    doomed = root / f".step-{step:08d}.tmp-{os.getpid()}"
    _folder(root, step).rename(doomed)
    shutil.rmtree(doomed)


def _open(root: Path, step: int) -> Checkpoint:
    folder = _folder(root, step)
    return Checkpoint(folder, step, json.loads((folder / "progress.json").read_text()))


def _folder(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint of ``step``.

    If a kill interrupted its replacement, this is the folder that was moved aside under another name.
    """
    folder = root / f"step-{step:08d}"
    return folder if folder.exists() else next(root.glob(f".{folder.name}.old-*"), folder)


def _steps(root: Path) -> list[int]:
    folders = [folder for folder in root.glob("*step-*") if folder.is_dir()]
    matches = (name.fullmatch(folder.name) for name in _NAMES for folder in folders)
    return sorted({int(found[1]) for found in matches if found})  # other names are copies made by the user


def _fault(root: Path, step: int, fingerprint: dict[str, str]) -> str | None:
    """Return a text about the fault of a checkpoint, or ``None`` if the checkpoint is intact and of this job."""
    folder = _folder(root, step)
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, facts in manifest.items():
            found = _facts(folder / name)
            if found != facts:
                return (
                    f"is damaged ({name} has {found['bytes']} bytes and CRC {found['crc32']:08x}, "
                    f"expected {facts['bytes']} and {facts['crc32']:08x})"
                )
        saved = json.loads((folder / "progress.json").read_text())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"is damaged ({type(error).__name__}: {error})"
    different = [
        _difference(key, saved.get(key), fingerprint.get(key))
        for key in sorted({*saved, *fingerprint})
        if saved.get(key) != fingerprint.get(key)
    ]
    return f"belongs to another job ({'; '.join(different)})" if different else None


def _difference(key: str, was: str | None, is_now: str | None) -> str:
    if key == "data":  # a hash of text, labels and tokenizer, which means nothing to a reader
        return "the text, its labels or the tokenizer have changed"
    return f"{key} was {'not set' if was is None else was}, is {'not set' if is_now is None else is_now}"


class _PlainFile:
    """A file for `torch.save` that keeps the ``OSError`` of a full disk, which torch replaces by another error."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        view, num_bytes = memoryview(content).cast("B"), 0
        try:
            while num_bytes < len(view):
                num_bytes += self._file.write(view[num_bytes:]) or 0
        except OSError as error:
            self.error = error
            raise
        return num_bytes

    def flush(self) -> None:
        self._file.flush()


def _write_tensors(path: Path, content: Any) -> None:
    with path.open("wb", buffering=0) as raw:
        file = _PlainFile(raw)
        try:
            torch.save(content, file)  # type: ignore[arg-type]  # it calls only `write` and `flush`
        except RuntimeError:
            if file.error is None:
                raise
        if file.error is not None:
            raise file.error
        os.fsync(raw.fileno())


def _facts(path: Path) -> dict[str, int]:
    crc = 0
    for chunk in _chunks(path):
        crc = zlib.crc32(chunk, crc)
    return {"bytes": path.stat().st_size, "crc32": crc}


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _remove_leftovers(root: Path) -> None:
    """Remove incomplete folders left by a killed process, and restore a checkpoint that the process was replacing."""
    for leftover in root.glob(".step-*.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for aside in root.glob(".step-*.old-*"):
        folder = root / aside.name[1:].partition(".old-")[0]
        if folder.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(folder)
