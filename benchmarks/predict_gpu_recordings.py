"""How far Plimsoll's predictions are from what GPUs did, over all recordings that are kept.

    PYTHONPATH=src:. python benchmarks/predict_gpu_recordings.py [FILE ...] [--only PART ...]

Prints a table for each recording, one line a run, and a last line of JSON with the figures of each. Nothing is executed
on a GPU: the recordings are files of ``tests/recordings`` and ``benchmarks/recorded``, which `make gpu` makes. Exits
with 1 if a figure is out of the bounds of ``benchmarks/gpu/compare.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu import compare, files


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="recordings (default: all that are kept)")
    parser.add_argument("--only", nargs="+", default=[], help="only runs with one of these in their id")
    options = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    paths = options.files or files.recordings()
    if not paths:
        print(
            f"There is no recording in {files.RECORDINGS}, so nothing was compared: make one on a machine with a GPU, "
            "`make gpu`"
        )
    figures = {path.name: report(path, options.only) for path in paths}
    print(json.dumps(figures))
    return int(any(one["faults"] for of_file in figures.values() for one in of_file["groups"].values()))


def report(path: Path, only: list[str]) -> dict[str, dict]:
    """Print the comparison with one recording and return its figures."""
    recording = files.read_recording(path)
    header = recording["header"]
    rows = [row for row in compare.comparable(recording) if not only or any(part in row["id"] for part in only)]
    print(f"{path.name}: {header['device']}, recorded {header['recorded']}, {len(rows)} runs to compare")
    print(compare.versions_differ(header) or "recorded with the versions that predict here")
    started = time.perf_counter()
    compared = compare.compare(recording, rows)
    seconds = time.perf_counter() - started
    print(compare.table(compared))
    groups = {}
    for one in compare.summarize(compared):
        print(f"{one.group}: {one.num_runs} runs, {one.figures}", *one.faults, sep="\n  ")
        groups[one.group] = {"runs": one.num_runs, **one.figures, "faults": len(one.faults)}
    return {"groups": groups, "seconds": round(seconds, 1)}


if __name__ == "__main__":
    raise SystemExit(main())
