"""A training whose weights, gradients and Adam states are four times its memory, compared with one without a limit.

    python benchmarks/train_larger_than_memory.py --data 'corpus/*.txt' [--layers 12] [--width 1024] [--share 4]
        [--search] [--out table.md]

Two runs of `plimsoll train` on the CPU train a new GPT-2 in fp32 with AdamW and without dropout. One has no limit and
no techniques. The other has a plan and a budget of a quarter (``--share``) of weights + gradients + Adam states. The
budget covers the whole private memory of the training process, including interpreter and libraries (RLIMIT_DATA
enforces it). Measured are that memory, read from outside every 5 ms and by the run itself, the losses, the final
weights, and the median step time. Predicted are the peak and the step time of the plan.

By default the plan uses given techniques; with ``--search``, the planner searches for them, which takes minutes.
Offloaded data are files whose pages the kernel keeps in free memory. On a machine without free memory, every step waits
for the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from statistics import median

import psutil
import yaml
from safetensors import safe_open

from _results import INSIDE_A_LIMIT, add_out, file_result, mib, table
from plimsoll.device.process import private_bytes
from plimsoll.models.build import build_model
from plimsoll.models.workload import resident_bytes
from plimsoll.records.job import Job
from plimsoll.records.plan import Plan
from plimsoll.records.run import RunRecord

MIB = 1 << 20
PINS = ("parameter_offload=true", "optimizer_offload=disk", "checkpointing=all")
FORBIDDEN = (
    "activation_offload",
    "optimizer_in_backward",
    "optimizer_kernel",
    "chunked_loss",
    "attention",
)


def main() -> None:
    """Run the benchmark."""
    arguments = parsed()
    with tempfile.TemporaryDirectory(prefix="larger-", dir=arguments.folder) as name:
        folder = Path(name)
        job_file = write_job(folder, arguments)
        job = Job.from_yaml(job_file)
        model = build_model(job, arguments.vocabulary, None, 0, device="meta")
        parts = resident_bytes(model, job.optimizer)
        state_bytes = sum(size or 0 for size in parts.values())
        limit_mib = state_bytes // arguments.share // MIB
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"{num_parameters / 1e6:,.1f} M parameters: {state_bytes / MIB:,.0f} MiB of weights, gradients and states"
        )
        cache = ("--cache", folder / "cache")
        free_peak = run("train", job_file, "--no-plan", "--out", folder / "free", *cache)
        constraints = () if arguments.search else constraints_of(arguments.batch)
        run("plan", job_file, "--budget", f"{limit_mib}MiB", *constraints, "-o", folder / "plan.json")
        limited_peak = run("train", job_file, "--plan", folder / "plan.json", "--out", folder / "limited", *cache)
        report(folder, arguments, limit_mib * MIB, state_bytes, (free_peak, limited_peak))


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="text to train on, as data.train of a job")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--share", type=int, default=4, help="the budget is weights, gradients and states divided by this number"
    )
    parser.add_argument("--search", action="store_true", help="let the planner search for the techniques")
    parser.add_argument("--folder", type=Path, help="folder for the runs; offloaded files are in PLIMSOLL_SCRATCH")
    add_out(parser)
    return parser.parse_args()


def write_job(folder: Path, arguments: argparse.Namespace) -> Path:
    """Write the job of both runs."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_layer": arguments.layers, "n_embd": arguments.width, "n_head": arguments.width // 64}
    job = {
        "model": {"architecture": "gpt2", **sizes, **rates},
        "data": {"train": arguments.data},
        "tokenizer": {"train": "bpe", "vocab_size": arguments.vocabulary},
        "sequence_length": arguments.length,
        "batch_size": arguments.batch,
        "optimizer": {"name": "adamw", "lr": 3e-4, "clip_norm": 1.0},
        "steps": arguments.steps,
        "checkpoint": {"every": arguments.steps, "keep": 1},
        "device": "cpu",
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


def constraints_of(batch_size: int) -> list[str]:
    """Return the pinned and forbidden choices that leave nothing to search for."""
    pins = [word for pin in (*PINS, f"micro_batch={batch_size}") for word in ("--pin", pin)]
    return pins + [word for name in FORBIDDEN for word in ("--forbid", name)]


def run(*words: object) -> int:
    """Run a Plimsoll command, and return the highest private memory observed in its training process."""
    command = [sys.executable, "-m", "plimsoll", *map(str, words)]
    process = subprocess.Popen(command, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peaks = [0]
    ended = threading.Event()
    watcher = threading.Thread(target=watch, args=(process.pid, peaks, ended))
    watcher.start()
    _, errors = process.communicate()
    ended.set()
    watcher.join()
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{errors}")
    return peaks[0]


def watch(pid: int, peaks: list[int], ended: threading.Event) -> None:
    """Record the highest private memory of the training process until the command ends."""
    worker: psutil.Process | None = None
    while not ended.wait(0.005 if worker else 0.1):
        try:
            worker = worker or worker_of(pid)
            if worker is not None:
                peaks[0] = max(peaks[0], private_bytes(worker.pid))
        except (OSError, psutil.Error):
            worker = None


def worker_of(pid: int) -> psutil.Process | None:
    """Return the training process that a supervisor has started, or None."""
    return next((one for one in psutil.Process(pid).children() if "train-worker" in one.cmdline()), None)


def report(
    folder: Path, arguments: argparse.Namespace, limit_bytes: int, state_bytes: int, peaks: tuple[int, int]
) -> None:
    """Print the table, and the figures as one JSON object."""
    plan = Plan.load(folder / "plan.json")
    fallback = plan.fallbacks[0]
    assert fallback.peak is not None
    assert fallback.step_time is not None
    predicted_bytes = fallback.peak.likely_bytes
    free, limited = (RunRecord.from_directory(folder / name) for name in ("free", "limited"))
    loss_difference = max(abs(one.loss - other.loss) for one, other in zip(free.steps, limited.steps, strict=True))
    weight_difference = largest_difference(folder)
    seconds = [median(line.step_seconds for line in record.steps[1:]) for record in (free, limited)]
    own_peaks = [max(line.peak_bytes for line in record.steps) for record in (free, limited)]
    rows = [
        ("", "without a limit", "with the limit", "predicted"),
        ("limit MiB", "", f"{limit_bytes / MIB:,.0f}", ""),
        ("weights + gradients + states, times the limit", "", f"{state_bytes / limit_bytes:.2f}", ""),
        ("peak MiB, seen from outside", *(f"{one / MIB:,.0f}" for one in peaks), f"{predicted_bytes / MIB:,.0f}"),
        ("peak MiB, as the run counts", *(f"{one / MIB:,.0f}" for one in own_peaks), ""),
        ("seconds a step", *(f"{one:.2f}" for one in seconds), f"{fallback.step_time.likely_seconds:.2f}"),
        ("last loss", f"{free.steps[-1].loss:.6f}", f"{limited.steps[-1].loss:.6f}", ""),
        ("largest difference of a loss", "", f"{loss_difference:.3g}", ""),
        ("largest difference of a weight", "", f"{weight_difference:.3g}", ""),
        ("out of memory", str(len(free.oom_events)), str(len(limited.oom_events)), ""),
    ]  # fmt: skip
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "| --- | --- | --- | --- |")
    lines.append(f"\nThe plan: {' '.join(map(str, fallback.choices))}")
    print("\n".join(lines))
    name = (
        f"a GPT-2 with {state_bytes / MIB:,.0f} MiB of weights, gradients and states is fine-tuned with AdamW; largest "
        f"difference of a weight: {weight_difference:.3g}"
    )
    part = table(INSIDE_A_LIMIT, [[name, *map(mib, (limit_bytes, peaks[1], predicted_bytes, peaks[0]))]])
    title = "A full fine-tuning larger than its memory, with and without the limit"
    file_result(arguments.out, "train-larger-than-memory", title, "\n".join(lines), part)
    figures = {
        "state_bytes": state_bytes,
        "limit_bytes": limit_bytes,
        "peak_bytes": peaks[1],
        "unlimited_peak_bytes": peaks[0],
        "predicted_bytes": predicted_bytes,
        "step_seconds": seconds[1],
        "unlimited_step_seconds": seconds[0],
        "predicted_seconds": fallback.step_time.likely_seconds,
        "loss_difference": loss_difference,
        "weight_difference": weight_difference,
    }
    print(json.dumps(figures))


def largest_difference(folder: Path) -> float:
    """Return the largest difference between the weights of the two runs."""
    one, other = (safe_open(folder / name / "model" / "model.safetensors", "pt") for name in ("free", "limited"))
    names = sorted(one.keys())
    assert names == sorted(other.keys())
    return max(float((one.get_tensor(name) - other.get_tensor(name)).abs().max()) for name in names)


if __name__ == "__main__":
    main()
