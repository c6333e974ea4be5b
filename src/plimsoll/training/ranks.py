"""The agreements of the ranks before the first step: device, job, checkpoint, random seeds and restarts.

All ranks must have the same job, plan, data and code, which is checked before anything is built. They resume from the
checkpoint that rank 0 has chosen. Each rank has its own random state, because otherwise the dropout masks of all parts
of a batch would be the same. Only rank 0 writes to the run directory, and the other ranks read it. With several
machines, the run directory must be on a shared file system.

Does NOT start processes: see `plimsoll.distributed.launch`, and torchrun.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch

from plimsoll.device.base import Backend
from plimsoll.device.cpu.cgroup import oom_kill_count
from plimsoll.device.probe import versions
from plimsoll.device.process_exit import start_ticks
from plimsoll.distributed.ranks import Ranks
from plimsoll.errors import DeviceError, FragmentedHeapError, InputError, OutOfMemoryError
from plimsoll.processes.children import SUPERVISOR, is_rank
from plimsoll.records.job import Job
from plimsoll.records.plan import Plan
from plimsoll.records.run import DeathLine, OomEvent, StartLine
from plimsoll.step.oom_boundary import Position, attempt
from plimsoll.training import checkpoint
from plimsoll.training.run_directory import RunDirectory

T = TypeVar("T")

_SEED_STRIDE = 1_000_003  # a prime, so that the seeds of ranks do not collide with consecutive seeds of users
_BY_RANK = "by_rank"


def device_of_rank(device: str, ranks: Ranks) -> str:
    """Return the device of this rank. On GPUs, each rank gets a different GPU of its machine.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        ranks: all ranks.

    Raises:
        DeviceError: if some ranks have no GPU.
    """
    if ranks.is_alone:
        return device
    num_gpus = torch.cuda.device_count() if device == "cuda" else 0
    own = f"cuda:{ranks.local_rank}" if ranks.local_rank < num_gpus else None
    have = ranks.gather("" if device == "cpu" else own)
    lacking = [rank for rank, one in enumerate(have) if one is None]
    on_cpu = [rank for rank, one in enumerate(have) if one == ""]
    if lacking:
        raise DeviceError(
            f"ranks {_listed(lacking)} of {ranks.world_size} have no GPU of their own (this machine has {num_gpus}): "
            "start as many ranks on each machine as it has GPUs, or set device: cpu"
        )
    if on_cpu and len(on_cpu) < ranks.world_size:
        raise DeviceError(
            f"ranks {_listed(on_cpu)} of {ranks.world_size} have no GPU, but others do: use machines of one kind, "
            "or set device: cpu"
        )
    return have[ranks.rank] or device


def require_same(ranks: Ranks, directory: RunDirectory, job: Job) -> None:
    """Check that all ranks have the same job, plan, data, code and libraries.

    Args:
        ranks: all ranks.
        directory: the run directory.
        job: the job.

    Raises:
        InputError: if a rank differs from rank 0; the error names the rank and the differences.
    """
    if ranks.is_alone:
        return
    facts = {
        **{name: text for name, text in versions().items() if name in {"torch", "transformers"}},
        "the code of plimsoll": _digest_of(sorted(Path(__file__).parents[1].rglob("*.py"))),
        "the code of the model": _code_of(job),
        "job.yaml": _digest_of([directory.job]),
        "plan.json": _digest_of([directory.plan]),
        "the prepared data": _digest_of([directory.prepared]),
    }
    every = ranks.gather(facts)
    different = {
        rank: [name for name in facts if other.get(name) != every[0].get(name)] for rank, other in enumerate(every)
    }
    lines = [
        f"rank {rank} differs in {', '.join(f'{name} ({_both(every, rank, name)})' for name in names)}"
        for rank, names in different.items()
        if names
    ]
    if lines:
        raise InputError(
            f"{ranks.world_size} ranks cannot train together: {'; '.join(lines)}: give each the same code and the same "
            "run directory"
        )


def chosen(ranks: Ranks, saved: checkpoint.Checkpoint | None, root: Path, marks: dict[str, str]) -> Any:
    """Return the checkpoint that rank 0 has chosen, opened by this rank; ``None`` to start from the beginning.

    Args:
        ranks: all ranks.
        saved: the checkpoint that rank 0 has chosen, or ``None`` to start from the beginning; ignored on other ranks.
        root: folder of all checkpoints.
        marks: fingerprint of the job, as for `plimsoll.training.checkpoint.load`.
    """
    step = ranks.gather(None if saved is None else saved.step)[0]
    return saved if ranks.rank == 0 or step is None else checkpoint.load(root, marks, step)


def seed_rank(seed: int, ranks: Ranks) -> None:
    """Seed the random number generators of a rank other than 0."""
    if ranks.rank:
        own = (seed + _SEED_STRIDE * ranks.rank) % 2**63
        torch.manual_seed(own)
        random.seed(own)
        np.random.seed(own % 2**32)


def random_states(backend: Backend, ranks: Ranks) -> Any:
    """Return the random states of all ranks, for a checkpoint.

    Raises:
        PeerOutOfMemory: if memory ran out on another rank.
    """
    own = backend.random_state()
    if ranks.is_alone:
        return own
    file = io.BytesIO()
    torch.save(own, file)
    every = ranks.gather_agreed(file.getvalue())
    return {_BY_RANK: [torch.load(io.BytesIO(content), map_location="cpu", weights_only=True) for content in every]}


def restore_random_state(backend: Backend, states: Any, ranks: Ranks, seed: int) -> None:
    """Restore the random state of this rank from a checkpoint.

    Args:
        backend: backend of the device.
        states: result of `random_states`.
        ranks: all ranks.
        seed: seed for a rank that has no state in the checkpoint.
    """
    every = states.get(_BY_RANK, [states])
    if ranks.rank < len(every):
        backend.restore_random_state(every[ranks.rank])
    else:
        seed_rank(seed, ranks)


def starts_since(path: Path, begun_at: float) -> int:
    """Return how often a training process has started in a run directory since ``begun_at``, a Unix time in seconds."""
    if not (path / "prepared.json").is_file():
        return 0
    starts = [line for line in RunDirectory(path).lines() if isinstance(line, StartLine)]
    return sum(datetime.fromisoformat(line.wall_time).timestamp() >= begun_at for line in starts)


def launcher_age_seconds() -> float:
    """Return the age in seconds of the process that started the ranks: torchrun's agent, which survives restarts.

    An age can be compared between machines, whose clocks may differ. (psutil's `create_time` has whole seconds.)
    """
    launcher = _launcher()
    ticks = start_ticks(launcher.pid)
    if ticks is None:  # not Linux
        return time.time() - launcher.create_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _launcher() -> psutil.Process:
    """Return the nearest ancestor process that does not belong to this rank, such as torchrun's agent.

    A script that torchrun starts, and that starts this process, belongs to the rank.
    """
    above = psutil.Process().parents()
    for one in above:
        with suppress(psutil.Error):  # a process of another user
            if "TORCHELASTIC_RUN_ID" in one.environ():
                continue
        return one
    return psutil.Process()


def may_begin_anew() -> bool:
    """Return whether Plimsoll's supervisor or torchrun will start a new process if this process asks by exit code."""
    most, done = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return SUPERVISOR in os.environ or most > done


def outside_of_steps(work: Callable[[], T], backend: Backend) -> T:
    """Run work that cannot be repeated in this process, so that a memory error requires a restart from a checkpoint.

    Args:
        work: the function to call.
        backend: backend of the device.

    Returns:
        The result of ``work``.

    Raises:
        FragmentedHeapError: if memory ran out, and a supervisor will start a new process on request.
        OutOfMemoryError: if memory ran out, and there is no supervisor.
    """
    outcome = attempt(work, backend, Position())
    if not isinstance(outcome, OomEvent):
        return outcome
    text = f"memory ran out outside of a step ({outcome.raw_text})"
    if may_begin_anew():
        raise FragmentedHeapError(f"{text}: start a new process (`plimsoll train` does this automatically)")
    raise OutOfMemoryError(f"{text}: give a larger budget, or use --resume when more memory is free")


def oom_kills_by_machine(ranks: Ranks) -> dict[str, int]:
    """Return the number of OOM kills by host name, for the machines that count them.

    The result is empty if this process is not a rank, because the supervisor then counts the kills.
    """
    if not is_rank():
        return {}
    kills = oom_kill_count()
    told = ranks.gather((socket.gethostname(), None if kills is None else kills.number))
    return {name: number for name, number in told if number is not None}


def begun_again(ranks: Ranks, directory: RunDirectory) -> tuple[int | None, int | None]:
    """Record that torchrun has restarted all ranks, and choose the fallback to start with.

    Args:
        ranks: all ranks.
        directory: the run directory.

    Returns:
        If the kernel has killed a rank for memory since the last start: the next fallback, and the fallback that was
        too large. Otherwise ``(None, None)``: start with the fallback of the checkpoint.
    """
    kills = oom_kills_by_machine(ranks)
    fallback = _note_restart(directory, kills) if ranks.rank == 0 else None
    fallback = ranks.gather(fallback)[0]
    return fallback, None if fallback is None else max(fallback - 1, 0)


def _note_restart(directory: RunDirectory, kills: dict[str, int]) -> int | None:
    """Append the restart to the metrics, and return the next fallback if a rank was killed for memory."""
    lines, fallbacks = directory.lines(), Plan.load(directory.plan).fallbacks
    before = next((line.oom_kills for line in reversed(lines) if isinstance(line, StartLine)), {})
    grown = {name: kills.get(name, 0) - number for name, number in before.items() if kills.get(name, 0) > number}
    in_force = min(directory.fallback_in_force() or 0, len(fallbacks) - 1)
    following = min(in_force + 1, len(fallbacks) - 1) if grown else in_force
    where = ", ".join(f"{number} on {name}" for name, number in grown.items())
    directory.append(
        DeathLine(
            time_seconds=lines[-1].time_seconds if lines else 0.0,
            signal="rank lost",
            evidence=f"the kernel has killed processes for memory since the last start: {where}"
            if grown
            else "torchrun has restarted all ranks; no machine counts an OOM kill",
            restarted_from_step=directory.last_saved_step(),
            next_fallback=following,
            next_micro_batch=fallbacks[following].micro_batch,
        )
    )
    return following if grown else None


def prepared_by_first(
    ranks: Ranks, path: Path, prepare: Callable[[], int], plan_again: Callable[[], int]
) -> tuple[int, int]:
    """Prepare the run directory, its data and its plan on rank 0, unless torchrun has restarted the ranks.

    It is a restart if a training process has started in this directory since the first torchrun agent was started. The
    restart counts of torchrun cannot be used instead, because each agent counts only some of the restarts.

    Args:
        ranks: all ranks.
        path: the run directory.
        prepare: prepares the run directory and returns an exit code.
        plan_again: plans again after a restart with another number of ranks, and returns an exit code.

    Returns:
        The exit code of rank 0, and how often this training has started before.
    """
    begun_at = time.time() - max(ranks.gather(launcher_age_seconds()))
    num_starts: int = ranks.gather(starts_since(path, begun_at))[0]

    def made() -> int:
        if not num_starts:
            return prepare()
        return 0 if Job.from_yaml(path / "job.yaml").ranks == ranks.world_size else plan_again()

    code = ranks.on_first("prepared", made)
    return ranks.gather(code or 0)[0], num_starts


def _both(every: list[dict[str, str]], rank: int, name: str) -> str:
    return f"{every[rank].get(name)}, rank 0 has {every[0].get(name)}"


def _code_of(job: Job) -> str:
    """Return a digest of the source file of a user-defined model, or ``"none"``."""
    if not isinstance(job.model, str) or ":" not in job.model:
        return "none"
    found = importlib.util.find_spec(job.model.partition(":")[0])
    return "none" if found is None or found.origin is None else _digest_of([Path(found.origin)])


def _digest_of(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
