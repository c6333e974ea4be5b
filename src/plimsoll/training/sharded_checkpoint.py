"""Checkpoints of a model that is sharded over ranks; they can be loaded with any number of ranks.

    checkpoints/step-00000100/
        shards/                  one file per rank, and metadata: torch's distributed checkpoint (DCP)
        random.pt  progress.json  manifest.json    as in any checkpoint, see `plimsoll.training.checkpoint`

All ranks call `save` and `restore`. A checkpoint can be loaded by another number of ranks or by one process that has
the whole model. Ranks can also load the checkpoint of one process. Does NOT handle machines without a shared file
system.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_shards
from torch.distributed.checkpoint.state_dict_saver import save as write_shards

from plimsoll.device.base import Backend, backend_for
from plimsoll.device.off_device import copier_of
from plimsoll.distributed.ranks import PeerOutOfMemory, Ranks
from plimsoll.errors import CheckpointError, OutputError
from plimsoll.models.optimizers import settings_of
from plimsoll.models.workload import Workload
from plimsoll.records.base import sync, write_atomically
from plimsoll.records.run import OomEvent
from plimsoll.step.collective import attempt_collectively, told_by_all
from plimsoll.step.failpoints import failpoint
from plimsoll.step.oom_boundary import Position, attempt
from plimsoll.techniques.mechanisms.sharded import ShardedTraining
from plimsoll.training.checkpoint import (
    Checkpoint,
    _facts,
    _keep_last,
    _put_in_place,
    _remove_leftovers,
    _write_tensors,
)

_SHARDS = "shards"


def is_sharded(saved: Checkpoint) -> bool:
    """Return whether a checkpoint was written by `save` of this module."""
    return (saved.folder / _SHARDS).is_dir()


def save(
    root: Path, step: int, *, workload: Workload, ranks: Ranks, random_state: Any, progress: dict[str, Any], keep: int
) -> Checkpoint:
    """Write the checkpoint of ``step`` on all ranks, and remove the oldest checkpoints.

    Args:
        root: folder of all checkpoints.
        step: number of completed optimizer steps.
        workload: model and optimizer.
        ranks: all ranks.
        random_state: random states of all ranks.
        progress: content of ``progress.json``.
        keep: number of checkpoints to keep.

    Returns:
        The new checkpoint.

    Raises:
        OutputError: on all ranks, if one of them cannot write; earlier checkpoints stay intact.
        PeerOutOfMemory: on all ranks, if memory ran out on one of them; no files are left, and the call can be
            repeated.
    """
    folder = root / f"step-{step:08d}"
    temporary = root / f".{folder.name}.tmp-shards"
    backend = backend_for(str(workload.device))
    problem = (
        _on_first(ranks, backend, lambda: _begin(root, temporary))
        or _write(workload, backend, temporary / _SHARDS)
        or _on_first(ranks, backend, lambda: _finish(temporary, folder, random_state, progress | {"step": step}))
    )
    if problem is not None:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        if problem.failed_rank is not None:
            raise PeerOutOfMemory(problem.failed_rank, problem.text)
        raise OutputError(
            f"cannot write the checkpoint of step {step} to {root}: {problem.text}; earlier checkpoints are intact: "
            "free some space and continue with --resume"
        )
    if ranks.rank == 0:
        _keep_last(root, step, keep)
    return Checkpoint(folder, step, progress | {"step": step})


def restore(saved: Checkpoint, workload: Workload) -> Any:
    """Load a checkpoint, sharded or not, into the part of the model and optimizer that this rank holds.

    Args:
        saved: the checkpoint.
        workload: model and optimizer.

    Returns:
        The random states.

    Raises:
        CheckpointError: if the checkpoint belongs to another model.
    """
    if is_sharded(saved):
        _read_shards(saved, workload)
    else:
        assert isinstance(workload.hooks.sharding, ShardedTraining)
        _read_whole(saved.folder, workload.hooks.sharding, workload.optimizer)
    return torch.load(saved.folder / "random.pt", map_location="cpu", weights_only=True)


# -- content -----------------------------------------------------------------------------------------------------------


def _parameters_of(workload: Workload) -> dict[str, nn.Parameter]:
    """Return the tensor that the optimizer updates for each parameter: this rank's rows, or the whole parameter."""
    if isinstance(workload.hooks.sharding, ShardedTraining):
        return workload.hooks.sharding.rows
    return dict(workload.model.named_parameters())


def _rows_of(workload: Workload) -> dict[str, Any]:
    """Return all tensors by name, as distributed tensors if they are shards, and the settings of the optimizer."""
    tensors: dict[str, Any] = {}
    for name, parameter in _parameters_of(workload).items():
        tensors[f"model.{name}"] = _as_part(workload, name, parameter.detach())
        for key, value in workload.optimizer.state.get(parameter, {}).items():
            is_part = isinstance(value, Tensor) and value.shape == parameter.shape
            tensors[f"optimizer.{name}.{key}"] = _as_part(workload, name, value) if is_part else torch.as_tensor(value)
    for name, buffer in workload.model.named_buffers():
        if name in workload.model.state_dict():
            tensors[f"model.{name}"] = buffer
    tensors["groups"] = settings_of(workload.optimizer)
    return tensors


def _as_part(workload: Workload, name: str, rows: Tensor) -> Tensor:
    sharding = workload.hooks.sharding
    return sharding.as_part(name, rows) if isinstance(sharding, ShardedTraining) else rows


