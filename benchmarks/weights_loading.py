"""Loading a large checkpoint: time relative to a bare read of its files, peak private memory, and smallest limit.

    PYTHONPATH=src python benchmarks/weights_loading.py [--layers 24] [--hidden 2048] [--folder /disk] [--rounds 5]

There are four methods, each in a new process that has imported its libraries and loaded a small model before. ``bare``
reads the files one after the other into one tensor (``os.preadv``), ``memory`` and ``mapped`` are ``load_model``,
``plain`` is ``from_pretrained``. In a round, all four run in turn, with the files in the page cache (``warm``) and
after dropping them from it (``cold``, ``posix_fadvise``). Ratios are between medians, relative to ``bare``.

``mapped`` reads only headers. The peak is private memory (``RssAnon``) above the earlier value. The smallest limit is
found by bisecting ``RLIMIT_DATA`` above the earlier value, to 16 MiB. With ``--dtype``, weights are converted while
loading.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _large_model import add_options, large_model
from _results import add_out, fenced, file_result, keep_printed, mib

PROCESS = Path(__file__).with_name("_loading_process.py")
WAYS = ("bare", "memory", "mapped", "plain")
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("stored", "float32", "float16"), default="stored")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "plimsoll-large-model")
    parser.add_argument("--no-limits", action="store_true", help="skip the search for the smallest limit")
    add_out(parser)
    options = parser.parse_args()
    printed = keep_printed()
    place = large_model(options.folder, options)
    seconds: dict[str, dict[str, list[float]]] = {state: {way: [] for way in WAYS} for state in ("warm", "cold")}
    facts: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):
        for state, found in seconds.items():
            for way in WAYS:
                facts[way] = run(way, place, state, options.dtype)
                found[way].append(facts[way]["seconds"])
    weights_bytes = facts["memory"]["weights_bytes"]
    results: dict[str, Any] = {"weights_bytes": weights_bytes, "largest_bytes": facts["memory"]["largest_bytes"]}
    print(f"{weights_bytes / MIB:,.0f} MiB of weights, the largest {results['largest_bytes'] / MIB:,.0f} MiB")
    for way in WAYS:
        medians = {state: statistics.median(found[way]) for state, found in seconds.items()}
        ratios = {state: medians[state] / statistics.median(seconds[state]["bare"]) for state in medians}
        least_bytes = None if options.no_limits or way == "bare" else least_limit(way, place, options.dtype)
        results[way] = {**facts[way], "seconds": medians, "of_bare": ratios, "least_limit_bytes": least_bytes}
        print(
            f"{way:7} warm {medians['warm']:6.2f} s ({ratios['warm']:5.2f} of bare), cold {medians['cold']:6.2f} s "
            f"({ratios['cold']:5.2f}), peak {facts[way]['peak_bytes'] / MIB:8,.0f} MiB, at the end "
            f"{facts[way]['end_bytes'] / MIB:8,.0f} MiB, least limit "
            f"{'-' if least_bytes is None else format(least_bytes / MIB, ',.0f')} MiB",
            flush=True,
        )
    memory, mapped = results["memory"], results["mapped"]
    part = (
        f"Loading {weights_bytes / 2**30:.1f} GiB takes {memory['of_bare']['cold']:.1f} times as long as reading their "
        f"files from the disk, and {mib(memory['peak_bytes'] - weights_bytes)} of private memory beside them; mapped "
        f"{mapped['seconds']['cold']:.1f} s and {mib(mapped['peak_bytes'])} in all."
    )
    file_result(options.out, "weights-loading", "Loading a large checkpoint", fenced(printed.text), part)
    print(json.dumps(results))


def run(way: str, place: Path, state: str, dtype: str, limit_bytes: int = 0) -> dict[str, Any]:
    command = [sys.executable, str(PROCESS), way, str(place), state, dtype, str(limit_bytes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        return {"fits": False}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def least_limit(way: str, place: Path, dtype: str) -> int:
    """Find the smallest private memory above the earlier value in which loading succeeds, to 16 MiB."""
    fails_bytes, fits_bytes = 0, 16 << 30
    while fits_bytes - fails_bytes > 16 * MIB:
        middle_bytes = (fails_bytes + fits_bytes) // 2
        if run(way, place, "warm", dtype, middle_bytes)["fits"]:
            fits_bytes = middle_bytes
        else:
            fails_bytes = middle_bytes
    return fits_bytes


if __name__ == "__main__":
    main()
