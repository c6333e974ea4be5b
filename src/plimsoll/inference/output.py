"""Results that are written once each, whatever ends the process: a part file beside the output, and how far it is good.

    y.jsonl.part        whole blocks of rows, one JSON object a line, and perhaps the torn begin of another block
    y.jsonl.part.json   what makes the results, how many rows and bytes of the part file are good, their checksum

A block is appended and synced, then the state is replaced. So at any moment the state says what is on the disk: what is
behind it in the part file is cut off when the same command is given again, and computed again. The output has its name
only when it is whole. It does NOT keep rows of a block that is not finished, and does NOT notice a change of the part
file that keeps its checksum (CRC-32).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import Any

from plimsoll.errors import OutputError
from plimsoll.records.base import sync, write_atomically

_VERSION = 2
_STATE_FIELDS = frozenset({"made_from", "num_rows", "num_bytes", "checksum", "counts"})
_READ_BYTES = 1 << 20


class PartFile:
    """The results so far.

    Attributes:
        num_rows: how many rows are written.
        counts: what was counted of them.
        made_from: what makes the results, as it was given when the part file was begun.
    """

    def __init__(self, out: Path, file: RawIOBase, state: dict[str, Any]) -> None:
        self._out, self._file, self._state = out, file, state
        self._checksum: int = state["checksum"]

    @property
    def num_rows(self) -> int:
        """How many rows are written."""
        return int(self._state["num_rows"])

    @property
    def made_from(self) -> Mapping[str, Any]:
        """What makes the results."""
        made_from: dict[str, Any] = self._state["made_from"]
        return made_from

    @property
    def counts(self) -> Counter[str]:
        """What was counted of the rows that are written."""
        return Counter(self._state["counts"])

    def append(self, lines: bytes, num_rows: int, counts: Mapping[str, int]) -> None:
        """Write a block of rows; when this returns they are on the disk.

        Raises:
            OutputError: if the disk is full or cannot be written.
        """
        with _said(self._out):
            _write_all(self._file, lines)
            os.fsync(self._file.fileno())
        self._checksum = zlib.crc32(lines, self._checksum)
        self._state = self._state | {
            "num_rows": self.num_rows + num_rows,
            "num_bytes": self._state["num_bytes"] + len(lines),
            "checksum": self._checksum,
            "counts": self.counts + Counter(counts),
        }
        _write_state(self._out, self._state)

    def finish(self) -> None:
        """Give the part file the name of the output: all rows are there.

        Raises:
            OutputError: if that cannot be done.
        """
        with _said(self._out):
            _part_of(self._out).replace(self._out)
            sync(self._out.absolute().parent)
            _state_of(self._out).unlink()


@contextmanager
def part_file(out: Path, made_from: Mapping[str, Any], force: bool = False) -> Iterator[PartFile]:
    """Begin the results, or go on with them where the same command was ended before.

    Args:
        out: the output; it must not exist.
        made_from: what decides the results, by the name to call it; values as JSON has them.
        force: begin anew, and let go of an output or of a part of one.

    Raises:
        OutputError: if the output exists, a part of it was made from something else, another process writes it, or it
            cannot be written.
    """
    check_output(out, force)
    with _said(out), _part_of(out).open("a+b", buffering=0) as file:
        _claim(file, out)
        state = None if force else _read_state(out)
        if state is None or not state["num_rows"]:
            file.truncate(0)
            state = {"made_from": dict(made_from), "num_rows": 0, "num_bytes": 0, "checksum": 0, "counts": {}}
            _write_state(out, state)
        else:
            _check_same(out, state["made_from"], made_from)
            _cut_to(file, state, out)
        part = PartFile(out, file, state)
        try:
            yield part
        finally:
            if not part.num_rows:  # nothing is lost, and a command that was refused leaves nothing to another
                _part_of(out).unlink(missing_ok=True)
                _state_of(out).unlink(missing_ok=True)


def check_output(out: Path, force: bool, inputs: Sequence[Path] = (), folders: Sequence[Path] = ()) -> None:
    """Refuse an output whose making would destroy something else, and one that is there unless it is to be replaced.

    Args:
        out: the output.
        force: whether it may be replaced.
        inputs: files that are read.
        folders: of the model.

    Raises:
        OutputError: it says why.
    """
    if not out.absolute().parent.is_dir():
        raise OutputError(f"cannot write {out}, there is no folder {out.parent}: make it, or give another --out")
    place = out.absolute().parent.resolve()
    for folder in folders:
        if place.is_relative_to(folder.resolve()):
            raise OutputError(f"{out} is inside of {folder}, which is read: give an --out in another folder")
    for path in (out, _part_of(out), _state_of(out)):
        if not path.exists():
            continue
        if not path.is_file():
            raise OutputError(f"{path} is no file that could be replaced (a folder or a device): give another --out")
        for one in inputs:
            if one.exists() and path.samefile(one):
                raise OutputError(f"{path} is {one}, which is read: give another --out")
    if out.exists() and not force:
        raise OutputError(f"{out} exists already and is not overwritten: give another --out, or --force")


def _part_of(out: Path) -> Path:
    return out.with_name(out.name + ".part")


def _state_of(out: Path) -> Path:
    return out.with_name(out.name + ".part.json")


def _write_all(file: RawIOBase, content: bytes) -> None:
    """Write it without a buffer, which would be written again where the file is closed after an error."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) or 0 :]


