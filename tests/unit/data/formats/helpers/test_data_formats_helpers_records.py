"""Reading of rows: a part includes the byte before it and the rest of its last row."""

from pathlib import Path

import pytest
import xxhash

from corpora import written
from plimsoll.data.formats import Layout, Part
from plimsoll.data.formats.helpers import records
from plimsoll.errors import DataError


def test_a_part_is_read_until_its_last_row_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "_MORE_BYTES", 4)
    path = written(tmp_path / "a", bytes(range(100)))
    part = Part(str(path), 8, 16, 100, Layout("jsonl"), 30)
    raw, offset, digest = records.read_rows(part, lambda raw: raw[-1] >= 20)
    assert (offset, raw[:2], len(raw) >= 14) == (7, bytes([7, 8]), True)
    assert digest == xxhash.xxh3_128_digest(bytes(range(8, 16)))
    raw, _, _ = records.read_rows(part, lambda raw: False)
    assert len(raw) >= 9 + 30  # only enough to detect that a row is too long, and the bytes read with it
    assert len(records.read_rows(part._replace(begin=0, end=8), lambda raw: True)[0]) == 8
    with pytest.raises(DataError, match="ends before byte 108"):
        records.read_rows(part._replace(end=108), lambda raw: True)
