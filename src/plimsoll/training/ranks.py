"""What the ranks of one training settle before its first step, and what each has of its own.

They must have the same job, plan, data and code, which is compared before anything is built; they go on from the
checkpoint that rank 0 has chosen; and each draws random numbers of its own, since with those of rank 0 the dropout
masks of all parts of a batch would be the same. Only rank 0 writes: the others read the run directory, which on several
machines must be on a file system that all of them have.

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

_SEED_STRIDE = 1_000_003  # a prime: seeds of ranks and seeds of users do not meet by counting
_BY_RANK = "by_rank"


def device_of_rank(device: str, ranks: Ranks) -> str:
    """Return the device of this rank: its own GPU, where the training is on GPUs.

    Raises:
        DeviceError: if some ranks are without one.
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
            f"ranks {_listed(on_cpu)} of {ranks.world_size} have no GPU, and others have: use machines of one kind, "
            "or set device: cpu"
        )
    return have[ranks.rank] or device


def require_same(ranks: Ranks, directory: RunDirectory, job: Job) -> None:
    """Compare what the ranks are about to train.

    Raises:
        InputError: if one has something else than rank 0; it is named, and what differs.
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
    """Return the checkpoint that rank 0 has found (``saved`` there), read by this rank."""
    step = ranks.gather(None if saved is None else saved.step)[0]
    return saved if ranks.rank == 0 or step is None else checkpoint.load(root, marks, step)


def seed_rank(seed: int, ranks: Ranks) -> None:
    """Give a rank other than 0 random numbers of its own."""
    if ranks.rank:
        own = (seed + _SEED_STRIDE * ranks.rank) % 2**63
        torch.manual_seed(own)
        random.seed(own)
        np.random.seed(own % 2**32)


def random_states(backend: Backend, ranks: Ranks) -> Any:
    """Return what a checkpoint keeps of random numbers: the state of every rank.

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
    """Put back this rank's state; one that was not there when the checkpoint was written begins with a seed."""
    every = states.get(_BY_RANK, [states])
    if ranks.rank < len(every):
        backend.restore_random_state(every[ranks.rank])
    else:
        seed_rank(seed, ranks)


def starts_since(path: Path, begun_at: float) -> int:
    """How often a training has begun in a run directory since then, in seconds of the clock."""
    if not (path / "prepared.json").is_file():
        return 0
    starts = [line for line in RunDirectory(path).lines() if isinstance(line, StartLine)]
    return sum(datetime.fromisoformat(line.wall_time).timestamp() >= begun_at for line in starts)


def launcher_age_seconds() -> float:
    """How long ago the process was started that has started the ranks: torchrun's agent, which stays through restarts.

    Clocks of machines differ, but not in how fast they go. (psutil's `create_time` is of whole seconds.)
    """
    launcher = _launcher()
    ticks = start_ticks(launcher.pid)
    if ticks is None:  # not Linux
        return time.time() - launcher.create_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _launcher() -> psutil.Process:
    """The nearest process above this one that is no rank: between them may be a script, begun anew with the rank."""
    above = psutil.Process().parents()
    for one in above:
        with suppress(psutil.Error):  # somebody else's
            if "TORCHELASTIC_RUN_ID" in one.environ():
                continue
        return one
    return psutil.Process()


def may_begin_anew() -> bool:
    """Whether somebody starts a new process for one that asks for it: our supervisor, or torchrun."""
    most, done = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return SUPERVISOR in os.environ or most > done


def outside_of_steps(work: Callable[[], T], backend: Backend) -> T:
    """Do what cannot be done again in this process, where its checkpoints are the way back.

    Raises:
        FragmentedHeapError: if memory ran out, and somebody starts a new process for one that asks for it.
        OutOfMemoryError: if nobody does.
    """
    outcome = attempt(work, backend, Position())
    if not isinstance(outcome, OomEvent):
        return outcome
    text = f"memory ran out outside of a step ({outcome.raw_text})"
    if may_begin_anew():
        raise FragmentedHeapError(f"{text}: start a new process (`plimsoll train` does it by itself)")
    raise OutOfMemoryError(f"{text}: give a larger budget, or go on with --resume when there is more memory")


def oom_kills_by_machine(ranks: Ranks) -> dict[str, int]:
    """How many processes the kernel has killed for memory on each machine that counts them, by its name.

    Nothing without torchrun: then the supervisor counts them.
    """
    if not is_rank():
        return {}
    kills = oom_kill_count()
    told = ranks.gather((socket.gethostname(), None if kills is None else kills.number))
    return {name: number for name, number in told if number is not None}


def begun_again(ranks: Ranks, directory: RunDirectory) -> tuple[int | None, int | None]:
    """Note that torchrun has started all ranks again.

    Returns:
        the fallback to begin with, and the one that is known to kill, where the kernel has killed a rank for memory
        since the last start; else ``None`` twice: as the checkpoint says.
    """
    kills = oom_kills_by_machine(ranks)
    fallback = _note_restart(directory, kills) if ranks.rank == 0 else None
    fallback = ranks.gather(fallback)[0]
    return fallback, None if fallback is None else max(fallback - 1, 0)


def _note_restart(directory: RunDirectory, kills: dict[str, int]) -> int | None:
    """Write down that the ranks were started again; returns the next fallback if it was for want of memory."""
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
            else "torchrun has started all ranks again; no machine counts a kill for memory",
            restarted_from_step=directory.last_saved_step(),
            next_fallback=following,
            next_micro_batch=fallbacks[following].micro_batch,
        )
    )
    return following if grown else None


def prepared_by_first(
    ranks: Ranks, path: Path, prepare: Callable[[], int], plan_again: Callable[[], int]
) -> tuple[int, int]:
    """Have rank 0 make the run directory, with its data and its plan, unless torchrun has started the ranks again.

    That is so where the training has begun in this directory since the first of its agents was started. What torchrun
    counts says less: each agent counts for itself, and only some of the restarts.

    Args:
        ranks: all of them.
        path: the run directory.
        prepare: makes it; returns an exit code.
        plan_again: makes the plan of another number of ranks, where that many have been started again.

    Returns:
        the exit code of what rank 0 did, on all of them; and how often the training has begun that goes on, or 0.
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
    """What a model of the user's own is made by."""
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
