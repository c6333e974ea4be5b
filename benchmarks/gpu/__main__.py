"""`make gpu`: all checks that need a GPU, in one command of at most 12 minutes.

    python -m benchmarks.gpu [--minutes 12] [--only PART ...] [--resume] [--out FILE] [--results FOLDER]

The parts run in order of value, each in a separate process with a time limit; parts that the time does not reach are
listed. Parts that tolerate other work on the GPU run at the same time if its memory suffices. The command prints one
table of parts, checks, measured values, bounds and results and files it in ``benchmarks/results``. It also writes one
recording, which tests and benchmarks replay on any machine. The default is
``benchmarks/recorded/make-gpu-<card>-torch<version>.json.gz``.

``--resume`` continues that recording, on the same GPU, torch and processor. Finished parts are not repeated, and
results of an earlier try of a part count until a later try reaches a check.

Exit codes: 0 if all reached checks hold, and 1 if a check fails or none was made. 2 means that there is no GPU, a
package is missing, or an existing recording cannot be continued.

It needs torch, transformers, pytest and Plimsoll's requirements, and installs nothing. ``--device cpu`` runs the same
code with small models as a trial; its numbers are meaningless, and no file is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.gpu.files import RECORDED, ROOT, default_path, differences, read_recording, write_recording

NODES = ("nvidia*", "dxg", "kfd")  # of drivers, in /dev: NVIDIA, WSL, AMD
OF_A_PART = ("-m", "benchmarks.gpu")
GIB = 1 << 30
FREE_BYTES = 40 * GIB  # of a GPU on which parts run at the same time
LEAST_SECONDS, GRACE_SECONDS = 15.0, 20.0
_OTHER_NAMES = {"nvidia-ml-py": "pynvml", "pyyaml": "yaml"}


@dataclass(frozen=True)
class Part:
    """One part: the function ``module:name`` and its time limit. Parts of a ``stage`` can run together.

    Earlier parts leave ``kept_seconds`` for it.
    """

    name: str
    about: str
    function: str
    seconds: float
    stage: int
    kept_seconds: float = 0.0


PARTS = (
    Part("tests", "the tests marked gpu", "part_tests:run_part", 180, 1),
    Part("demo", "a plain loop dies inside a limit, Plimsoll finishes", "part_demo:run_part", 200, 1),
    Part("plans", "a plan of one job for each of four limits", "part_job:run_plans", 260, 1),
    Part("recurrent", "an LSTM saved and resumed", "part_recurrent:run_part", 120, 1),
    Part("grid", "the job by hand: micro-batch and checkpointing", "part_job:run_grid", 110, 2, kept_seconds=60),
    Part("planned", "the job inside the limits as planned", "part_job:run_planned", 260, 3, kept_seconds=100),
    Part("storm", "memory taken away by another process", "part_storm:run_part", 90, 4, kept_seconds=70),
    Part("predictions", "what was predicted of the job", "part_predictions:run_part", 120, 4),
    Part("techniques", "the job with each technique", "part_techniques:run_part", 150, 5),
    Part("recovery", "speed after an event", "part_recovery:run_part", 60, 6),
    Part("peaks", "peaks of other models, as many as there is time for", "part_peaks:run_part", 600, 7),
)


# -- a part, in its own process ----------------------------------------------------------------------------------------


def run_alone(options: argparse.Namespace) -> None:
    """Run one part in this process."""
    began = time.monotonic()
    from benchmarks.gpu.parts import Task  # loads torch

    part = next(part for part in PARTS if part.name == options.part)
    task = Task(part.name, options.device, options.folder, options.out, options.rows, began + options.seconds, began)
    task.tell("begins")
    module, _, name = part.function.partition(":")
    getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)(task)


# -- the command -------------------------------------------------------------------------------------------------------


class Session:
    """One command with its time and files; ``rows`` has all results, ``said`` those found by this command."""

    def __init__(self, options: argparse.Namespace, folder: Path, recording: Path) -> None:
        self.options, self.folder, self.recording = options, folder, recording
        self.until = time.monotonic() + options.minutes * 60
        self.rows: list[dict[str, Any]] = read_recording(recording)["runs"]
        self.said: list[dict[str, Any]] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def seconds_left(self) -> float:
        return self.until - time.monotonic()

    def stop(self) -> None:
        """Stop the running parts and their children."""
        for process in self._processes:
            end(process)

    @property
    def wanted(self) -> list[Part]:
        """The requested parts that are not done."""
        done = {row["id"] for row in self.rows}
        return [part for part in PARTS if part.name in self.options.only and f"part:{part.name}" not in done]

    def run(self, parts: Sequence[Part], together: bool) -> None:
        """Run the parts of a stage, and add their results to the recording."""
        with ThreadPoolExecutor(max_workers=len(parts) if together else 1) as pool:
            found = list(pool.map(self._run_part, parts))
        recording = read_recording(self.recording)
        rows = {row["id"]: row for row in (*recording["runs"], *(row for rows in found for row in rows))}
        for part, ours in zip(parts, found, strict=True):
            self.said += ours
            if is_only_left(ours):
                continue
            said = {row["id"] for row in ours}
            stale = [name for name, row in rows.items() if row.get("part") == part.name and name not in said]
            for name in stale:  # from an earlier try of the part
                del rows[name]
        self.rows = recording["runs"] = list(rows.values())
        write_recording(self.recording, recording)

    def _run_part(self, part: Part) -> list[dict[str, Any]]:
        kept = sum(later.kept_seconds for later in self.wanted if later.stage > part.stage)
        span = min(part.seconds, self.seconds_left - kept)
        if span < LEAST_SECONDS:
            return [left(part, "nothing of it: the time was over")]
        rows = self.folder / f"{part.name}.jsonl"
        rows.unlink(missing_ok=True)
        words = ["--part", part.name, "--seconds", f"{span:.0f}", "--device", self.options.device]
        words += ["--folder", str(self.folder), "--out", str(self.recording), "--rows", str(rows)]
        started, log = time.monotonic(), self.folder / f"{part.name}.log"
        print(f"{part.name}: {part.about}, at most {span:.0f} s", flush=True)
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *OF_A_PART, *words], cwd=ROOT, stderr=file, process_group=0,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *path_before()])},
            )  # fmt: skip
            self._processes.append(process)
            code = ended(process, span + GRACE_SECONDS)
        seconds = time.monotonic() - started
        found = [json.loads(line) for line in rows.read_text("utf-8").splitlines()] if rows.is_file() else []
        if code != 0:
            lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
            how = "was stopped: its time was long over" if code is None else f"exit code {code}"
            found.append(check(part, "its process ends well", f"{how}: {(lines or ['silent'])[-1][:150]}"))
        is_whole = code == 0 and not any(row["kind"] == "left" for row in found)
        print(f"{part.name}: {'done' if is_whole else 'ended'} in {seconds:.0f} s", flush=True)
        for row in found:
            if row["kind"] in {"check", "left"}:
                print(f"    {line_of(row)}", flush=True)
        ok = all(row.get("ok", True) for row in found)
        end = {"id": f"part:{part.name}", "kind": "part", "part": part.name, "seconds": round(seconds, 1)}
        return [*found, end] if is_whole and ok else found


def is_only_left(rows: Iterable[dict[str, Any]]) -> bool:
    """Return whether a part reached no check, so that results of an earlier try still count."""
    kinds = {row["kind"] for row in rows}
    return "left" in kinds and "check" not in kinds


def path_before() -> list[str]:
    return list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Wait for a process; return None if it had to be stopped."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        end(process)
        return None


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a group, and the group: first with SIGTERM, so that they can clean up."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def left(part: Part, what: str) -> dict[str, Any]:
    return {"id": f"left:{part.name}:{what}", "kind": "left", "part": part.name, "what": what}


def check(part: Part, what: str, measured: str) -> dict[str, Any]:
    return {"id": f"check:{part.name}:{what}", "kind": "check", "part": part.name, "what": what,
            "measured": measured, "bound": "0", "ok": False}  # fmt: skip


def line_of(row: dict[str, Any]) -> str:
    return " | ".join(cells_of(row)[1:])


def cells_of(row: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    if row["kind"] == "left":
        return [row["part"], row["what"], "not reached", "", ""]
    return [row["part"], row["what"], row["measured"], row["bound"], "yes" if row["ok"] else "NO"]


# -- before it begins --------------------------------------------------------------------------------------------------


def has_driver(nodes: Iterable[str] = NODES) -> bool:
    """Return whether a GPU driver is installed, without loading torch."""
    return any(any(Path("/dev").glob(node)) for node in nodes)


def missing() -> list[str]:
    """Return requirements of Plimsoll and of the tests that this interpreter lacks."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    names = [re.split(r"[><=;\[ ]", one, maxsplit=1)[0] for one in (*wanted, "pytest")]
    return [name for name in names if find_spec(_OTHER_NAMES.get(name, name)) is None]


def begun(options: argparse.Namespace, folder: Path) -> Path:
    """Probe the device, and return the recording: a new one with only a header, or the one to resume.

    Raises:
        SystemExit: with 2 if the device does not answer, if a recording exists and ``--resume`` is missing, or if the
            recording is from another machine.
    """
    header_file = folder / "header.json.gz"
    header_file.unlink(missing_ok=True)
    words = ["-m", "benchmarks.gpu.record", "--out", str(header_file), "--only", "nothing"]
    words += ["--device", "cpu", "--tiny"] if options.device == "cpu" else ["--device", options.device]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        refuse(f"{options.device} does not answer: {(done.stderr.strip().splitlines() or ['it does not say why'])[-1]}")
    recording = read_recording(header_file)
    kept = RECORDED if options.device != "cpu" else folder
    path: Path = (options.out or kept / f"make-gpu-{default_path(recording['header']).name}").resolve()
    if not path.is_file():
        write_recording(path, recording)
    elif not options.resume:
        refuse(f"{path.name} exists: continue it with --resume, or give another --out")
    else:
        try:
            differing = differences(read_recording(path)["header"], recording["header"])
        except ValueError as error:
            refuse(f"{error}; or give another --out")
        if differing:
            refuse(f"{path.name} was recorded elsewhere ({differing}): give another --out")
    return path


def refuse(text: str) -> NoReturn:
    print(text)
    sys.exit(2)


def has_free_memory(header: dict[str, Any]) -> bool:
    """Return whether parts can run at the same time on this GPU."""
    free_bytes = header.get("total_bytes", 0) - header.get("outside_at_start_bytes", 0)
    return bool(free_bytes >= FREE_BYTES)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--minutes", type=float, default=12.0, help="time limit in minutes (default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="PART", help=f"parts to run: {', '.join(names)}"
    )
    parser.add_argument("--resume", action="store_true", help="continue an existing recording")
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or cpu to try the code (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file of the recording (default: below benchmarks/recorded)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the table")
    parser.add_argument("--folder", type=Path, help="folder for temporary files (default: a new one)")
    for told in ("--part", "--rows"):  # for the process of one part
        parser.add_argument(told, type=Path if told == "--rows" else str, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.part:
        run_alone(options)
        return 0
    if options.device != "cpu" and not has_driver():
        print(
            f"make gpu needs a GPU, and this machine has none (no {', '.join(f'/dev/{node}' for node in NODES)}): "
            "run it where there is one"
        )
        return 2
    if lacking := missing():
        print(f"{sys.executable} lacks {', '.join(lacking)}: install them, or choose another interpreter, PYTHON=...")
        return 2
    with tempfile.TemporaryDirectory(prefix="plimsoll-gpu-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return go(options, folder)


def go(options: argparse.Namespace, folder: Path) -> int:
    started = time.monotonic()
    session = Session(options, folder, begun(options, folder))
    wanted, together = session.wanted, has_free_memory(read_recording(session.recording)["header"])
    try:
        for stage in sorted({part.stage for part in wanted}):
            session.run([part for part in wanted if part.stage == stage], together)
    except KeyboardInterrupt:
        session.stop()
        raise
    return hand_over(session, time.monotonic() - started)


def hand_over(session: Session, seconds: float) -> int:
    """Print and file the table, and return the exit code."""
    from benchmarks._results import file_result, table
    from benchmarks.gpu.shown import readme_part

    order = [part.name for part in PARTS]
    found = [row for row in session.rows if row["kind"] in {"check", "left"}]
    found.sort(key=lambda row: order.index(row["part"]))
    faults = [row for row in found if row["kind"] == "check" and not row["ok"]]
    num_left = sum(row["kind"] == "left" for row in found)
    printed = table(("part", "what", "measured", "bound", "ok"), map(cells_of, found))
    header = read_recording(session.recording)["header"]
    said = (
        f"{len(found) - num_left} checks, {len(faults)} not as they should be, {num_left} not reached; {seconds:.0f} s"
    )
    print(f"\n{printed}\n\n{header['device']}, torch {header['torch']}: {said}. Recorded: {session.recording.name}")
    for row in faults:
        print(f"fault: {line_of(row)}", file=sys.stderr)
    is_unchecked = bool(session.said) and not any(row["kind"] == "check" for row in session.said)
    if is_unchecked:
        print("not one check was made this time: the table says what was not reached", file=sys.stderr)
    if session.options.device != "cpu":
        title = f"What only a card can show: {header['device']}"
        part = readme_part(session.rows, header, [(part.name, part.about) for part in PARTS])
        text = f"{said}. Recorded in `benchmarks/recorded/{session.recording.name}`.\n\n{printed}"
        file_result(session.options.results, "make-gpu", title, text, part, device="gpu", command=["make", "gpu"])
    print(json.dumps({"checks": len(found) - num_left, "faults": len(faults), "left": num_left}))
    return int(bool(faults) or is_unchecked)


if __name__ == "__main__":
    sys.exit(main())
