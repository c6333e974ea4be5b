"""What one out-of-memory text says: its kind, every number it states, and what is likely behind it.

Field names and words are those of the project's labelled texts, so that a reader of the JSON record can hold one
against the other. All sizes are in bytes. What a text does not state is ``None``, never a guess.
"""

from __future__ import annotations

from typing import Literal

from plimsoll.records.base import Frozen

LikelyCause = Literal[
    "true_capacity", "fragmentation", "other_process", "absurd_request", "host_ram", "tiny_shm", "unknown"
]

Bytes = int
"""The names say no unit, as they are those of the labels; this does."""


class OomText(Frozen):
    """One event of a text or a log.

    Attributes:
        kind: which program printed it, such as ``cuda_allocator_new_format`` or ``oom_killer_dmesg``.
        subformat: which form of it, such as ``2.2.1-2.8 capacity``.
        is_oom: whether memory ran out at all; a look-alike is no event of memory.
        tried_to_allocate: what was asked for.
        capacity: of the device.
        free: of the device, at that moment.
        allocated_by_pytorch: live bytes of torch's allocator.
        reserved_unallocated: what torch's allocator holds and does not use.
        reserved_total: what torch's allocator holds.
        derived_reserved_unallocated: as stated, or the difference of what is stated.
        other_process: what other processes use.
        this_process: what this one uses, allocator and context.
        allowed_limit: a limit below the capacity that the process has been given.
        device_index: of the device.
        likely_cause: what its numbers say; ``unknown`` where they do not.
        likely_cause_alt: what they could as well say.
        text: the lines themselves, at most 4,000 characters.
        line_number: of its first line in the file, from 1.
        num_times: how often the same text stands in the file.
        place: the last line of the user's own code in the traceback above it, ``file.py:12``; "" without one.
        code: that line itself.
        above: the end of the Python traceback above it, at most 2,000 characters.
    """

    kind: str
    subformat: str | None = None
    is_oom: bool
    tried_to_allocate: Bytes | None = None
    capacity: Bytes | None = None
    free: Bytes | None = None
    allocated_by_pytorch: Bytes | None = None
    reserved_unallocated: Bytes | None = None
    reserved_total: Bytes | None = None
    derived_reserved_unallocated: Bytes | None = None
    other_process: Bytes | None = None
    this_process: Bytes | None = None
    allowed_limit: Bytes | None = None
    device_index: int | None = None
    likely_cause: LikelyCause | None = None
    likely_cause_alt: LikelyCause | None = None
    text: str = ""
    line_number: int | None = None
    num_times: int = 1
    place: str = ""
    code: str = ""
    above: str = ""
