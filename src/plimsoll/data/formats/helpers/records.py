"""Reading of rows for jsonl and csv: a part is read whole, with the rest of the row that ends after it."""

from __future__ import annotations

import os
from collections.abc import Callable

import xxhash

from plimsoll.data.formats import Fault, Part
from plimsoll.data.formats.helpers.scanning import opened
from plimsoll.errors import DataError
from plimsoll.records.units import format_bytes

_MORE_BYTES = 256 << 10
HEAD_BYTES = 1 << 20  # the first rows of a file must lie in this many bytes


def read_rows(part: Part, is_whole: Callable[[bytes], bool]) -> tuple[bytes, int, bytes]:
    """Read a part, from the byte before it to the end of the last row that begins in it.

    The read ends when ``is_whole(raw)`` is true for the bytes read, at the end of the file, or when the longest allowed
    row is exceeded.

    Returns:
        The bytes, their offset in the file, and the digest of the bytes of the part.
    """
    begin = max(part.begin - 1, 0)
    with opened(part.path) as descriptor:
        raw = os.pread(descriptor, part.end - begin, begin)
        if len(raw) < part.end - begin:
            raise DataError(
                f"{part.path} ends before byte {part.end}, but was longer a moment ago: start again when "
                "nothing writes to it"
            )
        digest = xxhash.xxh3_128_digest(memoryview(raw)[part.begin - begin :])
        most_bytes = len(raw) + part.max_text_bytes + 1
        while len(raw) < most_bytes and not is_whole(raw):
            more = os.pread(descriptor, min(max(_MORE_BYTES, len(raw)), most_bytes - len(raw)), begin + len(raw))
            if not more:
                break
            raw += more
    return raw, begin, digest


def too_long(at: int, num_bytes: int, max_text_bytes: int, line: int | None = None) -> Fault:
    """Return the fault that the row at offset ``at``, of ``num_bytes`` bytes, is longer than allowed."""
    return Fault(
        at,
        f"the row that begins at byte {at} has more than {format_bytes(max_text_bytes)} (at least {num_bytes} bytes)",
        "split it into shorter rows (in Python code: or raise max_text_bytes of its Reading)",
        line,
    )
