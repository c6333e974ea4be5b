"""Data-parallel ranks: each rank processes its part of every batch, and all ranks agree on each decision.

    with joined() as ranks:               # reads torchrun's environment: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...
        if ranks.agree(memory_ran_out):   # True on all ranks if it is True on at least one
            ...

If a rank dies, its connections close, and the next collective of the other ranks fails at once. If a rank hangs, the
collective fails after ``PLIMSOLL_RANKS_TIMEOUT`` seconds (600). Both end this process with `RankLostError`; torchrun or
`plimsoll train` then restarts all ranks from the newest checkpoint. Does not cover pipeline parallelism, tensor
parallelism, or ranks on devices of different types.

Source: https://docs.pytorch.org/docs/stable/distributed.html and https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import os
import pickle
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from plimsoll.errors import InputError, RankLostError

T = TypeVar("T")

DEFAULT_TIMEOUT_SECONDS = 600
_TIMEOUT = "PLIMSOLL_RANKS_TIMEOUT"
_POLL_SECONDS = 0.05
_EXCHANGE_BYTES = 2 << 20
_CLOSED = ("closed by peer", "reset by peer", "Broken pipe")


class PeerOutOfMemory(MemoryError):
    """Memory ran out on another rank during a collective. `plimsoll.step.oom_boundary` treats it as a local OOM.

    Attributes:
        rank: the lowest rank that ran out of memory, or ``None`` if unknown.
    """

    family = "another rank"

    def __init__(self, rank: int | None = None, text: str = "") -> None:
        super().__init__(text or f"memory ran out on {'another rank' if rank is None else f'rank {rank}'}")
        self.rank = rank


class Ranks:
    """The ranks of a training run, as seen from this rank. ``Ranks()`` is a single process without other ranks.

    `joined` makes the object from torchrun's environment.

    Args:
        rank: the rank of this process, from 0.
        world_size: the number of ranks on all machines.
        local_rank: the rank of this process on its machine, which is also the index of its GPU.
        store: a key-value store with which ranks wait for rank 0 without a time limit; ``None`` for a single rank.
        timeout_seconds: time after which a rank that does not answer counts as lost.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        store: Store | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self.timeout_seconds = timeout_seconds
        self._store = store
        self._group = None if self.is_alone else dist.new_group(backend="gloo", timeout=_duration(timeout_seconds))
        self._tables: dict[int, Tensor] = {}  # allocated once: memory must not run out while other ranks wait
        self._told = None if self.is_alone else torch.zeros(3, dtype=torch.int64)

    @property
    def is_alone(self) -> bool:
        """True if this is the only rank."""
        return self.world_size == 1

    def agree(self, flag: bool, place: int = 0) -> bool:
        """Return whether ``flag`` is true on any rank. All ranks must call this method; see `first_of`."""
        return self.first_of(flag, place) is not None

    def first_of(self, flag: bool, place: int = 0) -> int | None:
        """Return the lowest rank on which ``flag`` is true; ``None`` if it is false on all. All ranks must call this.

        Args:
            flag: the flag of this rank.
            place: a number that identifies the call site in the code. It must be equal on all ranks, unless the flag of
                a rank is true.

        Raises:
            InputError: on all ranks, if all flags are false and ``place`` differs between ranks.
        """
        # Ranks agree before they exchange gradients. If gradients were reduced during backward, the other ranks would
        # wait for a rank that ran out of memory. The tensor was allocated in advance, so this call cannot itself run
        # out of memory. It uses gloo, even if gradients use NCCL.
        told = self._told
        if told is None:
            return self.rank if flag else None
        told[0], told[1], told[2] = (self.world_size - self.rank) * flag, place, -place
        self.exchange(lambda: dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group))
        highest, last, first = told.tolist()
        if not highest and last != -first:
            raise InputError(
                f"the {self.world_size} ranks are in different blocks of the sharded model: it skips blocks or "
                "parameters for some samples, which sharding does not allow; train it without fully_shard"
            )
        return self.world_size - int(highest) if highest else None

    def require_all(self, place: int = 0) -> None:
        """Check, before a collective exchanges data, that all ranks have reached this call site.

        Raises:
            PeerOutOfMemory: if a rank ran out of memory before it reached this call site.
            InputError: if the ranks are at different call sites (see `first_of`).
        """
        rank = self.first_of(False, place)
        if rank is not None:
            raise PeerOutOfMemory(rank)

    def add_up(self, numbers: Tensor) -> Tensor:
        """Sum a CPU tensor over the ranks, in place, and return it. Its shape must be the same on all ranks."""
        if not self.is_alone:
            self.exchange(lambda: dist.all_reduce(numbers, group=self._group))
        return numbers

    def each(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return a list of the ``numbers`` of each rank, in the order of the ranks. All must have the same length."""
        table = self._tables.get(len(numbers))
        if table is None:
            table = self._tables[len(numbers)] = torch.zeros(self.world_size, len(numbers), dtype=torch.float64)
        table.zero_()
        for place, number in enumerate(numbers):
            table[self.rank, place] = number
        rows: list[list[float]] = self.add_up(table).tolist()
        return rows

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in the order of the ranks. Values must be small and picklable."""
        if self.is_alone:
            return [value]
        values: list[Any] = [None] * self.world_size
        self.exchange(lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def gather_agreed(self, value: T) -> list[T]:
        """Return the values of all ranks, which may be large.

        Each rank allocates memory before the ranks agree to start an exchange, so that no rank waits for a failed rank.

        Raises:
            PeerOutOfMemory: if memory ran out on another rank before the exchange.
        """
        if self.is_alone:
            return [value]
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self.require_all()
        sizes = [int(size) for (size,) in self.each([len(own)])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(own)] = own
        every = [torch.empty_like(padded) for _ in sizes]
        torch.empty(len(padded) * self.world_size + _EXCHANGE_BYTES, dtype=torch.uint8)  # as much as gloo will allocate
        self.require_all()
        self.exchange(lambda: dist.all_gather(every, padded, group=self._group))
        return [pickle.loads(one[:size].numpy().tobytes()) for one, size in zip(every, sizes, strict=True)]

    def reduce(self, gradient: Tensor) -> None:
        """Sum a contiguous tensor on the device over the ranks, in place."""
        self.exchange(lambda: dist.all_reduce(gradient))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy these tensors from rank 0 to every rank. Their shapes must be equal on all ranks."""
        for tensor in tensors if not self.is_alone else ():
            whole = tensor.detach().contiguous()
            self.exchange(lambda whole=whole: dist.broadcast(whole, src=0))  # type: ignore[misc]
            tensor.detach().copy_(whole)

    def on_first(self, name: str, work: Callable[[], T]) -> T | None:
        """Run ``work`` on rank 0, and return its result. Other ranks wait, for hours if necessary, and return ``None``.

        Args:
            name: a unique name of this work.
            work: the function to call. If it fails and ends rank 0, the other ranks raise `RankLostError`.
        """
        store = self._store
        if store is None:
            return work()
        if self.rank > 0:
            while not self.exchange(lambda: store.check([name])):
                time.sleep(_POLL_SECONDS)
            return None
        done = work()
        self.exchange(lambda: store.set(name, "done"))
        return done

    def leave(self) -> None:
        """Release the connections, so that references to this object do not keep them open."""
        self._group = self._store = None

    def exchange(self, work: Callable[[], T]) -> T:
        """Run a collective. Raise `RankLostError` if it fails, because a rank was lost."""
        try:
            return work()
        except RuntimeError as error:
            reason = _reason(error)
            is_closed = any(words in reason for words in _CLOSED)
            how = "ended" if is_closed else f"ended, or did not answer for {self.timeout_seconds:g} s"
            raise RankLostError(
                f"rank {self.rank} of {self.world_size} lost another rank, which {how} ({reason}): see the "
                "output of that rank; checkpoints are intact, continue with --resume (torchrun --max-restarts does so "
                f"by itself; {_TIMEOUT} sets the timeout in seconds)"
            ) from None


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the ranks that torchrun started, for the duration of the block. Without torchrun there is a single rank.

    Raises:
        InputError: if the environment is incomplete, or the ranks cannot connect.
    """
    if (os.environ.get("WORLD_SIZE") or "1") == "1" or not os.environ.get("RANK"):
        yield Ranks()
        return
    timeout_seconds = _timeout_seconds()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    world_size = _number("WORLD_SIZE", 1, None)
    rank, local_rank = _number("RANK", 0, world_size), _number("LOCAL_RANK", 0, world_size)
    where = f"{os.environ.get('MASTER_ADDR', 'nowhere')}:{os.environ.get('MASTER_PORT', '?')}"
    try:
        store = _met(rank, world_size, timeout_seconds)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=_duration(timeout_seconds)
        )
        ranks = Ranks(rank, world_size, local_rank, store, timeout_seconds)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"rank {rank} of {world_size} could not connect to the others at {where} within "
            f"{timeout_seconds:g} s, which {_TIMEOUT} sets ({_reason(error)}): check that all "
            f"{world_size} are started with the same address, that every machine can reach it, and that "
            "the port is free"
        ) from None
    try:
        yield ranks
    finally:
        ranks.leave()
        dist.destroy_process_group()


