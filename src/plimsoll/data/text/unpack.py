"""Streaming decompression of files and archives: gzip, zstd, bzip2, xz, zip and tar, recognized by their names.

Memory: 1 MiB, and the window of the format (for xz and zstd at most 128 MiB, otherwise the file is refused). Archives
take about 500 bytes more per file in the archive. Not handled: encrypted archives, nested archives, and other formats.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_SHORT = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}
_ARCHIVES = (".zip", ".tar")
_CHUNK_BYTES = 1 << 20
_MOST_XZ_BYTES = 128 << 20  # files of `xz -9` need 65 MiB; equals zstd's default limit
_FAULTS = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, RuntimeError)


class Torn(Exception):
    """A compressed file or an archive cannot be unpacked."""


def uncompressed(path: str) -> str:
    """Return the name of a compressed file without its compression suffix; other names are unchanged."""
    stem, suffix = os.path.splitext(path)
    if suffix.lower() in _SHORT:
        return stem + ".tar"
    return stem if suffix.lower() in _COMPRESSED else path


def plain_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a file, 1 MiB at a time."""
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def is_archive(path: str) -> bool:
    """Return whether the name of a file, compressed or not, implies that it contains other files."""
    return os.path.splitext(uncompressed(path))[1].lower() in _ARCHIVES


def chunks_of(path: str, compressed: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a compressed file, about 1 MiB at a time.

    Raises:
        Torn: if the file is incomplete or damaged.
    """
    suffix = os.path.splitext(path)[1].lower()
    suffix = os.path.splitext(_SHORT.get(suffix, suffix))[1] or suffix
    try:
        if suffix == ".xz":
            yield from _of_xz(compressed)
            return
        with _opened(suffix, compressed) as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                yield chunk
    except (*_FAULTS, ValueError) as error:  # errors of pyarrow are ValueErrors
        raise Torn(str(error)) from None


def _opened(suffix: str, compressed: IO[bytes]) -> Any:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=compressed)
    if suffix == ".bz2":
        return bz2.BZ2File(compressed)
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(compressed, "r"), "zstd")


def _of_xz(compressed: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of an xz file with bounded memory, unlike `lzma.open`."""
    raw = compressed.read(_CHUNK_BYTES)
    while raw:
        unpacking = lzma.LZMADecompressor(lzma.FORMAT_XZ, _MOST_XZ_BYTES)
        while not unpacking.eof:
            yield unpacking.decompress(raw, _CHUNK_BYTES)
            raw = b""
            if unpacking.needs_input and not unpacking.eof:
                raw = compressed.read(_CHUNK_BYTES)
                if not raw:
                    raise EOFError("it ends before the end of its stream")
        raw = (unpacking.unused_data or compressed.read(_CHUNK_BYTES)).lstrip(b"\0")  # padding between streams
        while not raw and (raw := compressed.read(_CHUNK_BYTES)):
            raw = raw.lstrip(b"\0")


class Member(NamedTuple):
    """A file in an archive with its content, or with the reason why its content is not read."""

    name: str
    chunks: Iterator[bytes] | None
    why: str | None = None


def members_of(archive: IO[bytes], path: str) -> Iterator[Member]:
    """Yield the files in a zip or tar archive, without hidden files, as for a folder.

    Raises:
        Torn: if the archive is incomplete, damaged or encrypted.
    """
    try:
        yield from _of_zip(archive) if path.lower().endswith(".zip") else _of_tar(archive)
    except _FAULTS as error:
        raise Torn(str(error)) from None


def _of_zip(archive: IO[bytes]) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            if not info.is_dir() and not _is_hidden(info.filename):
                with opened.open(info) as content:
                    yield Member(info.filename, _chunks(content))


def _of_tar(archive: IO[bytes]) -> Iterator[Member]:
    with tarfile.open(fileobj=archive, mode="r:") as opened:
        for info in opened:
            content = opened.extractfile(info) if info.isreg() else None
            if content is not None and not _is_hidden(info.name):
                yield Member(info.name, _chunks(content))
            elif not info.isdir() and not _is_hidden(info.name):
                yield Member(info.name, None, "it is a link or a device in the archive")


def _chunks(content: IO[bytes]) -> Iterator[bytes]:
    try:
        yield from plain_chunks(content)
    except _FAULTS as error:
        raise Torn(str(error)) from None


def _is_hidden(name: str) -> bool:
    parts = [part for part in name.split("/") if part != "."]
    return any(part.startswith(".") and part != ".." for part in parts) or parts[0] == "__MACOSX"
