"""Time and memory of `plimsoll explain` on a large memory snapshot, compared with `pickle.load` of the same file.

    python benchmarks/explain_snapshot.py               # a snapshot of 1 GiB, written to a temporary folder
    python benchmarks/explain_snapshot.py --mib 64 --frames 5

The events are allocations and frees of a training in torch's format; each allocation has a separate stack of
``--frames`` frames. Prints a table, and one JSON object as the last line. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_SITE = "/usr/lib/python3/site-packages/torch/nn/modules/"


def write_snapshot(path: Path, num_bytes: int, num_frames: int) -> int:
    """Write a snapshot of about ``num_bytes``, and return its number of events."""
    torch_frames = [{"filename": f"{_SITE}m{i}.py", "line": i, "name": "forward"} for i in range(300)]
    user_frames = [{"filename": "train.py", "line": i, "name": "main"} for i in range(300)]
    events: list[dict[str, Any]] = []

    def pieces(number: int) -> None:
        for event in range(number):
            frames = [torch_frames[(event + i) % 300] for i in range(num_frames - 1)] + [user_frames[event % 300]]
            for action in ("alloc", "free_requested", "free_completed"):
                events.append(
                    {"action": action, "addr": 0x7F0000000000 + 512 * event, "size": 4096 + event % 1000, "stream": 0}
                    | {"time_us": 10**15 + event, "compile_context": "N/A", "user_metadata": "", "frames": frames}
                )

    pieces(2000)
    per_piece = len(pickle.dumps(events)) / 2000
    events.clear()
    pieces(int(num_bytes / per_piece))
    with path.open("wb") as file:
        pickle.dump({"segments": [], "device_traces": [events], "allocator_settings": {}}, file)
    return len(events)


def timed(command: list[str]) -> dict[str, Any]:
    """Return the seconds, processor seconds and peak resident memory of a command, as counted by the kernel."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    out = process.stdout.read()
    _, _, usage = os.wait4(process.pid, 0)
    processor_seconds = usage.ru_utime + usage.ru_stime
    seconds = {"seconds": time.perf_counter() - started, "processor_seconds": processor_seconds}
    return seconds | {"peak_bytes": usage.ru_maxrss * 1024, "out": out.decode()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--frames", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as temporary:
        small, large = Path(temporary) / "small.pickle", Path(temporary) / "large.pickle"
        make = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import explain_snapshot as e; "
        for path, num_bytes in ((small, 1 << 20), (large, args.mib << 20)):
            # In a separate process: memory that a parent holds at the fork would be counted as the child's.
            code = f"{make}print(e.write_snapshot(e.Path({str(path)!r}), {num_bytes}, {args.frames}))"
            num_events = int(timed([sys.executable, "-c", code])["out"])
        num_mib = large.stat().st_size / 2**20
        explain = [sys.executable, "-m", "plimsoll", "explain", "--json"]
        load = f"import pickle; pickle.load(open({str(large)!r}, 'rb'))"
        found = {
            "explain, 1 MiB": timed([*explain, str(small)]),
            "explain": timed([*explain, str(large)]),
            "pickle.load": timed([sys.executable, "-c", load]),
        }
    assert json.loads(found["explain"]["out"])["peak_bytes"] > 0
    table = Table(
        "command",
        "seconds",
        "of a processor",
        "peak, MiB",
        title=f"{num_events:,} events in a snapshot of {num_mib:.0f} MiB",
    )
    for name, one in found.items():
        table.add_row(
            name, f"{one['seconds']:.1f}", f"{one['processor_seconds']:.1f}", f"{one['peak_bytes'] / 2**20:.0f}"
        )
    Console(width=100).print(table)
    figures = {name: {key: value for key, value in one.items() if key != "out"} for name, one in found.items()}
    print(json.dumps({"num_events": num_events, "file_mib": num_mib, **figures}))


if __name__ == "__main__":
    main()
