"""The events and stacks of a snapshot in compact form.

Each stack is reduced to a site: the line of user code and the phase of training. Each event is reduced to a row of
numbers.

A frame is user code if it is a Python file outside installed packages and the standard library, and no torch compiler
wrote it. The phase of an allocation is guessed from the innermost frame whose name shows one: a frame of torch's
optimizers, autograd, ``Module.to`` or a ``forward``. Frames after the first 1,000 of a stack are ignored.

Source: ``torch/csrc/cuda/Module.cpp`` (`memorySnapshot`) and ``memory_snapshot.cpp`` of torch 2.0 to 2.13.
"""

from __future__ import annotations

import re
from array import array
from typing import Any, Literal, NamedTuple

from plimsoll.files.pickles import Sealed

Phase = Literal["optimizer", "backward", "parameters", "forward", ""]

ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, OOM, OTHER = range(7)
_ACTIONS = {
    "alloc": ALLOC,
    "free_requested": FREE_REQUESTED,
    "free_completed": FREE_COMPLETED,
    "segment_alloc": SEGMENT_ALLOC,
    "segment_map": SEGMENT_ALLOC,
    "segment_free": SEGMENT_FREE,
    "segment_unmap": SEGMENT_FREE,
    "oom": OOM,
}
_MOST_BYTES = 1 << 63
_BITS = (1 << 64) - 1
_MOST_CHARACTERS = 400

_INSTALLED = re.compile(
    r"site-packages|dist-packages|[/\\]lib(?:64)?[/\\]python\d|[/\\]torch[/\\]|torchinductor|^<(?!ipython|stdin)"
)
_PYTHON = re.compile(r"\.py$|^<(?:ipython|stdin)")
_MOVING = {"_apply", "to", "cuda", "half", "float", "bfloat16", "double", "to_empty", "convert"}
_BACKWARD_FILES = ("torch/autograd/__init__.py", "torch/autograd/graph.py", "torch/_tensor.py")


class Site(Sealed):
    """The place in the code that an event or block came from: the line of user code ("" if unknown) and the phase."""

    __slots__ = ("index", "phase", "place")

    def __init__(self, index: int, place: str, phase: Phase) -> None:
        self.index, self.place, self.phase = index, place, phase


class _Frame(Sealed):
    __slots__ = ("phase", "place")

    def __init__(self, filename: str, line: int, name: str) -> None:
        is_users = _PYTHON.search(filename) is not None and _INSTALLED.search(filename) is None
        self.place = f"{_printable(filename)}:{line}" if is_users else ""
        self.phase = _phase_of(filename.replace("\\", "/"), name)


class EventRow(int, Sealed):
    """The row number of an event in `Columns`."""

    __slots__ = ()


class Columns(NamedTuple):
    """The events of a snapshot, with one item for each event in each column.

    Attributes:
        actions: number of the action, such as `ALLOC`.
        addresses: address of the memory; for an out-of-memory event, the number of free bytes.
        sizes: size in bytes.
        sites: index of the site.
    """

    actions: array[int]
    addresses: array[int]
    sizes: array[int]
    sites: array[int]


class Recording:
    """Converter that makes a snapshot compact while it is read.

    Its methods are called for each dict and list of the file, and return the object that replaces it.
    """

    def __init__(self) -> None:
        self.unknown = Site(0, "", "")
        self.sites = [self.unknown]
        self.columns = Columns(array("B"), array("Q"), array("Q"), array("i"))
        self._frames: dict[tuple[str, int, str], _Frame] = {}
        self._sites: dict[tuple[str, Phase], Site] = {("", ""): self.unknown}

    def of_dict(self, container: dict[str, Any]) -> Any:
        """Return the replacement for a dict of the file.

        This is a row number for an event, a compact frame for a frame of a stack, and the dict itself otherwise.
        """
        if "action" in container:
            return self._event(container)
        if "filename" in container:
            return self._frame(container)
        return container

    def of_list(self, container: list[Any]) -> Any:
        """Return the site that replaces a list of frames, which is a stack. Other lists are returned unchanged."""
        return self._site(container) if container and type(container[0]) is _Frame else container

    def site_of(self, frames: object) -> Site:
        """Return the site of an event or a block; the unknown site if it has no stack."""
        return frames if type(frames) is Site else self.unknown

    def _frame(self, container: dict[str, Any]) -> Any:
        key = container["filename"], container.get("line", 0), container.get("name", "")
        if tuple(map(type, key)) != (str, int, str):
            return container
        if key not in self._frames:
            self._frames[key] = _Frame(*key)
        return self._frames[key]

    def _site(self, frames: list[Any]) -> Site:
        place = ""
        phase: Phase = ""
        for frame in frames:
            if type(frame) is _Frame:
                place = place or frame.place
                phase = phase or frame.phase
                if place and phase:
                    break
        site = self._sites.get((place, phase))
        if site is None:
            site = self._sites[place, phase] = Site(len(self.sites), place, phase)
            self.sites.append(site)
        return site

    def _event(self, container: dict[str, Any]) -> Any:
        size = container.get("size", 0)
        address = container.get("addr", container.get("device_free", 0))
        if not _is_of_64_bits(size) or not _is_of_64_bits(address):
            return container
        columns = self.columns
        action = container["action"]
        columns.actions.append(_ACTIONS.get(action, OTHER) if type(action) is str else OTHER)
        columns.addresses.append(address & _BITS)
        columns.sizes.append(size & _BITS)
        columns.sites.append(self.site_of(container.get("frames")).index)
        return EventRow(len(columns.actions) - 1)


def is_size(value: object) -> bool:
    """Return whether a value is a possible number of bytes: an integer from 0 to below 2^63."""
    return type(value) is int and 0 <= value < _MOST_BYTES


def _is_of_64_bits(value: object) -> bool:
    """Return whether a value is a 64-bit integer, signed or unsigned.

    torch's C++ writer stores the upper half of the unsigned numbers as negative numbers.
    """
    return type(value) is int and -_MOST_BYTES <= value <= _BITS


def _printable(filename: str) -> str:
    """Return the end of a file name, without characters that control a terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in filename[-_MOST_CHARACTERS:])


def _phase_of(path: str, name: str) -> Phase:
    if "torch/optim/" in path:
        return "optimizer"
    if "autograd::Engine" in name or (path.endswith(_BACKWARD_FILES) and "backward" in name):
        return "backward"
    if path.endswith("torch/nn/modules/module.py") and name in _MOVING:
        return "parameters"
    return "forward" if name == "forward" else ""
