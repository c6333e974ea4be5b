"""Places at which a test can make memory run out for real: ``with armed("backward", 3): ...``.

An armed point requests 2^60 bytes, so the allocator raises its real out-of-memory error.
`PLIMSOLL_FAILPOINTS="backward@3,optimizer@7"` arms points in a subprocess. Each entry has the name of a point and the
number of the call of this point that fails, counted from 1. An unarmed failpoint costs one look-up in an empty
dictionary.

There are no points inside a model: use a forward or gradient hook that calls `exhaust_memory`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import torch

from plimsoll.errors import InputError
from plimsoll.records.run import Phase

_ABSURD_BYTES = 1 << 60
_armed: dict[str, set[int]] = {}
_passed: dict[str, int] = {}


def failpoint(name: str) -> None:
    """Run out of memory here if this call of ``name`` is armed."""
    if not _armed:
        return
    hits = _armed.get(name)
    if hits is None:
        return
    _passed[name] = _passed.get(name, 0) + 1
    if _passed[name] in hits:
        exhaust_memory()


def exhaust_memory() -> None:
    """Request more memory than any machine has, so that the allocator raises its real error (CUDA's on a GPU)."""
    torch.empty(_ABSURD_BYTES, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def armed(name: str, *hits: int) -> Iterator[None]:
    """Make the given calls of the point ``name`` (counted from 1) run out of memory inside the block."""
    _armed[name] = set(hits)
    _passed[name] = 0
    try:
        yield
    finally:
        _armed.pop(name, None)


def arm_from_environment() -> None:
    """Arm the points that `PLIMSOLL_FAILPOINTS` names.

    Raises:
        InputError: if the variable is not of the form ``name@call,...``.
    """
    for entry in filter(None, os.environ.get("PLIMSOLL_FAILPOINTS", "").split(",")):
        name, _, hit = entry.partition("@")
        if name not in get_args(Phase) or not hit.isdecimal() or hit == "0":
            raise InputError(
                f"PLIMSOLL_FAILPOINTS entry {entry!r} is not of the form name@passage: write for example backward@3 "
                f"(the names are {', '.join(get_args(Phase))}; passages are counted from 1)"
            )
        _armed.setdefault(name, set()).add(int(hit))
        _passed.setdefault(name, 0)
