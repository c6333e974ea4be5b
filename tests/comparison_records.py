"""A hand-made comparison of two runs; 1 MiB is 2**20 bytes."""

from plimsoll.records.run_comparison import JobDifference, Place, RunComparison, RunSide

MIB = 1 << 20


def side(**changes) -> RunSide:
    """Return two steps under 1 GiB: 400 and 500 MiB, 2 s each, loss 4 and 3; 300 MiB of activations at the predicted
    peak.
    """
    fields = {
        "name": "first",
        "status": "finished",
        "device": "a CPU",
        "unit": "tokens",
        "peak_bytes": 500 * MIB,
        "limit_bytes": 1024 * MIB,
        "predicted_peak_bytes": 480 * MIB,
        "step_seconds": 2.0,
        "units_per_second": 1000.0,
        "choices": ("micro_batch=8",),
        "last_choices": ("micro_batch=8",),
        "steps": (1, 2),
        "losses": (4.0, 3.0),
        "peaks_bytes": (400 * MIB, 500 * MIB),
        "parts": {"activations": 300 * MIB, "parameters": 100 * MIB},
        "places": (Place(category="activations", module="mlp", line="model.py:7", num_bytes=200 * MIB),),
    }
    return RunSide.model_validate(fields | changes)


def comparison(**changes) -> RunComparison:
    """Return a comparison; the second run has half the activations, 250 MiB less, 3 s per step, and one OOM."""
    second = side(
        name="second",
        peak_bytes=250 * MIB,
        predicted_peak_bytes=240 * MIB,
        step_seconds=3.0,
        units_per_second=750.0,
        last_choices=("micro_batch=4",),
        num_oom_events=1,
        num_oom_survived=1,
        losses=(4.0, 2.5),
        peaks_bytes=(200 * MIB, 250 * MIB),
        parts={"activations": 150 * MIB, "parameters": 100 * MIB},
        places=(
            Place(category="activations", module="mlp", line="model.py:7", num_bytes=50 * MIB),
            Place(category="gradients", module="head", line="", num_bytes=10 * MIB),
        ),
    )
    fields = {"first": side(), "second": second, "job": (JobDifference(field="batch_size", first=8, second=4),)}
    return RunComparison.model_validate(fields | changes)
