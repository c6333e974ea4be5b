"""Savings of techniques according to `plimsoll explain`, compared with those in real trainings.

    python benchmarks/remedy_savings.py job.yaml --budget 450MiB --out DIR [--most 8]

The job is explained at a budget that it does not fit. It is then trained for its number of steps inside a sufficient
budget (``--room``): as it is, and with each technique alone, all others forbidden. The measured saving is the
difference of the highest private memory of a step. The planner's combination is not a single technique and is left out.
Remedies that save less than 5 % of the peak are left out as well: such savings are within the noise of the heap.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import plimsoll
from plimsoll.records.diagnosis import Remedy
from plimsoll.records.job_edit import changed_job
from plimsoll.techniques import TECHNIQUES

MIB = 1 << 20
LEAST_SHARE = 0.05


def trained_peak(job: Path, out: Path, *options: str) -> int:
    """Train in a separate process, and return the highest private memory of a step, in bytes."""
    command = [sys.executable, "-m", "plimsoll", "train", str(job), "--out", str(out), "--force", "--json", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return max(step["peak_bytes"] for step in json.loads(done.stdout)["steps"])


def with_remedy(job: Path, remedy: Remedy, out: Path) -> Path:
    """Write the job with a remedy's techniques and without the budget."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "job.yaml"
    settings = {name: value for name, value in remedy.settings.items() if not name.startswith("budget")}
    path.write_text(changed_job(job, path, settings), "utf-8")
    return path


def main() -> None:
    """Explain, train and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--budget", required=True)
    parser.add_argument("--room", default="4GiB", help="a budget that the job fits without techniques")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most", type=int, default=8, help="maximum number of remedies")
    options = parser.parse_args()
    diagnosis = plimsoll.explain(options.job, budget=options.budget)
    assert diagnosis.peak_bytes is not None
    least_bytes = LEAST_SHARE * diagnosis.peak_bytes
    chosen = [one for one in diagnosis.remedies if "pin" in one.settings and (one.saving_bytes or 0) >= least_bytes]
    plain_bytes = trained_peak(options.job, options.out / "plain", "--budget", options.room, "--no-plan")
    print(f"peak predicted {diagnosis.peak_bytes / MIB:.0f} MiB, measured {plain_bytes / MIB:.0f} MiB\n")
    print("| remedy | predicted MiB | low | high | measured MiB | error |\n| --- | --: | --: | --: | --: | --: |")
    errors = []
    for number, remedy in enumerate(chosen[: options.most]):
        folder = options.out / str(number)
        used = {choice.technique for choice in remedy.choices}
        others = [part for name in TECHNIQUES if name not in used for part in ("--forbid", name)]
        job = with_remedy(options.job, remedy, folder)
        saved_bytes = plain_bytes - trained_peak(job, folder / "run", "--budget", options.room, *others)
        errors.append(abs((remedy.saving_bytes or 0) - saved_bytes) / saved_bytes)
        sizes = (remedy.saving_bytes, remedy.saving_low_bytes, remedy.saving_high_bytes, saved_bytes)
        cells = " | ".join("" if size is None else f"{size / MIB:.0f}" for size in sizes)
        print(f"| {' + '.join(map(str, remedy.choices))} | {cells} | {errors[-1]:.0%} |", flush=True)
    print(json.dumps({"num_remedies": len(errors), "median_error": statistics.median(errors)}))


if __name__ == "__main__":
    main()
