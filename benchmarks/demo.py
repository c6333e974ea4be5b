"""Two arms under one memory limit: the plain PyTorch loop, which runs out of memory, and Plimsoll, which finishes.

    python benchmarks/demo.py [--data PATH] [--limit 1GiB] [--steps 12] [--out demo-out]

Trains a small GPT-2 on the sources of this machine's Python standard library, or on the text in ``--data``. On the CPU,
the limit applies to private memory, and this process measures peaks by reading /proc/PID/statm of the training
processes. With a CUDA device, the limit applies to device memory, and peaks come from the allocator.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

import plimsoll
from _results import file_result
from _results import table as markdown
from plimsoll.data.prepare import prepare
from plimsoll.device.process import private_bytes
from plimsoll.errors import OutputError, PlimsollError, PlimsollWarning
from plimsoll.records.units import format_bytes, parse_bytes
from plimsoll.report.progress import stages

NEED_STEPS = 2
POLL_SECONDS = 0.002
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Arm:
    """The outcome of one arm; ``peak_bytes`` is measured from outside on the CPU."""

    code: int
    output: str
    errors: str
    peak_bytes: int


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a text file, a folder or a pattern; by default the standard library's sources")
    parser.add_argument("--limit", default="1GiB", help="memory limit of both arms (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=12, help="optimizer steps of the Plimsoll arm (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="output folder (default: %(default)s)")
    parser.add_argument("--result", type=Path, help="folder for the result file, such as benchmarks/results")
    arguments = parser.parse_args()
    try:
        demo(arguments.data, arguments.limit, arguments.steps, arguments.out, arguments.result)
    except PlimsollError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def demo(data: str | None, limit: str, num_steps: int, out: Path, result: Path | None) -> None:
    """Prepare the text, run the arms, print the table and write the report."""
    console = Console(stderr=True)
    job_file, prepared = prepared_job(data, num_steps, out)
    shutil.rmtree(out / "known", ignore_errors=True)  # a calibration from earlier runs would change the plan
    os.environ["PLIMSOLL_CACHE"] = str((out / "known").resolve())
    plain = [sys.executable, str(HERE / "_plain_loop.py"), str(job_file), str(prepared), "--steps", str(NEED_STEPS)]

    console.rule("1. what the plain PyTorch loop needs (no limit)")
    need = run(plain)
    if need.code:
        sys.exit(f"the plain loop failed without a limit:\n{need.errors}")
    need_steps = [json.loads(line) for line in need.output.splitlines()]
    on_cuda = plimsoll.probe().devices[-1].kind == "cuda"
    need_bytes = need_steps[-1]["peak_bytes"] if on_cuda else need.peak_bytes
    console.print(
        f"{format_bytes(need_bytes)}, loss {need_steps[0]['loss']:.4f} then {need_steps[1]['loss']:.4f}",
        highlight=False,
    )

    console.rule(f"2. the same loop inside {limit}")
    died = run([*plain, "--limit", limit])
    console.print(
        last_line(died.errors) if died.code else "it finished: the limit is not below its need",
        highlight=False,
        markup=False,
    )

    console.rule(f"3. Plimsoll inside {limit}")
    command = ["train", str(job_file), "--budget", limit, "--cache", str(out / "data"), "--out", str(out / "run")]
    ours = run([sys.executable, "-m", "plimsoll", *command], show_errors=True)
    if ours.code:
        sys.exit(ours.code)
    record = plimsoll.RunRecord.from_directory(out / "run")
    report = out / "report.html"
    report.write_text(plimsoll.render(record, "html"), encoding="utf-8")
    our_peak_bytes = record.peak_bytes if on_cuda else ours.peak_bytes
    title = f"A batch of {record.job['batch_size']} x {record.job['sequence_length']} tokens inside {limit}"
    table = rows(limit, need_bytes, need_steps, died, record, our_peak_bytes or 0)
    print_table(title, *table)
    peaks = "the allocator's" if on_cuda else "private memory of the training process, read from outside by another"
    part = (
        f"{title}:\n\n{markdown(table[0], table[1:])}\n\nPeaks are {peaks}. Tokens a second are by the clock, on a "
        "machine as busy as its load says."
    )
    plan = " ".join(map(str, record.plan.choices))
    file_result(result, "demo", title, f"The plan: {plan}", part, device="gpu" if on_cuda else "cpu")
    print(f"Report: {report}")
    figures = {
        "limit": limit, "plain_need_bytes": need_bytes, "plain_losses": [step["loss"] for step in need_steps],
        "plain_error": last_line(died.errors) if died.code else "", "status": record.status, "plan": plan,
        "peak_bytes": our_peak_bytes or 0, "losses": [step.loss for step in record.steps],
        "ooms": len(record.oom_events),
    }  # fmt: skip
    print(json.dumps(figures))
    if (our_peak_bytes or 0) > parse_bytes(limit):
        sys.exit("the Plimsoll arm exceeded the limit")


def prepared_job(data: str | None, num_steps: int, out: Path) -> tuple[Path, Path]:
    """Write the job, and index and tokenize its text; return the paths of the job and the prepared data."""
    if out.exists():
        if not (out / "job.yaml").is_file():
            raise OutputError(f"{out} exists and is not an earlier demo's: give another --out")
        shutil.rmtree(out / "run", ignore_errors=True)  # the tokens are kept, and found again by their content
    out.mkdir(parents=True, exist_ok=True)
    job = {
        "model": {
            "architecture": "gpt2",
            **{"n_layer": 4, "n_embd": 192, "n_head": 4},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},  # so that the arms' losses can be compared
        },
        "data": {"train": standard_library() if data is None else [str(Path(data).resolve())], "validation": 0.005},
        "tokenizer": {"train": "bpe", "vocab_size": 8000},
        "sequence_length": 256,
        "batch_size": 32,
        "steps": num_steps,
        "optimizer": {"name": "adamw", "lr": 1e-3, "clip_norm": 1.0},
        "checkpoint": {"every": 50},
    }
    job_file, prepared = out / "job.yaml", out / "prepared.json"
    job_file.write_text(yaml.safe_dump(job, sort_keys=False))
    with stages(quiet=False) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore", PlimsollWarning)  # `plimsoll train` shows them
        prepare(plimsoll.Job.from_yaml(job_file), out / "data", progress).save(prepared)
    return job_file, prepared


def standard_library() -> list[str]:
    """Return patterns of the standard library's sources, without installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    folders = sorted(path for path in root.iterdir() if (path / "__init__.py").is_file() or path.name == "test")
    return [str(root / "*.py"), *(str(folder / "**" / "*.py") for folder in folders if folder.name != "site-packages")]


