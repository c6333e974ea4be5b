"""The store for texts that cannot be read in place, written by `plimsoll.data.text.convert`.

One file holds the UTF-8 texts end to end, without separators. A second file holds the end offset of each text (int64).
If the texts have classes, two more files hold the class of each text (uint32) and the class names. The content is
checked while it is written. Not an interchange format: only the cache of this version reads it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from plimsoll.data.formats import Found, Labels, Layout, Part, Reading
from plimsoll.data.formats.helpers.scanning import chunks, strings

TEXTS_FILE, ENDS_FILE, CODES_FILE, NAMES_FILE = "texts.packed", "ends.bin", "codes.bin", "names.json"


def look(path: str, reading: Reading) -> tuple[Layout, int]:
    """Return the layout of a store, and 0: the first text begins at the first byte of the texts file."""
    return Layout("packed", label=reading.label), 0


def scan(part: Part) -> Found:
    """Find the texts that begin in a part; see `plimsoll.data.formats.Format`."""
    folder = Path(part.path).parent
    hasher = xxhash.xxh3_128()
    is_blank = True
    for chunk in chunks(part.path, part.begin, part.end, hasher):
        is_blank = is_blank and chunk.raw[: chunk.num_bytes].tobytes().isspace()
    ends = np.memmap(folder / ENDS_FILE, np.int64, "r")
    # Text i begins where text i - 1 ends.
    first, last = (int(number) for number in np.searchsorted(ends, [part.begin, part.end]))
    starts = np.array(ends[first:last])
    if part.begin == 0:
        starts = np.concatenate(([0], starts))
    starts = starts[starts < part.num_file_bytes]
    labels = None
    if part.layout.label is not None:
        begin = 0 if part.begin == 0 else first + 1
        codes = np.array(np.memmap(folder / CODES_FILE, np.uint32, "r")[begin : begin + len(starts)])
        labels = Labels(_names(folder), codes)
    return Found(starts, hasher.digest(), is_blank=is_blank, labels=labels)


@lru_cache(maxsize=1)
def _names(folder: Path) -> list[str | int]:
    names: list[str | int] = json.loads((folder / NAMES_FILE).read_bytes())
    return names


def decode(raws: list[bytes], layout: Layout) -> list[str]:
    """Return some texts, given their bytes; see `plimsoll.data.formats.Format`."""
    return [raw.decode("utf-8") for raw in raws]


def decode_run(raw: bytes, borders: NDArray[np.int64], layout: Layout) -> list[str]:
    """Return consecutive texts from one bytes object; see `plimsoll.data.formats.Format`."""
    return strings(raw, borders[:-1], borders[1:])
