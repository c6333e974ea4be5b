"""The demo on a GPU: the plain loop runs out of memory inside a limit, and Plimsoll finishes inside it."""

from __future__ import annotations

import json

from benchmarks.gpu.parts import Task, run

from plimsoll.records.units import format_bytes, parse_bytes

LIMIT = "1GiB"


def run_part(task: Task) -> None:
    if task.is_tiny:
        task.not_reached("on a processor: that is `make demo`")
        return
    done = run(task, "benchmarks/demo.py", "--limit", LIMIT, "--steps", "6", "--out", str(task.folder / "demo"))
    if done.code is None:
        task.not_reached(f"its end in {done.seconds:.0f} s")
        return
    if done.code:
        task.check("the demo ends well", f"exit code {done.code}: {done.last_line}", 0, ok=False)
        return
    found = json.loads(done.output.splitlines()[-1])
    task.say({"id": "demo", "kind": "demo", "seconds": round(done.seconds, 1), **found})
    died = "OutOfMemoryError" in found["plain_error"]
    task.check(f"the plain loop inside {LIMIT}", found["plain_error"][:60] or "finished", "out of memory", died)
    task.check(f"Plimsoll inside {LIMIT}", found["status"], "finished", found["status"] == "finished")
    peak_bytes = found["peak_bytes"]
    task.check("its peak, allocated", format_bytes(peak_bytes), LIMIT, 0 < peak_bytes <= parse_bytes(LIMIT))
    apart = max(abs(ours / plain - 1) for ours, plain in zip(found["losses"], found["plain_losses"], strict=False))
    task.check("losses of the same steps", f"{apart:.1e} apart", "1e-4", apart <= 1e-4)
