"""Corrupted inputs: snapshots and logs with bytes changed, cut, duplicated and recombined.

A test uses some hundred of them, and ``benchmarks/fuzz_explain.py`` any number.
"""

from __future__ import annotations

import gzip
import io
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from plimsoll.diagnose.of_text import diagnosis_of_text
from plimsoll.diagnose.snapshot.of_snapshot import diagnosis_of_snapshot
from plimsoll.errors import PlimsollError
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.report.render import render
from snapshots import FORWARD, MIB, USER, Allocator, training

_SPECIAL = [
    bytes([code])
    for code in b"().NIJKMLUTXBCS\x80\x81\x82\x85\x86\x87\x88\x8a\x8b\x8c\x8d\x8e\x93\x94\x95}]aebusthjqr0129"
]
_NUMBERS = [b"\x00" * 8, b"\xff" * 8, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x00\x00\x00\x80"]
_VALUES = [None, True, -1, 0, 1, 1 << 62, 1 << 63, 1 << 70, 1.5, float("nan"), "", "x", b"", (), [], {}, [[]], [{}]]

_TEXTS = [
    "Traceback (most recent call last):\n",
    '  File "train.py", line 41, in <module>\n    loss.backward()\n',
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 346.00 MiB. GPU 0 has a total capacity of 14.56 GiB "
    "of which 343.81 MiB is free. Including non-PyTorch memory, this process has 14.22 GiB memory in use. Of the "
    "allocated memory 12.84 GiB is allocated by PyTorch, and 1.26 GiB is reserved by PyTorch but unallocated.\n",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 4096 bytes. Error code 12 (Cannot allocate memory)\n",
    "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array with shape (1000000, 1000) and "
    "data type float64\n",
    "terminate called after throwing an instance of 'std::bad_alloc'\n",
    "RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed.\n",
    "Out of memory: Killed process 12 (python) total-vm:9kB, anon-rss:8kB, file-rss:0kB\n",
    "RuntimeError: MPS backend out of memory (MPS allocated: 5.05 GB, max allowed: 6.77 GB).\n",
    "\x1b[31mloss\x1b[0m 3.1\r",
    "\u2028",
    "\x00",
    "9" * 40,
    "step 1 loss 2\n",
]


def seeds() -> list[dict[str, object]]:
    """Return valid snapshots."""
    full = training(2)
    full.oom(64 * MIB, MIB, FORWARD, USER[5])
    small = Allocator()
    small.free(small.alloc(1000, USER[1]), USER[2])
    old = {"segments": [{"device": 0, "address": 1, "total_size": 64, "stream": 0, "blocks": []}]}
    old["segments"][0]["blocks"] = [{"size": 64, "state": "inactive", "history": [{"real_size": 1, "frames": []}]}]
    return [full.as_dict(), small.as_dict(), old, training(5, leak=2 * MIB).as_dict()]


def changed_bytes(content: bytes, chance: random.Random) -> bytes:
    """Change a pickle or a text in up to four places."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at, length = chance.randrange(len(data) + 1), chance.choice((0, 1, 1, 2, 8, 40))
        other = chance.randrange(len(data) + 1)
        data[at : at + length] = chance.choice(
            (
                b"",
                chance.randbytes(max(1, length)),
                chance.choice(_SPECIAL),
                chance.choice(_NUMBERS),
                bytes(data[other : other + chance.choice((1, 8, 100))]),
            )
        )
        if chance.random() < 0.05:
            del data[at:]
    return bytes(data)


def changed_values(content: object, chance: random.Random) -> object:
    """Change a snapshot's values: another type or number, removed, or moved."""
    content = pickle.loads(pickle.dumps(content))
    for _ in range(chance.randint(1, 4)):
        holders = [one for one in _containers(content) if one]
        if not holders:
            break
        holder = chance.choice(holders)
        key = chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
        kind = chance.random()
        if kind < 0.15:
            del holder[key]
        elif kind < 0.3:
            holder[key] = chance.choice(holders)
        else:
            holder[key] = chance.choice(_VALUES)
    return content


def _containers(content: object) -> Iterator[dict[str, object] | list[object]]:
    stack, seen = [content], set()
    while stack:
        one = stack.pop()
        if isinstance(one, dict | list) and id(one) not in seen:
            seen.add(id(one))
            yield one
            stack += one.values() if isinstance(one, dict) else one


def snapshot_inputs(chance: random.Random) -> Iterator[bytes]:
    """Yield an endless sequence of snapshot files."""
    right = seeds()
    while True:
        seed = chance.choice(right)
        kind = chance.random()
        if kind < 0.5:
            yield changed_bytes(pickle.dumps(seed, chance.choice((2, 3, 4, 5))), chance)
        elif kind < 0.95:
            yield pickle.dumps(changed_values(seed, chance), chance.choice((2, 3, 4, 5)))
        elif kind < 0.98:
            yield changed_bytes(gzip.compress(pickle.dumps(seed)), chance)
        else:
            yield b"\x80\x04" + b"".join(chance.choices(_SPECIAL + _NUMBERS, k=chance.randint(0, 60)))


def text_inputs(chance: random.Random) -> Iterator[bytes]:
    """Yield an endless sequence of logs."""
    while True:
        text = "".join(chance.choices(_TEXTS, k=chance.randint(0, 8)))
        content = text.encode(chance.choice(("utf-8", "utf-8", "utf-8", "utf-16", "utf-16-le", "utf-8-sig")))
        yield changed_bytes(content, chance) if chance.random() < 0.8 else content


def explained_snapshot(content: bytes, path: Path) -> Diagnosis:
    """Explain the file of a snapshot."""
    path.write_bytes(content)
    return diagnosis_of_snapshot(path)


def explained_text(content: bytes, path: Path) -> Diagnosis:
    """Explain a log."""
    return diagnosis_of_text(io.BytesIO(content), path.name)


def fuzz(
    inputs: Iterator[bytes], explained: Callable[[bytes, Path], Diagnosis], number: int, path: Path
) -> dict[str, int]:
    """Explain a number of inputs, and show each tenth diagnosis; return the counts of explained and refused inputs.

    Errors other than Plimsoll's reach the caller; ``path`` then has the input.
    """
    counts = {"explained": 0, "refused": 0, "longest message": 0}
    for index in range(number):
        content = next(inputs)
        try:
            diagnosis = explained(content, path)
        except PlimsollError as refused:
            counts["refused"] += 1
            counts["longest message"] = max(counts["longest message"], len(str(refused)))
            continue
        except BaseException:
            path.write_bytes(content)
            raise
        counts["explained"] += 1
        if index % 10 == 0:
            render(diagnosis, "text")
            Diagnosis.from_json(render(diagnosis, "json"))
    return counts