def _read_shards(saved: Checkpoint, workload: Workload) -> None:
    reader = FileSystemReader(saved.folder / _SHARDS)
    known = reader.read_metadata().state_dict_metadata
    parameters, optimizer = _parameters_of(workload), workload.optimizer
    lacking = sorted(name for name in parameters if f"model.{name}" not in known)
    if lacking:
        raise CheckpointError(
            f"the checkpoint of step {saved.step} lacks {lacking[0]} and {len(lacking) - 1} other parameters of this "
            "model: resume with the model that it was written for, or start a new run in another --out"
        )
    optimizer.state.clear()
    copied = copier_of(optimizer) or Tensor.detach  # copies states to their location, if it is not the device
    for name, parameter in parameters.items():
        for key, size in _states_in(known, name):
            is_part = tuple(size) == shape_of_whole(workload, name)
            optimizer.state[parameter][key] = (
                copied(torch.zeros_like(parameter)) if is_part else torch.zeros(tuple(size))
            )
    tensors = _rows_of(workload)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended, in one process
        read_shards(tensors, storage_reader=reader, no_dist=workload.ranks.is_alone)
    for group, settings in zip(optimizer.param_groups, tensors["groups"], strict=True):
        group.update(settings)


def shape_of_whole(workload: Workload, name: str) -> tuple[int, ...]:
    """Return the shape of a parameter before sharding."""
    if isinstance(workload.hooks.sharding, ShardedTraining):
        return tuple(workload.hooks.sharding.shapes[name])
    return tuple(workload.model.get_parameter(name).shape)


def _states_in(known: dict[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and shape of each optimizer state of the parameter ``name``.

    ``known`` is the metadata of all tensors in a checkpoint, by key.
    """
    prefix = f"optimizer.{name}."
    for key, facts in known.items():
        if key.startswith(prefix) and "." not in key[len(prefix) :] and isinstance(facts, TensorStorageMetadata):
            yield key[len(prefix) :], facts.size


def _read_whole(folder: Path, sharded: ShardedTraining, optimizer: torch.optim.Optimizer) -> None:
    """Load the rows of this rank from a checkpoint of one process."""
    weights = torch.load(folder / "model.pt", map_location="cpu", mmap=True, weights_only=True)
    sharded.load(weights)
    states = torch.load(folder / "optimizer.pt", map_location="cpu", mmap=True, weights_only=True)
    names = {id(rows): name for name, rows in sharded.rows.items()}
    optimizer.state.clear()
    for group, settings in zip(optimizer.param_groups, states["param_groups"], strict=True):
        for parameter, number in zip(group["params"], settings["params"], strict=True):
            shape = sharded.shapes[names[id(parameter)]]
            for key, value in states["state"].get(number, {}).items():
                rows = sharded.rows_of(value) if isinstance(value, Tensor) and value.shape == shape else value
                copied = copier_of(optimizer) if rows is not value else None
                optimizer.state[parameter][key] = (copied or Tensor.clone)(rows) if isinstance(rows, Tensor) else rows
        group.update({key: value for key, value in settings.items() if key != "params"})


class _Problem(NamedTuple):
    """The reason why writing failed, equal on all ranks. ``failed_rank`` is the lowest rank that ran out of memory."""

    text: str
    failed_rank: int | None = None


def _write(workload: Workload, backend: Backend, folder: Path) -> _Problem | None:
    """Write the shards of all ranks. If one rank fails, return the problem on all ranks; otherwise return ``None``."""
    position = Position(phase="checkpoint")

    def read() -> dict[str, Any]:
        failpoint("checkpoint")
        return _rows_of(workload)

    tensors = attempt_collectively(read, backend, position, workload.ranks)
    if isinstance(tensors, OomEvent):
        return _of_memory(told_by_all(tensors, workload.ranks), workload.ranks)
    try:
        workload.ranks.exchange(lambda: write_shards(tensors, storage_writer=FileSystemWriter(folder)))
    except CheckpointException as error:
        failures = {rank: failure[0] for rank, failure in error.failures.items()}
        own = failures.get(workload.ranks.rank)
        failed_rank = workload.ranks.first_of(own is not None and backend.oom_family(own) is not None)
        return _Problem("; ".join(f"rank {rank}: {failure}" for rank, failure in failures.items()), failed_rank)
    return None


def _of_memory(event: OomEvent, ranks: Ranks) -> _Problem:
    rank = ranks.rank if event.rank is None else event.rank
    return _Problem(f"memory ran out on rank {rank}: {event.raw_text}", rank)


# -- the folder --------------------------------------------------------------------------------------------------------


def _begin(root: Path, temporary: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root)
    temporary.mkdir()


def _finish(temporary: Path, folder: Path, random_state: Any, progress: dict[str, Any]) -> None:
    # The folder is renamed after all ranks have written, their files are on the disk and the manifest lists them.
    _write_tensors(temporary / "random.pt", random_state)
    write_atomically(temporary / "progress.json", json.dumps(progress).encode())
    names = ["random.pt", "progress.json", *sorted(f"{_SHARDS}/{one.name}" for one in (temporary / _SHARDS).iterdir())]
    manifest = {name: _facts(temporary / name) for name in names}
    write_atomically(temporary / "manifest.json", json.dumps(manifest).encode())
    sync(temporary / _SHARDS)
    sync(temporary)
    _put_in_place(temporary, folder)


def _on_first(ranks: Ranks, backend: Backend, work: Callable[[], None]) -> _Problem | None:
    """Run ``work`` on rank 0. If it fails, return the problem on all ranks; otherwise return ``None``."""
    problem: _Problem | None = None
    if ranks.rank == 0:
        try:
            event = attempt(work, backend, Position(phase="checkpoint"))
            problem = None if event is None else _of_memory(event, ranks)
        except OSError as error:
            problem = _Problem(error.strerror or str(error))
    return ranks.gather(problem)[0]
