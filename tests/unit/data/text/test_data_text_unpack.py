"""The content of compressed files and archives is complete, or an error is raised."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile

import pyarrow
import pytest

from plimsoll.data.text import unpack
from plimsoll.data.text.unpack import Torn, chunks_of, is_archive, members_of, uncompressed

CONTENT = bytes(range(256)) * 20_000
PACKED = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}


def zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def tarred(**members: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return file.getvalue()


@pytest.mark.parametrize("suffix", PACKED)
def test_all_streams_of_a_file_are_unpacked(suffix: str):
    packed = PACKED[suffix](CONTENT) + PACKED[suffix](b"more") + (b"\0" * 8 if suffix == "xz" else b"")
    assert b"".join(chunks_of(f"a.txt.{suffix}", io.BytesIO(packed))) == CONTENT + b"more"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("tear", [lambda packed: packed[:-9], lambda packed: b"no archive at all"])
def test_what_is_not_whole_is_torn(suffix: str, tear):
    with pytest.raises(Torn):
        list(chunks_of(f"a.txt.{suffix}", io.BytesIO(tear(PACKED[suffix](CONTENT)))))


def test_xz_takes_no_more_memory_than_allowed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unpack, "_MOST_XZ_BYTES", 1 << 20)
    with pytest.raises(Torn, match="Memory usage limit exceeded"):
        list(chunks_of("a.xz", io.BytesIO(lzma.compress(CONTENT))))


def test_names_say_what_is_inside():
    assert [uncompressed(name) for name in ("a.txt", "a.jsonl.BZ2", "a.tgz", "a.tar.xz")] == [
        "a.txt",
        "a.jsonl",
        "a.tar",
        "a.tar",
    ]
    assert [is_archive(name) for name in ("a.zip", "a.tgz", "a.tar.gz", "a.txt.gz")] == [True, True, True, False]


@pytest.mark.parametrize(("name", "pack"), [("a.zip", zipped), ("a.tar", tarred)])
def test_the_files_of_an_archive_come_without_hidden_ones(name: str, pack):
    packed = pack(**{"b/one.txt": b"one", ".git/x": b"no", "__MACOSX/b": b"no", "two.txt": CONTENT})
    found = {member.name: b"".join(member.chunks) for member in members_of(io.BytesIO(packed), name) if member.chunks}
    assert found == {"b/one.txt": b"one", "two.txt": CONTENT}
    others = [member.why for member in members_of(io.BytesIO(packed), name) if not member.chunks]
    assert others == (["it is a link or a device in the archive"] if pack is tarred else [])


def test_a_zip_that_is_damaged_or_encrypted_is_torn():
    packed = bytearray(zipped(a=CONTENT))
    packed[len(packed) // 3] ^= 1
    with pytest.raises(Torn):
        [b"".join(member.chunks or ()) for member in members_of(io.BytesIO(packed), "a.zip")]
    packed = bytearray(zipped(a=b"x"))
    for mark, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):  # both places in a zip archive that hold the flags of a file
        packed[packed.index(mark) + place] |= 1
    with pytest.raises(Torn, match="encrypted"):
        list(members_of(io.BytesIO(packed), "a.zip"))
