"""Cache of computed results, keyed by all inputs of the computation.

    content = read("plans", facts)      # None if there is no intact entry
    write("plans", facts, content)

The inputs are called *facts*. The *kind* of a result (``"plans"``) is the name of its subfolder. An entry is one file,
named by the hash of its facts. It begins with a hash of its name and content, so a damaged or renamed file is ignored.
It is written atomically (`write_atomically`). The cache is limited to `MOST_BYTES`; the least recently read entries are
removed. If the folder is not writable, nothing is cached and no error is raised, because each result can be computed
again. The caller decides which facts a result depends on (`plimsoll.planning.cached_traces`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from plimsoll.errors import OutputError
from plimsoll.records.base import cache_folder, write_atomically
from plimsoll.records.cache import CacheContents, CachedKind

Kind = Literal["predictions", "plans", "baselines", "traces"]
Facts = Mapping[str, Any]

MOST_BYTES = 256 << 20
"""Size limit of all entries: a few hundred plans of large models with their traces."""

_FOLDER = "answers"
_HASH_BYTES = hashlib.sha256().digest_size
_FASTEST = 1  # zlib level: compresses a plan of 1.8 MB to 0.2 MB in 20 ms
_ABANDONED_SECONDS = 3600  # age of a temporary file after which its process must have been killed

# Other files in the cache folder, by the names that their owners use.
_OTHERS = {
    "speeds": ("speed-*.json", "exchange-*.json"),
    "calibration": ("calibration.json",),
    "data": ("data",),
    "embeddings": ("embeddings",),
}
CLEARED_BY_NAME = ("calibration", "data", "embeddings")
"""Kinds of entries that are slow to recreate, or that a running job may read. They are removed only by name."""


def read(kind: Kind, facts: Facts) -> bytes | None:
    """Return the entry for exactly these facts, or ``None`` if it is missing or damaged."""
    path = _path_of(kind, facts)
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    seal, packed = entry[:_HASH_BYTES], entry[_HASH_BYTES:]
    if seal != _seal(path, packed):
        return None
    with suppress(OSError):
        os.utime(path)  # mark it as recently used
    return zlib.decompress(packed)


def write(kind: Kind, facts: Facts, content: bytes) -> None:
    """Store an entry, and remove the least recently used entries if all together exceed `MOST_BYTES`.

    If the folder is not writable, nothing is stored.
    """
    path, packed = _path_of(kind, facts), zlib.compress(content, _FASTEST)
    with suppress(OSError, OutputError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _seal(path, packed) + packed)
        _bound(cache_folder() / _FOLDER)


def contents() -> CacheContents:
    """Return the size and the last use of each kind of entry in the cache folder."""
    names = (*Kind.__args__, *_OTHERS)  # type: ignore[attr-defined]
    return CacheContents(folder=str(cache_folder()), most_bytes=MOST_BYTES, kinds=tuple(map(_kind, names)))


def clear(names: tuple[str, ...] = ()) -> CacheContents:
    """Remove the named kinds of entries, or all except `CLEARED_BY_NAME`. Return the removed kinds.

    Raises:
        OutputError: if a file cannot be removed.
    """
    before = contents()
    removed = [one for one in before.kinds if (one.name in names if names else one.name not in CLEARED_BY_NAME)]
    for kind in removed:
        for path in _paths_of(kind.name):
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            except OSError as error:
                raise OutputError(f"cannot remove {error.filename}: {error.strerror}; change its permissions") from None
    return before.model_copy(update={"kinds": tuple(removed), "is_removed": True})


def _path_of(kind: Kind, facts: Facts) -> Path:
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return cache_folder() / _FOLDER / kind / name


def _seal(path: Path, packed: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + packed).digest()


def _bound(folder: Path) -> None:
    """Remove the least recently used entries above the size limit, and temporary files of killed processes."""
    found = sorted(_files(folder), key=lambda one: one[1].st_mtime)
    total_bytes, now_seconds = sum(stat.st_size for _, stat in found), time.time()
    for path, stat in found:
        is_abandoned = ".tmp-" in path.name and now_seconds - stat.st_mtime > _ABANDONED_SECONDS
        if total_bytes > MOST_BYTES or is_abandoned:
            path.unlink(missing_ok=True)
            total_bytes -= stat.st_size


def _files(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files in a folder, or the file itself. Files that disappear meanwhile are skipped."""
    for folder, _, names in os.walk(path) if path.is_dir() else [(str(path.parent), [], [path.name])]:
        for name in names:
            with suppress(OSError):
                file = Path(folder, name)
                yield file, file.stat()


def _paths_of(name: str) -> list[Path]:
    patterns = _OTHERS.get(name, (f"{_FOLDER}/{name}",))
    return sorted(path for pattern in patterns for path in cache_folder().glob(pattern))


def _kind(name: str) -> CachedKind:
    stats = [stat for path in _paths_of(name) for _, stat in _files(path)]
    return CachedKind(
        name=name,
        num_files=len(stats),
        num_bytes=sum(stat.st_size for stat in stats),
        used_seconds=max((stat.st_mtime for stat in stats), default=None),
    )
