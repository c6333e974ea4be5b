"""Formats of weight files: one module per format, each with the functions of `Format`.

The first bytes of a file determine its format, never its name. Only headers are read, for the offset, shape and type of
each tensor; code in a file is never run. `plimsoll.weights.loading.opening` lists the modules; the contract tests cover
every module of this folder.
"""

from __future__ import annotations

from typing import Protocol

from plimsoll.weights.loading.entries import Entry, WeightFile

HEAD_BYTES = 16
"""The number of bytes that `Format.recognises` receives; fewer if the file is shorter."""


class Format(Protocol):
    """The interface of a module in this folder."""

    TITLE: str
    """The name of the format in messages."""

    def recognises(self, head: bytes) -> bool:
        """Return whether a file that begins with these bytes has this format."""
        ...

    def read_entries(self, source: WeightFile) -> list[Entry]:
        """Return the tensors of a file.

        Raises:
            WeightsError: if the file is damaged, truncated, or holds something other than tensors.
        """
        ...
