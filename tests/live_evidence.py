"""Hand-made evidence of a live process: 1,000 MiB of a training in addition to 200 MiB before it."""

from plimsoll.diagnose.evidence import Evidence, Kept, Seen
from plimsoll.diagnose.parse.event import event_of
from plimsoll.records.diagnosis import Share

MIB = 1 << 20
TEXT = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"


def live(*kept, activations_mib=0, num_steps=5, code="x", **seen):
    """Return a process that keeps these objects, with the rest as temporaries."""
    kept_bytes = sum(one.num_bytes for one in kept)
    sizes = {"kept by variables": kept_bytes, "activations": activations_mib * MIB, "baseline": 200 * MIB}
    sizes["temporaries"] = max(0, 1000 * MIB - kept_bytes - activations_mib * MIB)
    event = event_of(TEXT).model_copy(update={"place": "train.py:3", "code": code})
    return Evidence(
        subject="RuntimeError", kind="cpu", last_step=num_steps, peak_bytes=1200 * MIB, event=event, has_run_out=True,
        shares=tuple(Share(category=name, num_bytes=size, known="counted") for name, size in sizes.items()),
        limit_bytes=1100 * MIB, requested_bytes=4096, seen=Seen(kept=kept, **seen),
    )  # fmt: skip


def kept(name="cache", **fields):
    """Return a list of 40 items, which was empty before the first step."""
    made = {"kind": "list", "num_items": 40, "num_items_before": 0, "place": "train.py:9", "code": f"{name}.append(x)"}
    return Kept(name=name, **made | fields)
