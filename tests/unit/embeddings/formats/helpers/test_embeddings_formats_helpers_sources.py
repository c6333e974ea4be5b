"""Files, gzip files and zip archives: the same bytes from each, and the error for a file that is cut off."""

import errno
import os
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from plimsoll.embeddings.formats.helpers.sources import HEAD_BYTES, Source
from plimsoll.errors import EmbeddingError
from vector_files import written

RAW = os.urandom(3_000_000) + b"x" * 300_000


@pytest.mark.parametrize("packing", ["", "gzip", "zip"])
def test_the_same_bytes_from_each(tmp_path: Path, packing: str):
    source = Source(written(tmp_path / "a.bin", RAW, packing))
    assert (source.packing, source.head) == (packing, RAW[:HEAD_BYTES])
    assert source.num_bytes == (None if packing == "gzip" else len(RAW))
    chunks = list(source.chunks(100_000))
    assert b"".join(chunk for chunk, _ in chunks) == RAW
    assert {len(chunk) for chunk, _ in chunks} == {100_000}
    shares = [share for _, share in chunks]
    assert shares == sorted(shares)
    assert 0 < shares[0] <= shares[-1] <= 1
    assert not source.is_cut
    with source.as_file() as path:
        assert path.read_bytes() == RAW
    assert path.exists() == (not packing)


@pytest.mark.parametrize("packing", ["gzip", "zip"])
def test_what_is_damaged_keeps_what_is_before_and_says_so(tmp_path: Path, packing: str):
    path = written(tmp_path / "a.bin", RAW, packing)
    raw = bytearray(path.read_bytes())
    raw[2_500_000:2_500_100] = bytes(100)
    path.write_bytes(raw)
    source = Source(path)
    there = b"".join(chunk for chunk, _ in source.chunks())
    assert source.is_cut
    assert there[:2_000_000] == RAW[:2_000_000]  # up to 1 MiB before the cut may be lost
    with (
        pytest.raises(EmbeddingError, match=r"a\..* is cut off or damaged after .*iB, unpacked: download it again"),
        source.as_file(),
    ):
        pass


def test_a_gzip_file_that_is_cut_anywhere_gives_what_is_there(tmp_path: Path):
    path = written(tmp_path / "a", b"some words", "gzip")
    raw = path.read_bytes()
    for num_bytes in range(4, len(raw)):
        path.write_bytes(raw[:num_bytes])
        source = Source(path)
        assert b"some words".startswith(source.head)
        assert b"".join(chunk for chunk, _ in source.chunks()) == source.head
        assert source.is_cut


def test_a_file_of_an_archive_is_named_as_in_a_folder(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("in/b.txt", b"b")
        archive.writestr("c.txt", b"c")
    source = Source(tmp_path / "a.zip" / "in" / "b.txt")
    assert (source.head, source.name) == (b"b", f"{tmp_path}/a.zip/in/b.txt")
    for inner, why in (("", "holds 2 files .*: name one as"), ("d.txt", "holds no file d.txt but in/b.txt, c.txt")):
        with pytest.raises(EmbeddingError, match=why):
            Source(tmp_path / "a.zip" / inner)
    (tmp_path / "a.zip").write_bytes((tmp_path / "a.zip").read_bytes()[:-30])
    with pytest.raises(EmbeddingError, match="cannot read the archive .*: download it again"):
        Source(tmp_path / "a.zip")


def test_what_cannot_be_read_is_an_error(tmp_path: Path):
    with pytest.raises(EmbeddingError, match="there is no file .*: give a file of word vectors"):
        Source(tmp_path / "a")
    with pytest.raises(EmbeddingError, match="is a folder: name the file with the vectors in it"):
        Source(tmp_path)


def unpacked(path: Path) -> None:
    with Source(path).as_file():
        pass


def test_too_little_room_to_unpack_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path / "a", RAW, "gzip")

    def full(self: Source, *_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield b"", 0.0

    with monkeypatch.context() as patched:
        patched.setattr(Source, "chunks", full)
        with pytest.raises(EmbeddingError, match=r"cannot unpack .* \(No space left on device\): set TMPDIR"):
            unpacked(path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(EmbeddingError, match=r"which has 10 B free, but .*: set TMPDIR"):
        unpacked(path)
