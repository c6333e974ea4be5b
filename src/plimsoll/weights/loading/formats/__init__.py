"""How weights lie in files: one module per format, each with the functions of `Format`.

A format is told by the first bytes of a file and never by its name. A format reads headers alone: where each tensor is
and of which shape and type; what is in a file is never run. `plimsoll.weights.loading.opening` lists the modules; the
contract tests run over every module of this folder.
"""

from __future__ import annotations

from typing import Protocol

from plimsoll.weights.loading.entries import Entry, WeightFile

HEAD_BYTES = 16
"""What `Format.recognises` is given of a file, or less where it is shorter."""


class Format(Protocol):
    """What a module of this folder offers."""

    TITLE: str
    """How the format is called in messages."""

    def recognises(self, head: bytes) -> bool:
        """Whether a file that begins so is of this format."""
        ...

    def read_entries(self, source: WeightFile) -> list[Entry]:
        """List the tensors of a file.

        Raises:
            WeightsError: if it is damaged, cut off, or holds something else than tensors.
        """
        ...