def _met(rank: int, world_size: int, timeout_seconds: float) -> Store:
    """Return a key-value store for the ranks of this start or restart, without keys from earlier starts.

    torchrun's store survives restarts, with old keys in it, and its restart count differs between machines. So each
    rank writes a random word, and rank 0 answers each word with the prefix that all ranks use from then on.

    Raises:
        RuntimeError, ValueError: if the ranks cannot connect.
    """
    meeting, _, _ = next(rendezvous("env://", rank, world_size, timeout=_duration(timeout_seconds)))
    own = uuid.uuid4().hex
    if rank > 0:
        meeting.set(f"hello/{rank}", own)
        store = PrefixStore(meeting.get(f"welcome/{own}").decode(), meeting)
        store.set(f"here/{rank}", "")
        return store
    store, deadline = PrefixStore(own, meeting), time.monotonic() + timeout_seconds
    answered: dict[int, bytes] = {}
    missing = [*range(1, world_size)]
    while missing := [one for one in missing if not store.check([f"here/{one}"])]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing was heard of rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}")
        for one in missing:
            if meeting.check([f"hello/{one}"]) and (hello := meeting.get(f"hello/{one}")) != answered.get(one):
                meeting.set(f"welcome/{hello.decode()}", own)
                answered[one] = hello
        time.sleep(_POLL_SECONDS)
    return store


