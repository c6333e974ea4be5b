"""What `plimsoll apply` did: the rows, how they were computed, and what it took."""

from __future__ import annotations

from typing import ClassVar, Literal

from plimsoll.records.base import Record
from plimsoll.records.run import OomEvent

Dtype = Literal["stored", "fp32", "bf16", "fp16"]
"""What weights can be of."""


class ApplyFacts(Record):
    """A model applied to the rows of a file; counts are of all of them, also of those before a resume.

    What is measured (seconds, passes, padding, errors of memory, the peak) is of this process alone, which did the
    ``num_new_rows`` behind ``first_row``. ``faults`` are the reasons of the first rows that have no result.
    """

    record_kind: ClassVar[str] = "apply"

    model: str
    task: str
    data: str
    output: str
    device: str
    dtype: str
    budget_bytes: int | None = None
    longest_tokens: int | None = None
    tokens_per_pass: int
    rows_per_pass: int
    block_rows: int
    num_rows: int
    num_faults: int
    num_truncated: int
    num_tokens: int
    first_row: int = 0
    num_new_rows: int
    num_new_tokens: int
    num_passes: int
    num_padded_tokens: int
    faults: tuple[str, ...] = ()
    oom_events: tuple[OomEvent, ...] = ()
    peak_bytes: int | None = None
    load_seconds: float
    seconds: float