def run(command: list[str], show_errors: bool = False) -> Arm:
    """Run a command, and measure the private memory of its largest process from outside."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=None if show_errors else subprocess.PIPE, text=True
    )
    peaks = [0]
    watcher = threading.Thread(target=watch, args=(process, peaks))
    watcher.start()
    try:
        output, errors = process.communicate()
    except KeyboardInterrupt:
        process.wait()
        raise
    watcher.join()
    return Arm(process.returncode, output, errors or "", peaks[0])


def watch(process: subprocess.Popen[str], peaks: list[int]) -> None:
    """Record in ``peaks`` the highest private memory of any single process of the tree."""
    tree = psutil.Process(process.pid)
    pids, listed = [process.pid], 0.0
    while process.poll() is None:
        with contextlib.suppress(OSError, psutil.Error):
            if time.monotonic() - listed > 0.1:
                pids, listed = [process.pid, *(child.pid for child in tree.children(recursive=True))], time.monotonic()
            peaks[0] = max([peaks[0], *(private_bytes(pid) for pid in pids)])
        time.sleep(POLL_SECONDS)


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def rows(
    limit: str, need_bytes: int, need_steps: list[dict], died: Arm, record: plimsoll.RunRecord, peak_bytes: int
) -> list[list[str]]:
    """Return the table of the arms; the first row is the header."""
    tokens = record.steps[0].num_units
    return [
        ["arm", "result", "peak memory", "tokens/s", "loss, steps 1-2", "last loss"],
        [
            "plain PyTorch, no limit",
            "what it needs",
            format_bytes(need_bytes),
            f"{tokens / need_steps[-1]['seconds']:,.0f}",
            " ".join(f"{step['loss']:.4f}" for step in need_steps),
            "",
        ],
        [
            f"plain PyTorch, {limit}",
            "died: out of memory" if died.code else "finished",
            format_bytes(died.peak_bytes),
            "",
            "",
            "",
        ],
        [
            f"Plimsoll, {limit}",
            f"{record.status}: {len(record.steps)} steps, {len(record.oom_events)} OOM survived",
            format_bytes(peak_bytes),
            f"{record.units_per_second or 0:,.0f}",
            " ".join(f"{step.loss:.4f}" for step in record.steps[:NEED_STEPS]),
            f"{record.steps[-1].loss:.4f}",
        ],
    ]


def print_table(title: str, header: list[str], *body: list[str]) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number < 2 else "right", overflow="fold")
    for row in body:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
