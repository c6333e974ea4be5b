"""What lies in the cache folder, by kind."""

from __future__ import annotations

from typing import ClassVar

from plimsoll.records.base import Frozen, Record


class CachedKind(Frozen):
    """Files of one kind; ``used_seconds`` is when the last of them was read or written, in seconds since 1970."""

    name: str
    num_files: int
    num_bytes: int
    used_seconds: float | None = None


class CacheContents(Record):
    """Everything in a cache folder; ``most_bytes`` is what predictions, plans, baselines and traces take in all.

    ``is_removed``: it is what was there before it was removed.
    """

    record_kind: ClassVar[str] = "cache"

    folder: str
    most_bytes: int
    kinds: tuple[CachedKind, ...]
    is_removed: bool = False
