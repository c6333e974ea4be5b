"""A cache folder with numbers that are easy to check."""

from datetime import datetime

from plimsoll.records.cache import CacheContents, CachedKind

NOON_SECONDS = datetime(2026, 11, 27, 12).timestamp()


def cache_contents() -> CacheContents:
    """Return two plans of 2 MiB and data of 1 GiB; no traces."""
    kinds = (
        CachedKind(name="plans", num_files=2, num_bytes=2 << 20, used_seconds=NOON_SECONDS),
        CachedKind(name="traces", num_files=0, num_bytes=0),
        CachedKind(name="data", num_files=1000, num_bytes=1 << 30, used_seconds=NOON_SECONDS + 60),
    )
    return CacheContents(folder="cache", most_bytes=256 << 20, kinds=kinds)
