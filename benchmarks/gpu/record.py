"""Record the memory and time of trainings on this machine's GPU, for comparison with Plimsoll's predictions.

    PYTHONPATH=src python -m benchmarks.gpu.record [--minutes 9] [--out FILE] [--only PART ...] [--resume]

Runs the matrix of `benchmarks.gpu.cases` in order of priority until the time is over, and writes the file atomically
after every few runs. A run that fails is recorded with its error. If the device itself fails, a new process continues.
Needs torch and transformers, not Plimsoll. The default file is ``tests/recordings/<gpu>-torch<version>.json.gz``;
``tests/recordings/README.md`` describes its format. ``--device cpu --tiny`` runs the same code without a GPU; its
numbers are None.

Kinds of runs:

- *shared*: in one process, with all memory freed between runs;
- *limited*: the same with a limit near its peak, to see whether it runs out of memory;
- *fresh*: in a new process, to see allocations at first use;
- *probe*: single kernels.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from benchmarks._results import processor
from benchmarks.gpu.cases import Case, all_cases, bases, build, by_hand, train, weights_key
from benchmarks.gpu.files import FORMAT, ROOT, default_path, differences, read_recording, write_recording
from benchmarks.gpu.meter import FAILURES, Meter
from benchmarks.gpu.probes import PROBES, context_growth
from torch import nn

LIMIT_SHARES = (0.80, 0.92, 0.97, 1.0, 1.05)  # of the memory that the same run reserved without a limit
FRESH_MODELS = ("gpt2", "bert-mlm", "lstm-lm", "gru-cls")
WRITE_EVERY_SECONDS = 15.0
FRESH_SECONDS, SPARE_SECONDS = 120.0, 8.0
_ENVIRONMENT = re.compile(
    r"PYTORCH_(CUDA_|HIP_)?ALLOC|CUBLAS|CUDA_(MODULE|LAUNCH|VISIBLE)|TORCH_(CUBLAS|CUDNN|ALLOW)|NVIDIA_TF32"
)


@dataclass(frozen=True)
class Run:
    """One run to record; ``case`` is None for a probe, which `name` identifies."""

    kind: Literal["shared", "limited", "fresh", "probe"]
    priority: int
    case: Case | None = None
    name: str = ""
    limit_share: float | None = None
    with_events: bool = False

    @property
    def id(self) -> str:
        """An id that is equal for the same run in every recording."""
        if self.case is None:
            return f"probe:{self.name}"
        return self.case.id + {"limited": f"@{self.limit_share}", "fresh": "@fresh"}.get(self.kind, "")


def all_runs(tiny: bool = False) -> list[Run]:
    """Return all runs in their order."""

    def sized(case: Case) -> Case:
        return case.shrunk() if tiny else case

    runs = [Run("shared", one.priority, sized(one.case), with_events=one.priority == 0) for one in all_cases()]
    runs += [Run("probe", 1, name=name) for name in PROBES]
    runs += [Run("fresh", 2, sized(base)) for base in bases() if base.model in FRESH_MODELS]
    runs += [Run("probe", 2, name="context_growth")]
    gpt2 = bases()[0]
    halves = (dataclasses.replace(gpt2, precision="bf16"), dataclasses.replace(gpt2, checkpointing=True))
    runs += [
        Run("limited", 2, sized(case), limit_share=share) for case in (*bases(), *halves) for share in LIMIT_SHARES
    ]
    runs += [Run("shared", 5, sized(case)) for case in by_hand()]
    first_of_id = {run.id: run for run in reversed(runs)}  # small cases may coincide
    return sorted((run for run in runs if first_of_id[run.id] is run), key=lambda run: run.priority)


class Recording:
    """The recorded file: a header, and a row for each run."""

    def __init__(self, path: Path, header: dict[str, Any], resume: bool) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.header = header
        if resume and path.is_file():
            found = read_recording(path)
            if differing := differences(found["header"], header):
                raise SystemExit(f"{path.name} was recorded elsewhere ({differing}): give another --out")
            self.rows, self.header = found["runs"], found["header"] | {"resumed": header}
        self._written = time.monotonic()

    def row(self, run_id: str) -> dict[str, Any] | None:
        return next((row for row in self.rows if row["id"] == run_id), None)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if time.monotonic() - self._written > WRITE_EVERY_SECONDS:
            self.write()

    def write(self) -> None:
        write_recording(self.path, {"format": FORMAT, "header": self.header, "runs": self.rows})
        self._written = time.monotonic()


# -- one run -----------------------------------------------------------------------------------------------------------


class Runner:
    """Performs runs on one device; ``originals`` are models by their weights, copied for each run."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._originals: dict[object, nn.Module] = {}

    def do(self, run: Run, recording: Recording) -> dict[str, Any]:
        """Perform one run, and return its row."""
        started = time.monotonic()
        row: dict[str, Any] = {"id": run.id, "kind": run.kind}
        try:
            row |= self._done(run, recording)
        except FAILURES as error:  # errors outside the training: after some of them the device does not answer
            row |= {"case": run.case and run.case.to_dict(), "limit_bytes": None} | _failure(error)
        return row | {"seconds": round(time.monotonic() - started, 2)}

    def _done(self, run: Run, recording: Recording) -> dict[str, Any]:
        if run.kind == "fresh" or run.name == "context_growth":
            return self._in_fresh_process(run)
        if run.case is None:
            return {"rows": self._probe(run.name)}
        if run.kind == "limited":
            return self._limited(run, run.case, recording)
        return self.train(run.case, with_events=run.with_events)

    def train(self, case: Case, limit_bytes: int | None = None, with_events: bool = False) -> dict[str, Any]:
        """Train a case, and return its numbers."""
        meter = self.meter
        taken = [self._model(case)]  # popped below, so that `train` has the only reference
        meter.clean()
        allocated, reserved, _ = meter.now()
        row: dict[str, Any] = {
            "case": case.to_dict(), "limit_bytes": limit_bytes, "before_allocated_bytes": allocated,
            "before_reserved_bytes": reserved, "outside_before_bytes": meter.outside_bytes(),
        }  # fmt: skip
        marks: list[tuple[object, ...]] = []
        ends_seconds: list[float] = []

        def note(step: int, phase: str) -> None:
            if phase in {"model", "optimizer"}:  # elsewhere, waiting would stop calls from running ahead of kernels
                meter.wait()
                ends_seconds.append(time.perf_counter())
            marks.append((step, phase, *meter.now()))

        def work() -> None:
            with meter.limited_to(limit_bytes), meter.events_into(row, with_events):
                train(case, taken.pop(), str(meter.device), note)
                meter.wait()

        row |= attempt(work) | meter.peaks()
        row["marks"] = marks
        row["step_seconds"] = [round(end - begin, 5) for begin, end in pairwise(ends_seconds)]
        allocated, reserved, _ = meter.now()
        row |= {
            "after_reserved_bytes": reserved, "outside_after_bytes": meter.outside_bytes(),
            "nvml_used_bytes": meter.nvml_used_bytes(), "nvml_process_bytes": meter.nvml_process_bytes(),
        }  # fmt: skip
        return row

    def _limited(self, run: Run, case: Case, recording: Recording) -> dict[str, Any]:
        free = recording.row(case.id)
        peak_bytes = free and free.get("peak_reserved_bytes")
        if not peak_bytes or free is None or free["status"] != "ok":
            reason = f"no peak of {case.id} to take a share of"
            return {"case": case.to_dict(), "status": "left out", "error": reason}
        assert run.limit_share is not None
        return self.train(case, limit_bytes=int(peak_bytes * run.limit_share))

    def _probe(self, name: str) -> list[dict[str, Any]]:
        self.meter.clean()
        return list(PROBES[name](self.meter))

    def _in_fresh_process(self, run: Run) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "row.json"
            told = json.dumps(None if run.case is None else run.case.to_dict())
            command = [sys.executable, "-m", __spec__.name, "--device", str(self.meter.device)]
            command += ["--alone", told, "--out", str(path)]
            self.meter.clean()
            try:
                done = subprocess.run(
                    command, cwd=ROOT, capture_output=True, text=True, timeout=FRESH_SECONDS, check=False
                )
            except subprocess.TimeoutExpired:
                return {"status": "error", "error": f"took more than {FRESH_SECONDS} s"}
            if not path.is_file():
                return {"status": "error", "error": f"exit {done.returncode}: {done.stderr[-500:]}"}
            row: dict[str, Any] = json.loads(path.read_text())
            return row

    def _model(self, case: Case) -> nn.Module:
        key = weights_key(case)
        if key not in self._originals:
            self._originals[key] = build(case)
        return copy.deepcopy(self._originals[key])