def _write_state(out: Path, state: dict[str, Any]) -> None:
    write_atomically(_state_of(out), json.dumps({"version": _VERSION, **state}).encode())


def _read_state(out: Path) -> dict[str, Any] | None:
    """Read how far the results are; ``None`` where none were begun."""
    path = _state_of(out)
    try:
        state: dict[str, Any] = json.loads(path.read_bytes())
        version = state.pop("version")
        _ = [state[name] for name in _STATE_FIELDS if version == _VERSION]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise OutputError(f"{path} cannot be read as the state of {out}: give --force to begin again") from None
    if version != _VERSION:
        raise OutputError(f"{path} is of version {version}, not {_VERSION}: give --force to begin again")
    return state


def _check_same(out: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to join results that were made from different things."""
    changes = ", ".join(_changes("", dict(before), json.loads(json.dumps(now))))
    if changes:
        raise OutputError(
            f"{_part_of(out)} holds results of another {changes}: give the command as before to go on, --force to "
            "begin again, or another --out"
        )


def _changes(name: str, before: Any, now: Any) -> Iterator[str]:
    """Name each thing that differs: of things with parts, such as the files of a model, the part."""
    if isinstance(before, dict) and isinstance(now, dict):
        for part in {**before, **now}:
            yield from _changes(f"{name}: {part}" if name else part, before.get(part), now.get(part))
    elif before != now:
        yield f"{name} (was {_shown(before)}, is {_shown(now)})"


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _cut_to(file: RawIOBase, state: Mapping[str, Any], out: Path) -> None:
    """Check what the state vouches for, and cut off what is behind it."""
    file.seek(0)
    checksum, left_bytes = 0, state["num_bytes"]
    while left_bytes and (chunk := file.read(min(_READ_BYTES, left_bytes))):
        checksum, left_bytes = zlib.crc32(chunk, checksum), left_bytes - len(chunk)
    if left_bytes or checksum != state["checksum"]:
        raise OutputError(
            f"{_part_of(out)} is not what was written ({state['num_bytes']} bytes with checksum {state['checksum']}): "
            "give --force to begin again, or put it back"
        )
    file.truncate(state["num_bytes"])


def _claim(file: RawIOBase, out: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = _part_of(out).exists() and os.path.samestat(_part_of(out).stat(), os.fstat(file.fileno()))
    except BlockingIOError:
        is_there = False
    if not is_there:  # another process has it, or had it just now, and took it away when it ended
        raise OutputError(f"another process is writing {out}: wait for it to end, or give another --out")


@contextmanager
def _said(out: Path) -> Iterator[None]:
    """Say an error of the disk in our words."""
    try:
        yield
    except OSError as error:
        what = f"cannot write {out}: {error.strerror}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise OutputError(f"{what}; free some space and give the same command again to go on") from error
        raise OutputError(f"{what}; give another --out, or allow writing there") from error