def _number(name: str, least: int, below: int | None) -> int:
    """Return an integer from torchrun's environment: at least ``least`` and, if given, less than ``below``."""
    text = os.environ.get(name, "0")
    if not text.isdecimal() or int(text) < least or (below is not None and int(text) >= below):
        numbers = f"from {least} to {below - 1}, for WORLD_SIZE={below}" if below is not None else f"from {least}"
        raise InputError(
            f"{name}={text!r} in the environment must be an integer {numbers}: start the ranks with torchrun or "
            "plimsoll train --nproc, which set it"
        )
    return int(text)


def _reason(error: Exception) -> str:
    """Return the first sentence of an error message of torch, without the position in torch's source code."""
    return re.sub(r"^\[[^\]]*\]\s*", "", str(error)).partition("\n")[0].partition(". ")[0][:300]


def _timeout_seconds() -> float:
    text = os.environ.get(_TIMEOUT, str(DEFAULT_TIMEOUT_SECONDS))
    try:
        timeout_seconds = float(text)
    except ValueError:
        timeout_seconds = 0
    if not 0 < timeout_seconds < 1e6:
        raise InputError(f"{_TIMEOUT}={text!r} must be a number of seconds: set it to 600, for example")
    return timeout_seconds


def _duration(timeout_seconds: float) -> timedelta:
    return timedelta(seconds=timeout_seconds)
