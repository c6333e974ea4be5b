"""The processes that train one model, each with its part of every batch: who they are, and how they agree.

    with joined() as ranks:               # of torchrun's environment: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...
        if ranks.agree(memory_ran_out):   # True on all of them, if it is on one
            ...

A rank that dies takes its connections with it: the others learn it in their next exchange, at once, and one that stands
still after ``PLIMSOLL_RANKS_TIMEOUT`` seconds (600). Both end this process with `RankLostError`; torchrun, or
`plimsoll train`, begins all ranks again from the newest checkpoint. Does NOT cover pipeline or tensor parallelism, and
ranks on devices of different kinds.

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
    """Memory ran out on another rank, inside of a collective; for `plimsoll.step.oom_boundary` it ran out here, too.

    ``rank`` is the first on which it did, where that is known.
    """

    family = "another rank"

    def __init__(self, rank: int | None = None, text: str = "") -> None:
        super().__init__(text or f"memory ran out on {'another rank' if rank is None else f'rank {rank}'}")
        self.rank = rank


class Ranks:
    """Which of the processes this is. Made by `joined`; without arguments, of a training that is alone.

    Args:
        rank: this process, from 0.
        world_size: how many there are, on all machines.
        local_rank: this process among those of this machine, which is also the number of its GPU.
        store: what is told there can be waited for without a limit; ``None`` where there is one process.
        timeout_seconds: after which a rank that does not answer is lost.
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
        self._tables: dict[int, Tensor] = {}  # allocated once, so that nothing fails where others wait
        self._told = None if self.is_alone else torch.zeros(3, dtype=torch.int64)

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self.world_size == 1

    def agree(self, flag: bool, place: int = 0) -> bool:
        """Return whether ``flag`` is set on any rank; all must ask (see `first_of`)."""
        return self.first_of(flag, place) is not None

    def first_of(self, flag: bool, place: int = 0) -> int | None:
        """Return the first rank on which ``flag`` is set, ``None`` if it is on none; all must ask.

        Args:
            flag: what this rank says.
            place: where it asks, the same on all ranks, unless one of them sets its flag.

        Raises:
            InputError: on all ranks, if none sets its flag and they ask at different places.
        """
        # Nothing is exchanged before all ranks have said how it went: reduced inside backward, gradients would leave
        # ranks waiting for one that ran out of memory. The number was allocated beforehand, so that nothing can fail on
        # one rank between what it says and what all do. It goes over gloo, also where gradients go over NCCL.
        told = self._told
        if told is None:
            return self.rank if flag else None
        told[0], told[1], told[2] = (self.world_size - self.rank) * flag, place, -place
        self.exchange(lambda: dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group))
        highest, last, first = told.tolist()
        if not highest and last != -first:
            raise InputError(
                f"the {self.world_size} ranks are not at the same place of the model that is shared out over them: for "
                "some samples it leaves out blocks, or parameters of them; train it without fully_shard"
            )
        return self.world_size - int(highest) if highest else None

    def require_all(self, place: int = 0) -> None:
        """Ask, inside of a collective and before it exchanges something, whether all got here.

        Raises:
            PeerOutOfMemory: if memory ran out on a rank that did not.
            InputError: if they are at different places (see `agree`).
        """
        rank = self.first_of(False, place)
        if rank is not None:
            raise PeerOutOfMemory(rank)

    def add_up(self, numbers: Tensor) -> Tensor:
        """Sum a tensor on the CPU over the ranks, in place: it must be of the same size on each."""
        if not self.is_alone:
            self.exchange(lambda: dist.all_reduce(numbers, group=self._group))
        return numbers

    def each(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank, in the order of the ranks; all give equally many."""
        table = self._tables.get(len(numbers))
        if table is None:
            table = self._tables[len(numbers)] = torch.zeros(self.world_size, len(numbers), dtype=torch.float64)
        table.zero_()
        for place, number in enumerate(numbers):
            table[self.rank, place] = number
        rows: list[list[float]] = self.add_up(table).tolist()
        return rows

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in the order of the ranks; of anything that can be pickled, and small."""
        if self.is_alone:
            return [value]
        values: list[Any] = [None] * self.world_size
        self.exchange(lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def gather_agreed(self, value: T) -> list[T]:
        """Return the value of every rank, of any size: memory for it is taken before each exchange is agreed on.

        Raises:
            PeerOutOfMemory: if memory ran out on another rank before it got here.
        """
        if self.is_alone:
            return [value]
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self.require_all()
        sizes = [int(size) for (size,) in self.each([len(own)])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(own)] = own
        every = [torch.empty_like(padded) for _ in sizes]
        torch.empty(len(padded) * self.world_size + _EXCHANGE_BYTES, dtype=torch.uint8)  # what gloo takes for itself
        self.require_all()
        self.exchange(lambda: dist.all_gather(every, padded, group=self._group))
        return [pickle.loads(one[:size].numpy().tobytes()) for one, size in zip(every, sizes, strict=True)]

    def reduce(self, gradient: Tensor) -> None:
        """Sum a contiguous tensor on the device over the ranks, in place."""
        self.exchange(lambda: dist.all_reduce(gradient))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank what rank 0 has in these tensors, which are of the same shapes on each."""
        for tensor in tensors if not self.is_alone else ():
            whole = tensor.detach().contiguous()
            self.exchange(lambda whole=whole: dist.broadcast(whole, src=0))  # type: ignore[misc]
            tensor.detach().copy_(whole)

    def on_first(self, name: str, work: Callable[[], T]) -> T | None:
        """Have rank 0 do some work, which may take hours, while the others wait for it; those return ``None``.

        Args:
            name: what tells this work from any other that is done so.
            work: what is to be done; where rank 0 fails in it and ends, the others are lost.
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
        """Let go of the connections: what still holds this object must not keep them until the interpreter ends."""
        self._group = self._store = None

    def exchange(self, work: Callable[[], T]) -> T:
        """Do something that waits for the other ranks; where it fails, one of them is lost."""
        try:
            return work()
        except RuntimeError as error:
            reason = _reason(error)
            is_closed = any(words in reason for words in _CLOSED)
            how = "ended" if is_closed else f"ended, or did not answer for {self.timeout_seconds:g} s"
            raise RankLostError(
                f"rank {self.rank} of {self.world_size} lost another rank, which {how} ({reason}): see what that one "
                "said; the checkpoints are intact, go on with --resume (torchrun: --max-restarts does it by itself; "
                f"{_TIMEOUT} sets the seconds)"
            ) from None


@contextmanager
def joined() -> Iterator[Ranks]:
    """Meet the other ranks that torchrun has started, while the block runs; alone where it has not.

    Raises:
        InputError: if the environment is incomplete, or the ranks did not meet.
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
            f"rank {rank} of {world_size} did not meet the others at {where} ({_reason(error)}; they have "
            f"{timeout_seconds:g} s, see {_TIMEOUT}): check that all {world_size} are started with the same address, "
            "that it can be reached from each machine, and that the port is free"
        ) from None
    try:
        yield ranks
    finally:
        ranks.leave()
        dist.destroy_process_group()


def _met(rank: int, world_size: int, timeout_seconds: float) -> Store:
    """Return a store that only the ranks of this start have.

    torchrun's own is kept through all restarts, with what those have left there that ended, and its count of restarts
    is each machine's own. So each rank says hello with a word that it has made up, and the first, which answers until
    all have heard it, tells under which name they go on.

    Raises:
        RuntimeError, ValueError: if they do not meet.
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
    """A number of torchrun's environment."""
    text = os.environ.get(name, "0")
    if not text.isdecimal() or int(text) < least or (below is not None and int(text) >= below):
        numbers = f"from {least} to {below - 1}, for WORLD_SIZE={below}" if below is not None else f"from {least}"
        raise InputError(
            f"{name}={text!r} in the environment is no number {numbers}: start the ranks with torchrun, or with "
            "plimsoll train --nproc, which set it"
        )
    return int(text)


def _reason(error: Exception) -> str:
    """The first sentence of what torch says, without the place in its sources."""
    return re.sub(r"^\[[^\]]*\]\s*", "", str(error)).partition("\n")[0].partition(". ")[0][:300]


def _timeout_seconds() -> float:
    text = os.environ.get(_TIMEOUT, str(DEFAULT_TIMEOUT_SECONDS))
    try:
        timeout_seconds = float(text)
    except ValueError:
        timeout_seconds = 0
    if not 0 < timeout_seconds < 1e6:
        raise InputError(f"{_TIMEOUT}={text!r} is no number of seconds: give for example 600")
    return timeout_seconds


def _duration(timeout_seconds: float) -> timedelta:
    return timedelta(seconds=timeout_seconds)
