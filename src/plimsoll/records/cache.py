"""The content of the cache folder, by kind of file: predictions, plans, data and so on."""

from __future__ import annotations

from typing import ClassVar

from plimsoll.records.base import Frozen, Record


class CachedKind(Frozen):
    """The cached files of one kind.

    ``used_seconds`` is the time of the last read or write, in seconds since 1970; ``None`` if no file exists.
    """

    name: str
    num_files: int
    num_bytes: int
    used_seconds: float | None = None


class CacheContents(Record):
    """The content of a cache folder. ``most_bytes`` limits the total of predictions, plans, baselines and traces.

    If ``is_removed`` is true, the files have been deleted, and the record lists the content before the deletion.
    """

    record_kind: ClassVar[str] = "cache"

    folder: str
    most_bytes: int
    kinds: tuple[CachedKind, ...]
    is_removed: bool = False
