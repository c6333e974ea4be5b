"""Access to the bytes of a file: a plain file, a gzip file, or a file in a zip archive, read without unpacking.

A file in an archive with several files is named as if the archive were a folder: ``glove.6B.zip/glove.6B.300d.txt``.
Does NOT support tar archives, encrypted archives and URLs.
"""

from __future__ import annotations

import glob
import lzma
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Literal, cast

from plimsoll.errors import EmbeddingError
from plimsoll.records.units import format_bytes

HEAD_BYTES = 64 << 10
_CHUNK_BYTES = 1 << 20
_PIECE_BYTES, _PACKED_BYTES = 1 << 20, 256 << 10  # the fastest sizes for zipfile and for zlib
_GZIP = 31  # windowBits of zlib for a gzip header and checksum
_GZIP_MAGIC, _ZIP_MAGIC, _NUMPY_MAGIC = b"\x1f\x8b", b"PK\x03\x04", b"\x93NUMPY"
_WORDS_SUFFIXES = (".txt", ".words", ".vocab", ".json")
_WORDS_NAMES = ("words.txt", "vocab.txt", "vocabulary.txt", "vocab.json")
_BROKEN = (EOFError, zlib.error, zipfile.BadZipFile, lzma.LZMAError)
"""The exceptions of reading a compressed file that is truncated or damaged."""


class Source:
    """A file with vectors.

    Attributes:
        path: the file on the disk.
        member: the name of the file inside a zip archive; ``None`` if ``path`` is not a zip archive.
        packing: the compression, ``"gzip"`` or ``"zip"``; "" for a plain file.
        is_cut: whether the last iteration of `chunks` found that the compressed file is truncated or damaged.

    Raises:
        EmbeddingError: if there is no such file, or an archive has several files and none is named.
    """

    def __init__(self, path: Path) -> None:
        self.path, inner = _archive_and_member(path)
        with self._reading(), self.path.open("rb") as file:
            magic = file.read(4)
            self.num_file_bytes = os.fstat(file.fileno()).st_size
        self.packing: Literal["", "gzip", "zip"] = ""
        self.member: str | None = None
        self.is_cut = False
        if magic == _ZIP_MAGIC:
            self.packing = "zip"
            with self._reading():
                self.member = _member(self.path, inner)
        elif magic.startswith(_GZIP_MAGIC):
            self.packing = "gzip"
        if inner is not None and self.packing != "zip":
            raise EmbeddingError(f"{self.path} is not a zip archive, so it has no {inner}: give {self.path} itself")

    @property
    def name(self) -> str:
        """The path as users write it, such as ``archive.zip/name``."""
        return str(self.path) if self.member is None else f"{self.path}/{self.member}"

    @property
    def num_bytes(self) -> int | None:
        """The number of bytes that `chunks` yields; ``None`` for gzip files, which do not store it."""
        if self.member is not None:
            with self._reading(), zipfile.ZipFile(self.path) as archive:
                return archive.getinfo(self.member).file_size
        return None if self.packing else self.num_file_bytes

    @cached_property
    def head(self) -> bytes:
        """The first 64 KiB of the unpacked content, or all of it if it is shorter."""
        with self.opened() as (file, _):
            return _read(file, HEAD_BYTES)[0]

    def companions(self) -> list[Path]:
        """Return the files in the same folder that belong to this file: gensim's arrays, and the words of an array."""
        own = sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.*.npy"))
        is_array = self.head.startswith(_NUMPY_MAGIC)
        return [path for path in [*own, *(words_files(self.path) if is_array else ())] if path.is_file()]

    @contextmanager
    def opened(self) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """Open the file, and yield its unpacked content and the file on the disk.

        The position of the file on the disk shows how much of it has been read.

        Raises:
            EmbeddingError: if the file cannot be read.
        """
        with self._reading(), self.path.open("rb", buffering=0 if not self.packing else _CHUNK_BYTES) as raw:
            if self.packing == "gzip":
                yield cast(IO[bytes], _Gzip(raw)), raw
            elif self.member is not None:
                with zipfile.ZipFile(raw) as archive, archive.open(self.member) as inside:
                    yield inside, raw
            else:
                yield raw, raw

    def chunks(self, num_bytes: int = _CHUNK_BYTES) -> Iterator[tuple[bytes, float]]:
        """Yield the unpacked content in chunks of ``num_bytes``, each with the share of the file read so far (0 to 1).

        If a compressed file is truncated or damaged, iteration ends early without an error, and `is_cut` is set.
        """
        self.is_cut = False
        with self.opened() as (file, raw):
            while not self.is_cut:
                chunk, self.is_cut = _read(file, num_bytes)
                if not chunk:
                    return
                yield chunk, raw.tell() / max(self.num_file_bytes, 1)

    @contextmanager
    def as_file(self) -> Iterator[Path]:
        """Yield the path of an uncompressed file: the file itself, or a temporary copy, deleted afterwards.

        Raises:
            EmbeddingError: if the file cannot be read, is truncated, or the disk has too little space to unpack it.
        """
        if not self.packing:
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix="plimsoll-embeddings-") as folder:
            path = Path(folder) / Path(self.member or self.path.stem).name
            needed_bytes, free_bytes = self.num_bytes or self.num_file_bytes, shutil.disk_usage(folder).free
            if needed_bytes > free_bytes:
                raise EmbeddingError(
                    f"{self.name} must be unpacked to {folder}, which has {format_bytes(free_bytes)} free, but "
                    f"{format_bytes(needed_bytes)} are needed: set TMPDIR to a folder with more"
                )
            self._unpack(path)
            yield path

    def _unpack(self, path: Path) -> None:
        try:
            with path.open("wb") as file:
                for chunk, _ in self.chunks():
                    file.write(chunk)
        except OSError as error:
            raise EmbeddingError(
                f"cannot unpack {self.name} into {path.parent} ({error.strerror or error}): set TMPDIR to a folder "
                "with more space"
            ) from None
        if self.is_cut:
            raise EmbeddingError(
                f"{self.name} is cut off or damaged after {format_bytes(path.stat().st_size)}, unpacked: "
                "download it again"
            )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EmbeddingError(
                f"cannot read {self.path} ({error.strerror or error}): check the path, or change its permissions"
            ) from None
        # zipfile raises NotImplementedError for an unknown compression method, RuntimeError for a missing password.
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            if "encrypted" in str(error):
                raise EmbeddingError(f"{self.path} is encrypted: give the unpacked file") from None
            raise EmbeddingError(f"cannot read the archive {self.path} ({error}): download it again") from None


