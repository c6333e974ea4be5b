"""Plimsoll's predictions, compared with every recorded peak of a GPU.

    PYTHONPATH=src:. python benchmarks/predict_gpu_recordings.py [FILE ...] [--only PART ...] [--out FOLDER]

Prints a line for each run of ``tests/recordings`` and each row of ``benchmarks/recorded`` with peaks. Then it prints
the figures of each group, the rows that are left out with the reason, and a last line of JSON. Nothing is executed on a
GPU. Exits with 1 if a figure exceeds the bounds of ``benchmarks/gpu/compare.py``, with a line for each such row. Exits
with 2 if a FILE cannot be read or there is nothing to compare. If FILEs (recordings by `make gpu`) are given, only they
are compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from benchmarks.gpu import compare, files
from benchmarks.gpu.cases import Case

import _recorded_peaks
from _results import add_out, check_only, errors_table, file_result, keep_printed
from plimsoll.records.prediction import Estimate

Found = tuple[_recorded_peaks.RecordedPeak, dict[str, Estimate]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="recordings (default: all stored peaks)")
    parser.add_argument("--only", nargs="+", default=[], help="only rows whose name contains one of these")
    parser.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), help="number of processes (default: %(default)s)"
    )
    add_out(parser)
    options = parser.parse_args(arguments)
    settle()
    paths = options.files or files.recordings()
    if not paths:
        print(
            f"There is no recording in {files.RECORDINGS}, so nothing was compared: make one on a machine with a GPU, "
            "`make gpu`"
        )
        return 2
    try:
        names = names_of(paths, with_recorded=not options.files)
    except ValueError as error:
        parser.error(str(error))
    if not names:
        parser.error(f"{', '.join(path.name for path in paths)}: no run has a peak to compare")
    check_only(parser, options.only, names)
    printed, started = keep_printed() if options.out else None, time.perf_counter()
    processes = 1 if options.files else options.processes
    errors: dict[str, list[float]] = {"allocated": [], "reserved": []}
    figures = {path.name: report(path, options.only, processes, errors) for path in paths}
    if not options.files:
        figures["benchmarks/recorded"] = report_recorded(options.only, processes, errors)
    if printed:
        print(f"{time.perf_counter() - started:.0f} s in all.")
        names = (("allocated", "allocated on an H200 at most"), ("reserved", "reserved there"))
        part = errors_table(*((said, errors[name]) for name, said in names))
        title = "Predicted peaks against those recorded on GPUs"
        file_result(options.out, "predict-gpu-recordings", title, f"```\n{printed.text}```\n", part, threads=1)
    print(json.dumps(figures))
    return int(any(group["faults"] for groups in figures.values() for group in groups.values()))


def names_of(paths: Sequence[Path], with_recorded: bool) -> list[str]:
    """Return the names that ``--only`` selects from."""
    names = [row["id"] for path in paths for row in compare.comparable(files.read_recording(path))]
    if with_recorded:
        names += [name_of(row) for row in _recorded_peaks.recorded_peaks()[0]]
    return names


def name_of(row: _recorded_peaks.RecordedPeak) -> str:
    return f"{row.kind} {row.name}"


def settle() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # libraries' advice
    transformers.utils.logging.set_verbosity_error()


def in_parallel(function: Callable[..., Any], tasks: Sequence[Any], processes: int) -> list[Any]:
    if processes == 1:
        return [function(task) for task in tasks]
    with multiprocessing.get_context("spawn").Pool(processes, settle) as pool:
        return pool.map(function, tasks, chunksize=1)


def report(path: Path, only: list[str], processes: int, errors: dict[str, list[float]]) -> dict[str, dict]:
    """Print the comparison with one recording, and return its figures."""
    recording = files.read_recording(path)
    header = recording["header"]
    rows = [row for row in compare.comparable(recording) if not only or any(part in row["id"] for part in only)]
    print(f"{path.name}: {header['device']}, recorded {header['recorded']}, {len(rows)} runs to compare")
    print(compare.versions_differ(header) or "recorded with the versions that predict here")
    for reason, ids in compare.left_out(recording).items():
        print(f"left out, {reason}: {', '.join(ids)}")
    ids_of_case: dict[Case, list[str]] = {}  # each case is traced once
    for row in rows:
        ids_of_case.setdefault(Case.from_dict(row["case"]), []).append(row["id"])
    parts = in_parallel(_compared, [(path, ids) for ids in ids_of_case.values()], processes)
    place = {row["id"]: number for number, row in enumerate(rows)}
    compared = sorted((one for part in parts for one in part), key=lambda one: place[one.id])
    print(compare.table(compared))
    for one in compared:
        for name in errors if not one.is_verdict else ():
            errors[name].append(one.error(name))
    groups = {}
    for summary in compare.summarize(compared):
        print(f"{summary.group}: {summary.num_runs} runs, {summary.figures}", *summary.faults, sep="\n  ")
        groups[summary.group] = {"runs": summary.num_runs, **summary.figures, "faults": len(summary.faults)}
    return groups


def _compared(task: tuple[Path, list[str]]) -> list[compare.Compared]:
    path, ids = task
    recording = files.read_recording(path)
    return compare.compare(recording, [row for row in recording["runs"] if row["id"] in ids])


def report_recorded(only: list[str], processes: int, errors: dict[str, list[float]]) -> dict[str, dict]:
    """Print the comparison with ``benchmarks/recorded``, and return its figures."""
    rows, left_out = _recorded_peaks.recorded_peaks()
    rows = [row for row in rows if not only or any(part in name_of(row) for part in only)]
    tasks = list(dict.fromkeys(row.task for row in rows))
    of_task = dict(zip(tasks, in_parallel(_recorded_peaks.predict, tasks, processes), strict=True))
    print(f"benchmarks/recorded: {len(rows)} rows to compare")
    for reason in dict.fromkeys(left_out.values()):
        print(f"left out, {reason}: {', '.join(name for name, why in left_out.items() if why == reason)}")
    found: list[Found] = [(row, dict(zip(errors, of_task[row.task], strict=True))) for row in rows]
    print(
        f"{'row':96}"
        + "".join(f"{head:>11}" for head in ("allocated", "predicted", "error", "reserved", "predicted", "error"))
    )
    for row, predicted in found:
        print(f"{name_of(row):96}" + "".join(_cells(row, name, predicted[name]) for name in errors))
    groups = {}
    for kind in dict.fromkeys(row.kind for row in rows):
        figures, faults = figures_of([one for one in found if one[0].kind == kind], errors)
        print(f"{kind}: {figures}", *faults, sep="\n  ")
        groups[kind] = {**figures, "faults": len(faults)}
    return groups


def _cells(row: _recorded_peaks.RecordedPeak, name: str, predicted: Estimate) -> str:
    recorded = getattr(row, f"{name}_bytes")
    likely = predicted.likely_bytes
    return f"{recorded / 2**20:>11,.0f}{likely / 2**20:>11,.0f}{likely / recorded - 1:>+11.2%}"


def figures_of(found: Iterable[Found], errors: dict[str, list[float]]) -> tuple[dict[str, float], list[str]]:
    found = list(found)
    figures: dict[str, float] = {"runs": len(found)}
    faults = []
    for name, all_errors in errors.items():
        shares, outside = {}, []
        for row, predicted in found:
            recorded, of_row = getattr(row, f"{name}_bytes"), predicted[name]
            shares[row.name] = of_row.likely_bytes / recorded - 1
            if not of_row.low_bytes <= recorded <= of_row.high_bytes:
                outside.append(row.name)
        all_errors.extend(shares.values())
        judged, broken = compare.judged(shares, outside)
        figures |= {f"{name}_{figure}": value for figure, value in judged.items()}
        faults += [f"{name}, {fault}" for fault in broken]
    return figures, faults


if __name__ == "__main__":
    raise SystemExit(main())