def attempt(work: Callable[[], None]) -> dict[str, Any]:
    """Call a function and return how it ended; its objects are freed."""
    try:
        work()
    except FAILURES as error:
        return _failure(error)
    return {"status": "ok", "error": None}


def _failure(error: BaseException) -> dict[str, Any]:
    status = "oom" if isinstance(error, torch.OutOfMemoryError) else "error"
    return {"status": status, "error": f"{type(error).__name__}: {error}"[:1000]}


def alone(meter: Meter, case: Case | None) -> dict[str, Any]:
    """Perform the work of a fresh process: one case, or the probe of the context."""
    if case is None:
        return {"rows": list(context_growth(meter)), "used_before_bytes": meter.used_before_bytes}
    moments = {"process": meter.used_before_bytes, "first tensor": None, "trained": None}
    if meter.is_cuda:
        torch.zeros(1, device=meter.device)
        moments["first tensor"] = meter.outside_bytes()
    row = Runner(meter).train(case)
    return row | {"outside_bytes": moments | {"trained": meter.outside_bytes()}}


# -- the machine -------------------------------------------------------------------------------------------------------


def describe(meter: Meter) -> dict[str, Any]:
    """Return the header: everything besides the cases that affects the numbers."""
    header: dict[str, Any] = {
        "device": "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if meter.is_cuda else None,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "recorded": time.strftime("%Y-%m-%d"),
        "environment": {name: value for name, value in os.environ.items() if _ENVIRONMENT.match(name)},
        "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
    }
    if meter.is_cuda:
        properties = torch.cuda.get_device_properties(meter.device)
        header |= {
            "device": properties.name,
            "capability": list(torch.cuda.get_device_capability(meter.device)),
            "total_bytes": properties.total_memory,
            "num_sms": properties.multi_processor_count,
            "driver": meter.driver_version(),
            "allocator_backend": torch.cuda.get_allocator_backend(),
            "used_before_cuda_bytes": meter.used_before_bytes,
            "outside_at_start_bytes": meter.outside_bytes(),
        }
    return header


