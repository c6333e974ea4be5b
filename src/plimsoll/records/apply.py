"""The result of `plimsoll apply`: counts of rows and tokens, the settings, and the time and memory used."""

from __future__ import annotations

from typing import ClassVar, Literal

from plimsoll.records.base import Record
from plimsoll.records.run import OomEvent

Dtype = Literal["stored", "fp32", "bf16", "fp16"]
"""The data types of weights; ``stored`` means the type in the checkpoint."""


class ApplyFacts(Record):
    """The result of applying a model to the rows of a file.

    If the command was interrupted and resumed, counts include the rows of earlier processes. ``tokens_per_pass`` and
    ``rows_per_pass`` are the limits of one forward pass, and ``block_rows`` is the limit of rows that are read at once.

    Measurements (seconds, passes, padding, out-of-memory errors, peak) are of this process alone. It processed the
    ``num_new_rows`` rows that follow the first ``first_row`` rows. ``faults`` lists the first rows without a result,
    with the reasons.
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
