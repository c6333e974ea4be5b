"""The open files of a corpus: at most 64 at a time, and each must be unchanged since it was indexed.

Size and time are checked before each read of a batch, so any edit is detected with the next batch. Converted files in
the cache are verified by their checksums (`plimsoll.files.checksums`), as far as they are read.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plimsoll.errors import DataError
from plimsoll.files.checksums import Blocks, blocks_of
from plimsoll.files.remote import descriptor_of, is_copy, name_of
from plimsoll.files.store import Facts

_MOST_OPEN = 64


class OpenFiles:
    """Reader of files by file index and offset. It uses no file position, which forked processes would share."""

    def __init__(self, facts: Facts, is_random: bool) -> None:
        self._facts, self._is_random = facts, is_random
        self._descriptors: OrderedDict[int, int] = OrderedDict()
        self._blocks: dict[int, Blocks | None] = {}
        weakref.finalize(self, _close_all, self._descriptors)  # __del__ may run after the interpreter has shut down

    def _require(self, file: int, places: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Verify the checksums of the byte ranges to be read, if the file is a converted file in the cache."""
        if str(file) not in self._facts["stored"]:
            return
        if file not in self._blocks:
            self._blocks[file] = None if is_copy(self.path(file)) else blocks_of(Path(self.path(file)))
        blocks = self._blocks[file]
        if blocks is not None:
            blocks.require(places, places + sizes)

    def path(self, file: int) -> str:
        """Return the path of the file with the index ``file``: the converted file, if it was converted."""
        path: str = self._facts["stored"].get(str(file), self._facts["paths"][file])
        return path

    def read(self, file: int, place: int, num_bytes: int) -> bytes:
        """Return exactly ``num_bytes`` bytes of a file from the offset ``place`` on."""
        descriptor = self.descriptor(file)
        self._require(file, np.array([place]), np.array([num_bytes]))
        raw = os.pread(descriptor, num_bytes, place)
        if len(raw) < num_bytes:
            raise self._too_short(file, place + num_bytes)
        return raw

    def read_many(self, file: int, places: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[bytes]:
        """Return several byte ranges of a file, given their offsets ``places`` and their sizes in bytes."""
        descriptor, pread = self.descriptor(file), os.pread
        self._require(file, places, sizes)
        spans = zip(sizes.tolist(), places.tolist(), strict=True)
        raws = [pread(descriptor, num_bytes, place) for num_bytes, place in spans]
        if sum(map(len, raws)) < sizes.sum():
            raise self._too_short(file, int((places + sizes).max()))
        return raws

    def descriptor(self, file: int) -> int:
        """Return the descriptor of a file, and open the file if necessary.

        Raises:
            DataError: if the file is missing, or has another size or time than when it was indexed.
        """
        descriptor = self._descriptors.get(file)
        if descriptor is not None:
            self._check(file, os.fstat(descriptor))
            self._descriptors.move_to_end(file)
            return descriptor
        path = self.path(file)
        try:
            descriptor = descriptor_of(path)
        except OSError as error:
            raise DataError(
                f"cannot read {name_of(path)} ({error.strerror}): put it back, or allow reading it"
            ) from None
        try:
            self._check(file, os.fstat(descriptor))
        except DataError:
            os.close(descriptor)
            raise
        self._close_removed()
        self._descriptors[file] = descriptor
        if len(self._descriptors) > _MOST_OPEN:
            os.close(self._descriptors.popitem(last=False)[1])
        if self._is_random:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        return descriptor

    def _close_removed(self) -> None:
        """Close deleted copies, because their disk space is freed only when they are closed."""
        for file, descriptor in list(self._descriptors.items()):
            if not os.fstat(descriptor).st_nlink:
                os.close(self._descriptors.pop(file))

    def _check(self, file: int, status: os.stat_result) -> None:
        then, now = self._facts["sizes"][file], status.st_size
        if then != now:
            raise DataError(
                f"{name_of(self.path(file))} has {now} bytes, but had {then} when it was indexed: start again to index "
                "it anew"
            )
        if status.st_mtime_ns != self._facts["mtimes"][file]:
            raise DataError(
                f"{name_of(self.path(file))} was written to since it was indexed: start again to index it anew"
            )

    def _too_short(self, file: int, end: int) -> DataError:
        return DataError(
            f"{name_of(self.path(file))} ends before byte {end}, but was longer when it was indexed: start again to "
            "index it anew"
        )


def _close_all(descriptors: OrderedDict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
