"""The content of an out-of-memory message: its kind, its numbers, and the likely cause.

Field names and values match the labels of the project's collection of error texts, so both can be compared. Sizes are
in bytes. Values that a text does not state are ``None``, never a guess.
"""

from __future__ import annotations

from typing import Literal

from plimsoll.records.base import Frozen

LikelyCause = Literal[
    "true_capacity", "fragmentation", "other_process", "absurd_request", "host_ram", "tiny_shm", "unknown"
]

Bytes = int
"""A size in bytes. The field names, taken from the labels, do not name the unit."""


class OomText(Frozen):
    """One message in a text or a log that reports that memory ran out, or that resembles such a message.

    Attributes:
        kind: the source of the message, such as ``cuda_allocator_new_format`` or ``oom_killer_dmesg``.
        subformat: the version of the message format, such as ``2.2.1-2.8 capacity``.
        is_oom: false for a message that only resembles an out-of-memory error.
        tried_to_allocate: the requested size.
        capacity: the capacity of the device.
        free: free memory of the device when the allocation failed.
        allocated_by_pytorch: live bytes of torch's allocator.
        reserved_unallocated: memory that torch's allocator has reserved and does not use.
        reserved_total: memory that torch's allocator has reserved.
        derived_reserved_unallocated: ``reserved_unallocated``, computed from other values if it is not stated.
        other_process: memory of other processes.
        this_process: memory of this process: allocator and context.
        allowed_limit: the limit of this process, if it is below the capacity.
        device_index: the index of the device.
        likely_cause: the cause that the numbers indicate; ``unknown`` if they do not.
        likely_cause_alt: another cause that fits the numbers equally well.
        text: the lines of the message, at most 4,000 characters.
        line_number: the number of the message's first line in the file, from 1.
        num_times: the number of times that the same message occurs in the file.
        place: the last line of user code in the traceback before the message, ``file.py:12``; "" without a traceback.
        code: the source text of the line ``place``.
        above: the end of the Python traceback before the message, at most 2,000 characters.
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
