"""Crash-safe output: a part file next to the output, and a state file that records how much of it is valid.

    y.jsonl.part        complete blocks of rows, one JSON object per line, and possibly an incomplete last block
    y.jsonl.part.json   the settings that determine the results, the valid rows and bytes of the part file, a checksum

A block is appended and synced, then the state file is replaced. So the state always describes data on the disk. If the
same command runs again, the part file is truncated to its valid bytes, and the remaining rows are computed. The output
gets its name only when it is complete. Rows of an unfinished block are lost. A change of the part file that preserves
its checksum (CRC-32) is not detected.
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
    """The results written so far.

    Attributes:
        num_rows: the number of rows written.
        counts: statistics of the rows written, by name, such as the number of tokens.
        made_from: the settings that determine the results, as given when the part file was created.
    """

    def __init__(self, out: Path, file: RawIOBase, state: dict[str, Any]) -> None:
        self._out, self._file, self._state = out, file, state
        self._checksum: int = state["checksum"]

    @property
    def num_rows(self) -> int:
        """The number of rows written."""
        return int(self._state["num_rows"])

    @property
    def made_from(self) -> Mapping[str, Any]:
        """The settings that determine the results."""
        made_from: dict[str, Any] = self._state["made_from"]
        return made_from

    @property
    def counts(self) -> Counter[str]:
        """Statistics of the rows written, by name."""
        return Counter(self._state["counts"])

    def append(self, lines: bytes, num_rows: int, counts: Mapping[str, int]) -> None:
        """Write a block of rows durably: they are on the disk when this returns.

        Args:
            lines: the results as JSON lines.
            num_rows: number of rows in the block.
            counts: statistics of these rows, which are added to `counts`.

        Raises:
            OutputError: if the disk is full, or the file cannot be written.
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
        """Rename the complete part file to the output.

        Raises:
            OutputError: if the part file cannot be renamed.
        """
        with _said(self._out):
            _part_of(self._out).replace(self._out)
            sync(self._out.absolute().parent)
            _state_of(self._out).unlink()


@contextmanager
def part_file(out: Path, made_from: Mapping[str, Any], force: bool = False) -> Iterator[PartFile]:
    """Start the results, or resume them if the same command was interrupted.

    Args:
        out: the output. It must not exist, unless ``force`` is true.
        made_from: the settings that determine the results: their names, as messages show them, and JSON values.
        force: start over, and replace an existing output or part file.

    Yields:
        the part file; if no row was written, it is deleted at the end.

    Raises:
        OutputError: if the output exists, if the part file was started with other settings or has been changed, if
            another process is writing it, or if it cannot be written.
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
            if not part.num_rows:  # nothing is lost, and a failed command leaves no files behind
                _part_of(out).unlink(missing_ok=True)
                _state_of(out).unlink(missing_ok=True)


def check_output(out: Path, force: bool, inputs: Sequence[Path] = (), folders: Sequence[Path] = ()) -> None:
    """Raise an error if the output would overwrite an input or be inside a model folder, or exists already.

    Args:
        out: the output.
        force: whether an existing output may be replaced.
        inputs: files that are read.
        folders: folders of the model and its adapters.

    Raises:
        OutputError: if the output cannot be used; the message has the reason.
    """
    if not out.absolute().parent.is_dir():
        raise OutputError(f"cannot write {out}, there is no folder {out.parent}: make it, or give another --out")
    place = out.absolute().parent.resolve()
    for folder in folders:
        if place.is_relative_to(folder.resolve()):
            raise OutputError(f"{out} is inside the model folder {folder}: give an --out in another folder")
    for path in (out, _part_of(out), _state_of(out)):
        if not path.exists():
            continue
        if not path.is_file():
            raise OutputError(f"{path} is not a regular file, so it cannot be replaced: give another --out")
        for one in inputs:
            if one.exists() and path.samefile(one):
                raise OutputError(f"{path} is the input {one}: give another --out")
    if out.exists() and not force:
        raise OutputError(f"{out} exists already and is not overwritten: give another --out, or --force")


def _part_of(out: Path) -> Path:
    return out.with_name(out.name + ".part")


def _state_of(out: Path) -> Path:
    return out.with_name(out.name + ".part.json")


def _write_all(file: RawIOBase, content: bytes) -> None:
    """Write all bytes to an unbuffered file.

    A buffered file would write its buffer again when it is closed after an error.
    """
    left = memoryview(content)
    while left:
        left = left[file.write(left) or 0 :]


def _write_state(out: Path, state: dict[str, Any]) -> None:
    write_atomically(_state_of(out), json.dumps({"version": _VERSION, **state}).encode())


def _read_state(out: Path) -> dict[str, Any] | None:
    """Return the content of the state file; ``None`` if it does not exist.

    Raises:
        OutputError: if the state file is invalid, or of another version.
    """
    path = _state_of(out)
    try:
        state: dict[str, Any] = json.loads(path.read_bytes())
        version = state.pop("version")
        _ = [state[name] for name in _STATE_FIELDS if version == _VERSION]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise OutputError(f"{path} is not a valid state file of {out}: give --force to start over") from None
    if version != _VERSION:
        raise OutputError(f"{path} has version {version}, not {_VERSION}: give --force to start over")
    return state


def _check_same(out: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise an error if the existing results were computed with other settings."""
    changes = ", ".join(_changes("", dict(before), json.loads(json.dumps(now))))
    if changes:
        raise OutputError(
            f"{_part_of(out)} has results with a different {changes}: run the original command to resume, or give "
            "--force to start over, or another --out"
        )


def _changes(name: str, before: Any, now: Any) -> Iterator[str]:
    """Yield a description of each setting that differs, with both values. Nested settings are described one by one."""
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
    """Verify the checksum of the bytes that the state describes, and truncate the part file after them.

    Raises:
        OutputError: if these bytes have changed.
    """
    file.seek(0)
    checksum, left_bytes = 0, state["num_bytes"]
    while left_bytes and (chunk := file.read(min(_READ_BYTES, left_bytes))):
        checksum, left_bytes = zlib.crc32(chunk, checksum), left_bytes - len(chunk)
    if left_bytes or checksum != state["checksum"]:
        raise OutputError(
            f"{_part_of(out)} has changed since it was written (expected {state['num_bytes']} bytes with checksum "
            f"{state['checksum']}): give --force to start over, or restore it"
        )
    file.truncate(state["num_bytes"])


def _claim(file: RawIOBase, out: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = _part_of(out).exists() and os.path.samestat(_part_of(out).stat(), os.fstat(file.fileno()))
    except BlockingIOError:
        is_there = False
    if not is_there:  # another process has locked the file, or has just renamed or deleted it
        raise OutputError(f"another process is writing {out}: wait for it to end, or give another --out")


@contextmanager
def _said(out: Path) -> Iterator[None]:
    """Convert an `OSError` to an `OutputError` with a remedy."""
    try:
        yield
    except OSError as error:
        what = f"cannot write {out}: {error.strerror}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise OutputError(f"{what}; free some space and run the same command again to resume") from error
        raise OutputError(f"{what}; give another --out, or allow writing there") from error
