"""Hand-made results of `plimsoll apply`."""

from __future__ import annotations

from typing import Any

from plimsoll.records.apply import ApplyFacts
from plimsoll.records.run import OomEvent

MIB = 1 << 20


def apply_facts(**changes: Any) -> ApplyFacts:
    """Return 1,000 rows of 50 tokens in 10 s, resumed after the 200th, with 10 % padding."""
    event = OomEvent(
        phase="evaluation",
        family="cpu allocator",
        requested_bytes=64 * MIB,
        live_bytes=400 * MIB,
        capacity_bytes=512 * MIB,
        micro_batch=32,
        action="tokens of a pass 4,096 -> 2,048",
        raw_text="RuntimeError: not enough memory",
    )
    fields: dict[str, Any] = {
        "model": "models/reviews",
        "task": "classify",
        "data": "reviews.jsonl",
        "output": "labels.jsonl",
        "device": "cpu",
        "dtype": "float32",
        "budget_bytes": 512 * MIB,
        "longest_tokens": 128,
        "tokens_per_pass": 4096,
        "rows_per_pass": 256,
        "block_rows": 4096,
        "num_rows": 1000,
        "num_faults": 2,
        "num_truncated": 5,
        "num_tokens": 50_000,
        "first_row": 200,
        "num_new_rows": 800,
        "num_new_tokens": 40_000,
        "num_passes": 20,
        "num_padded_tokens": 44_444,
        "faults": ("row 300: the text is empty", "row 301: it is not JSON (Expecting value at character 1)"),
        "oom_events": (event,),
        "peak_bytes": 500 * MIB,
        "load_seconds": 1.5,
        "seconds": 10.0,
    }
    return ApplyFacts(**fields | changes)


def plain_apply_facts() -> ApplyFacts:
    """Return facts without resuming, truncation, faults or memory figures."""
    nothing = {"num_faults": 0, "num_truncated": 0, "faults": (), "oom_events": (), "peak_bytes": None}
    return apply_facts(**nothing, first_row=0, num_new_rows=1000, num_new_tokens=50_000, budget_bytes=None)