# -- the program -------------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit in minutes (default: %(default)s)")
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or cpu to try the code (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[], help="only runs whose id contains one of these")
    parser.add_argument("--out", type=Path, help="file to write")
    parser.add_argument("--tiny", action="store_true", help="minimal models and batches")
    parser.add_argument("--resume", action="store_true", help="continue an existing file")
    parser.add_argument("--list", action="store_true", help="list the runs and exit")
    parser.add_argument("--alone", help=argparse.SUPPRESS)  # a case as JSON, for a fresh process
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    warnings.simplefilter("ignore")  # libraries' advice; important errors are recorded
    transformers.utils.logging.set_verbosity_error()
    runs = [run for run in all_runs(options.tiny) if not options.only or any(part in run.id for part in options.only)]
    if options.list:
        print("\n".join(f"{run.priority} {run.kind:8} {run.id}" for run in runs))
        return
    deadline = time.monotonic() + options.minutes * 60
    meter = Meter(options.device)
    if options.alone:
        told = json.loads(options.alone)
        options.out.write_text(json.dumps(alone(meter, None if told is None else Case.from_dict(told))))
        return
    header = describe(meter)
    if options.out is None and not meter.is_cuda:
        raise SystemExit("--device cpu records nothing that is kept: say where to write, for example --out try.json.gz")
    recording = Recording(options.out or default_path(header), header, options.resume)
    record(list(_open(runs, recording)), Runner(meter), recording, deadline)


def _open(runs: list[Run], recording: Recording) -> Iterator[Run]:
    """Return an iterator over the runs that are not recorded yet."""
    done = {row["id"] for row in recording.rows}
    return (run for run in runs if run.id not in done)


def record(runs: list[Run], runner: Runner, recording: Recording, deadline: float) -> None:
    """Perform the runs until the time is over, and report the remaining ones."""
    print(f"{recording.header['device']}, torch {recording.header['torch']}: {len(runs)} runs", flush=True)
    for number, run in enumerate(runs, start=1):
        if time.monotonic() > deadline - SPARE_SECONDS:
            print(f"the time is over: {len(runs) - number + 1} runs are left out; continue with --resume", flush=True)
            break
        row = runner.do(run, recording)
        recording.add(row)
        print(f"{number}/{len(runs)} {summary_of(row)}", flush=True)
        if row.get("status") == "error" and not runner.meter.is_alive():
            recording.write()
            _go_on_in_new_process(deadline)
    recording.write()
    print(f"wrote {recording.path}: {len(recording.rows)} runs, {recording.path.stat().st_size / 1024:.0f} KiB")


def summary_of(row: dict[str, Any]) -> str:
    if "rows" in row:
        num_failed = sum("error" in one for one in row["rows"])
        return f"{row['id']}: {len(row['rows'])} rows, {num_failed} failed, {row['seconds']} s"
    peaks = [row.get(f"peak_{name}_bytes") for name in ("allocated", "reserved")]
    text = " / ".join("-" if peak is None else f"{peak / 2**20:.1f}" for peak in peaks)
    return f"{row['id']}: {row['status']}, {text} MiB, {row['seconds']} s {(row.get('error') or '')[:150]}"


def _go_on_in_new_process(deadline: float) -> None:
    """Replace this process, because CUDA does not answer in it after some errors."""
    print("the device does not answer any more: continuing in a new process", flush=True)
    minutes = max((deadline - time.monotonic()) / 60, 0.0)
    given = [word for word in sys.argv[1:] if word != "--resume"]
    os.execv(sys.executable, [sys.executable, "-m", __spec__.name, *given, "--resume", f"--minutes={minutes:.3f}"])


if __name__ == "__main__":
    main()
