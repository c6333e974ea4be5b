"""Inference plans, small enough to check by hand; 1 MiB is 2**20 bytes."""

from __future__ import annotations

from plimsoll.records.placement import InferencePlan, Part, Place, RejectedPlacement
from plimsoll.records.plan import Duration
from prediction_records import MIB, estimate


def block(number: int, place: Place = "device") -> Part:
    """Return a block of 100 MiB."""
    return Part(name=f"model.layers.{number}", num_bytes=100 * MIB, place=place, is_streamed=place != "device")


def rejected(rows: int, mib: int, rows_per_second: float, reason: str) -> RejectedPlacement:
    """Return a rejected number of rows."""
    return RejectedPlacement(
        micro_batch=rows,
        resident_bytes=210 * MIB,
        peak=estimate(mib, 40),
        rows_per_second=rows_per_second,
        reason=reason,
    )


def streamed_plan(**changes: object) -> InferencePlan:
    """Return a plan of 710 MiB: two of six blocks and the rest stay; 500 MiB are read in a pass of 8 s, in 4 s at 125
    MiB/s.
    """
    places: tuple[Place, ...] = ("disk", "disk", "device", "disk", "disk", "device")
    fields: dict[str, object] = {
        "model": "LlamaForCausalLM, 186.1 M weights",
        "task": "score",
        "device": "A Processor",
        "device_kind": "cpu",
        "dtype": "float32",
        "budget_bytes": 1016 * MIB,
        "limit_bytes": 1000 * MIB,
        "limit_source": "budget - 16.0 MiB headroom",
        "kept_back_bytes": 16 * MIB,
        "parts": (
            *(block(number, place) for number, place in enumerate(places)),
            Part(name="output layer", num_bytes=70 * MIB, place="disk", is_streamed=True),
            Part(name="embeddings", num_bytes=30 * MIB, place="disk"),
            Part(name="the rest", num_bytes=10 * MIB, place="device"),
        ),
        "longest_tokens": 256,
        "micro_batch": 32,
        "peak": estimate(900, 50),
        "pass_time": Duration(likely_seconds=8.0, low_seconds=6.4, high_seconds=10.0),
        "compute_seconds": 8.0,
        "read_seconds": 4.0,
        "read_bytes": 500 * MIB,
        "read_bytes_per_second": 125.0 * MIB,
        "rate_source": "measured",
        "rejected": (
            rejected(16, 800, 3.0, "predicted to do 25% fewer rows a second"),
            rejected(64, 1300, 4.1, "may exceed the limit by 340.0 MiB even with the fewest weights on the device"),
        ),
        "num_traces": 3,
        "plan_seconds": 2.5,
    }
    return InferencePlan.model_validate(fields | changes)


def resident_plan() -> InferencePlan:
    """Return a plan in which all weights stay, without a budget."""
    parts = tuple(part.model_copy(update={"place": "device", "is_streamed": False}) for part in streamed_plan().parts)
    return streamed_plan(
        parts=parts, budget_bytes=None, limit_bytes=4096 * MIB, read_bytes=0, read_seconds=0.0, rejected=(),
        read_bytes_per_second=None, rate_source="none", limit_source="memory available to this process",
    )  # fmt: skip


def impossible_plan() -> InferencePlan:
    """Return a plan in which one row needs 516 MiB of 416."""
    return streamed_plan(
        budget_bytes=416 * MIB, limit_bytes=400 * MIB, peak=estimate(480, 20), micro_batch=1,
        smallest_budget_bytes=516 * MIB, rejected=(),
    )  # fmt: skip


def linked_plan(**changes: object) -> InferencePlan:
    """Return a plan with a GPU: four blocks and the output layer are transferred over the link for 16 new tokens."""
    parts = tuple(
        part.model_copy(update={"place": "host" if part.is_streamed else "device"}) for part in streamed_plan().parts
    )
    return streamed_plan(
        parts=parts, task="generate", new_tokens=16, device="A Card", device_kind="cuda", dtype="float16",
        read_seconds=12.0, pass_time=Duration(likely_seconds=12.0, low_seconds=8.0, high_seconds=18.0),
        read_bytes=7520 * MIB, read_bytes_per_second=10_000.0 * MIB, rate_source="table",
        **changes,
    )  # fmt: skip