class _Gzip:
    """The unpacked content of a gzip file. `gzip.GzipFile` reads 8 KiB at a time and takes a third longer."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._packed, self._engine = raw, b"", zlib.decompressobj(_GZIP)

    def read1(self, num_bytes: int) -> bytes:
        """Return up to ``num_bytes`` bytes, or none at the end.

        Raises:
            EOFError: if the file is truncated.
            zlib.error: if it is damaged.
        """
        while True:
            packed = self._packed or self._raw.read(_PACKED_BYTES)
            if self._engine.eof:  # a gzip member ended; zeros and another member may follow
                packed = packed.lstrip(b"\0")
                if not packed and not (packed := self._raw.read(_PACKED_BYTES).lstrip(b"\0")):
                    return b""
                self._engine = zlib.decompressobj(_GZIP)
            piece = self._engine.decompress(packed, num_bytes)
            self._packed = self._engine.unconsumed_tail or self._engine.unused_data
            if piece:
                return piece
            if not packed and not self._engine.eof:
                raise EOFError


def _read(file: IO[bytes], num_bytes: int) -> tuple[bytes, bool]:
    """Return up to ``num_bytes`` bytes, and whether reading ended early in a truncated or damaged compressed file."""
    # Unlike read, read1 returns nearly all of the content before the point of truncation.
    read = file.read1 if hasattr(file, "read1") else file.read
    pieces = []
    try:
        while num_bytes and (piece := read(min(num_bytes, _PIECE_BYTES))):
            pieces.append(piece)
            num_bytes -= len(piece)
    except _BROKEN:
        return b"".join(pieces), True
    return b"".join(pieces), False


def words_files(path: Path) -> list[Path]:
    """Return the paths at which the words of the array ``path`` are searched for, in the order of the search."""
    own = [path.with_suffix(suffix) for suffix in _WORDS_SUFFIXES]
    return [*own, *(path.with_name(name) for name in _WORDS_NAMES)]


def _archive_and_member(path: Path) -> tuple[Path, str | None]:
    """Split ``archive.zip/name`` into its two names if ``archive.zip`` is a file; else return ``path`` and ``None``.

    Raises:
        EmbeddingError: if there is no such file.
    """
    for parent in path.parents:
        if parent.is_file():
            return parent, str(path.relative_to(parent))
    if path.is_dir():
        raise EmbeddingError(f"{path} is a folder: name the file with the vectors in it")
    if path.exists() and not path.is_file():
        raise EmbeddingError(
            f"{path} is not a regular file, so it cannot be read twice: write it to a disk, and give that file"
        )
    if not path.exists():
        where = f" (relative to {Path.cwd()})" if not path.is_absolute() else ""
        raise EmbeddingError(
            f"there is no file {path}{where}: give a file of word vectors (GloVe or word2vec text, word2vec or "
            "fastText .bin, gensim KeyedVectors, .npy with words, .safetensors; .gz and .zip of these)"
        )
    return path, None


def _member(path: Path, inner: str | None) -> str:
    with zipfile.ZipFile(path) as archive:
        names = [info.filename for info in archive.infolist() if not info.is_dir()]
    names = [name for name in names if not name.startswith("__MACOSX/")] or names  # added by macOS
    if not names:
        raise EmbeddingError(f"{path} holds 0 files: give an archive with a file of word vectors")
    if inner is None and len(names) == 1:
        return names[0]
    if inner in names:
        return str(inner)
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    if inner is None:
        raise EmbeddingError(f"{path} holds {len(names)} files ({listed}): name one as {path}/{names[0]}")
    raise EmbeddingError(f"{path} holds no file {inner} but {listed}: name one of them")
