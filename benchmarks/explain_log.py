"""Time and memory of `plimsoll explain` on a long log, read as a stream, compared with `grep -c` on the same file.

    python benchmarks/explain_log.py                    # a log of 1 GiB, written to a temporary folder
    python benchmarks/explain_log.py --mib 64

The log has typical lines of trainings (progress, losses, warnings that mention memory), and one line of 16 MiB. Every
100,000 lines there are a traceback and a CUDA out-of-memory error. Prints a table, and one JSON object as the last
line. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ERROR = """Traceback (most recent call last):
  File "train.py", line 41, in <module>
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 346.00 MiB. GPU 0 has a total capacity of 14.56 GiB of \
which 343.81 MiB is free. Including non-PyTorch memory, this process has 14.22 GiB memory in use. Of the allocated \
memory 12.84 GiB is allocated by PyTorch, and 1.26 GiB is reserved by PyTorch but unallocated.
"""


def write_log(path: Path, num_bytes: int) -> int:
    """Write a log of about ``num_bytes``, and return its number of errors."""
    lines = []
    for step in range(100_000):
        lines.append(f"[rank0] step {step} loss {3 - step / 1e5:.4f} tokens/s {1000 + step % 97} memory 14.1 GiB\n")
    piece = ("".join(lines) + ERROR).encode()
    num_errors = 0
    with path.open("wb") as file:
        file.write(b"x" * (16 << 20) + b"\n")
        while file.tell() < num_bytes:
            file.write(piece)
            num_errors += 1
    return num_errors


def timed(command: list[str]) -> dict[str, Any]:
    """Return the seconds and the peak resident memory of one command, as counted by the kernel."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    out = process.stdout.read()
    _, _, usage = os.wait4(process.pid, 0)
    return {"seconds": time.perf_counter() - started, "peak_bytes": usage.ru_maxrss * 1024, "out": out.decode()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as temporary:
        small, large = Path(temporary) / "small.log", Path(temporary) / "large.log"
        write_log(small, 1 << 20)
        num_errors = write_log(large, args.mib << 20)
        explain = [sys.executable, "-m", "plimsoll", "explain", "--json"]
        found = {
            "explain, 16 MiB": timed([*explain, str(small)]),
            f"explain, {args.mib} MiB": timed([*explain, str(large)]),
            f"grep -c, {args.mib} MiB": timed(["grep", "-c", "out of memory", str(large)]),
        }
    event = json.loads(found[f"explain, {args.mib} MiB"]["out"])["event"]
    assert event["num_times"] == num_errors, (event["num_times"], num_errors)
    assert (event["place"], event["tried_to_allocate"]) == ("train.py:41", 346 << 20)
    table = Table("command", "seconds", "peak, MiB", title=f"{num_errors} errors in a log of {args.mib} MiB")
    for name, one in found.items():
        peak = "-" if name.startswith("grep") else f"{one['peak_bytes'] / 2**20:.0f}"
        table.add_row(name, f"{one['seconds']:.1f}", peak)
    Console(width=100).print(table)
    print(
        json.dumps({name: {"seconds": one["seconds"], "peak_bytes": one["peak_bytes"]} for name, one in found.items()})
    )


if __name__ == "__main__":
    main()
