"""Sheet of a cache folder, shared by the terminal and the HTML page."""

from __future__ import annotations

from datetime import datetime

from plimsoll.records.cache import CacheContents
from plimsoll.records.units import format_bytes
from plimsoll.report.sheets import Sheet, columns_of

_COLUMNS = columns_of("Kind", "#Files", "#Size", "#Last used")


def cache_sheets(cache: CacheContents) -> tuple[Sheet, ...]:
    """List the number, total size and last use of the files of each kind."""
    rows = [
        (kind.name, f"{kind.num_files:,}", format_bytes(kind.num_bytes), _moment(kind.used_seconds))
        for kind in cache.kinds
    ]
    total_bytes = sum(kind.num_bytes for kind in cache.kinds)
    rows.append(("all", f"{sum(kind.num_files for kind in cache.kinds):,}", format_bytes(total_bytes), ""))
    title = f"Removed from {cache.folder}" if cache.is_removed else f"Cache {cache.folder}"
    return (Sheet(title, _COLUMNS, tuple(rows)),)


def _moment(seconds: float | None) -> str:
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"
