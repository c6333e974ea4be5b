"""Predicted memory of CPU trainings, compared with the private memory of their processes.

    python benchmarks/predict_cpu_rss.py [--runs N] [--quick] [--out table.md] [--measured measured.json]

Each case trains for a few steps in a separate process: once inside a generous budget, for which `plimsoll` sets the
heap (see `device.heap`), and once without a budget, with glibc's default malloc. The measured value is the larger of
two: private memory (RssAnon) read by this process every millisecond, and the kernel's high-water mark after each step
without mapped files. The prediction is computed as in `plimsoll predict`, without running the training.

For comparison there is the result of a counter of live tensor bytes (such as torch's ``MemTracker``): the peak of the
live bytes of the same trace.

``--measured`` stores measurements in a file and reuses them, for work on the predictor. Not covered: data loading,
checkpoints, evaluation, and samples of different lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from _results import add_out, errors_table, file_result, quantile
from plimsoll.data.quick_facts import TextSketch
from plimsoll.device.process import private_bytes
from plimsoll.memory.lowering.cpu import CpuLowering
from plimsoll.memory.predict import Counted
from plimsoll.planning.baseline import job_baseline
from plimsoll.planning.dry_run.step import dry_run_job
from plimsoll.planning.targets import Target
from plimsoll.records.job import Job
from plimsoll.records.plan import Choice, micro_batch_choice
from plimsoll.records.prediction import Estimate

HERE = Path(__file__).parent
MIB = 1 << 20
POLL_SECONDS = 0.001
NUM_STEPS, NUM_STEPS_KEPT = 4, 12
KEPT = Choice(technique="heap", options={"mapped_from": "never"})
BUDGET_BYTES = 12 << 30
QUICK = ("bert-4x256", "gpt2-4x192", "t5-small", "lstm-2x512", "gru-2x256", "cnn-small")


@dataclass(frozen=True)
class Case:
    """A training; ``shape`` is (samples, tokens)."""

    name: str
    model: dict[str, Any] | str
    shape: tuple[int, int]
    vocab_size: int = 8000
    num_labels: int | None = None
    micro_batch: int | None = None
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "adamw", "clip_norm": 1.0})
    precision: str = "fp32"
    others: tuple[Choice, ...] = ()

    @property
    def choices(self) -> tuple[Choice, ...]:
        return (micro_batch_choice(self.micro_batch or self.shape[0]), *self.others)

    @property
    def keeps(self) -> bool:
        """True if the heap keeps all freed memory, and so grows for some steps."""
        return KEPT in self.others

    @property
    def num_steps(self) -> int:
        return NUM_STEPS_KEPT if self.keeps else NUM_STEPS

    def job(self) -> Job:
        return Job(
            model=self.model,
            task="language-modeling" if self.num_labels is None else "classification",
            data={"train": "random tokens"},
            sequence_length=self.shape[1],
            batch_size=self.shape[0],
            optimizer=self.optimizer,
            precision=self.precision,
            device="cpu",
            steps=self.num_steps,
        )

    def run(self, is_limited: bool) -> str:
        return json.dumps(
            {
                "job": self.job().to_json(),
                "vocab_size": self.vocab_size,
                "num_labels": self.num_labels,
                "choices": [choice.model_dump() for choice in self.choices],
                "steps": self.num_steps,
                "budget_bytes": BUDGET_BYTES if is_limited else None,
            }
        )


def bert(num_layers: int, width: int) -> dict[str, Any]:
    shape = {"num_hidden_layers": num_layers, "hidden_size": width, "intermediate_size": 4 * width}
    return {"architecture": "bert", **shape, "num_attention_heads": width // 64}


def gpt2(num_layers: int, width: int, **fields: Any) -> dict[str, Any]:
    return {"architecture": "gpt2", "n_layer": num_layers, "n_embd": width, "n_head": width // 64, **fields}


def recurrent(kind: str, num_layers: int, width: int, **fields: Any) -> dict[str, Any]:
    return {"architecture": kind, "num_layers": num_layers, "embedding_size": width, "hidden_size": width, **fields}


SGD = {"name": "sgd", "lr": 0.01, "arguments": {"momentum": 0.9}}
PLAIN_SGD = {"name": "sgd", "lr": 0.01}
LARGE = {"vocab_size": 30000}
TWO = {"num_labels": 2}
CHUNKED = Choice(technique="chunked_loss", options={"chunk_tokens": 256})
CASES = (
    Case("bert-2x128", bert(2, 128), (8, 64), **TWO),
    Case("bert-4x256", bert(4, 256), (16, 128), **TWO),
    Case("bert-6x256-30k", bert(6, 256), (16, 128), **LARGE, **TWO),
    Case("bert-4x256-micro8", bert(4, 256), (32, 128), micro_batch=8, **TWO),
    Case("bert-4x384-sgd", bert(4, 384), (16, 256), optimizer=PLAIN_SGD, **LARGE, **TWO),
    Case("bert-4x256-bf16", bert(4, 256), (16, 128), precision="bf16", **TWO),
    Case("bert-12x384-30k", bert(12, 384), (4, 64), **LARGE, **TWO),
    Case("bert-2x256-long", bert(2, 256), (8, 512), **TWO),
    Case("gpt2-2x128", gpt2(2, 128), (8, 64), vocab_size=2000),
    Case("gpt2-4x192-micro8", gpt2(4, 192), (32, 256), micro_batch=8),
    Case("gpt2-4x192", gpt2(4, 192), (16, 256)),
    Case("gpt2-4x256-50k", gpt2(4, 256), (8, 256), vocab_size=50257),
    Case("gpt2-4x256-50k-sgd", gpt2(4, 256), (4, 256), vocab_size=50257, optimizer=SGD),
    Case("gpt2-6x384-long", gpt2(6, 384), (4, 512)),
    Case("gpt2-4x256-bf16", gpt2(4, 256), (16, 128), precision="bf16"),
    Case("gpt2-4x192-large", gpt2(4, 192), (32, 512)),
    Case("gpt2-12x512-30k", gpt2(12, 512), (1, 64), **LARGE),
    Case("gpt2-2x128-50k-long", gpt2(2, 128, attn_pdrop=0.0), (1, 1024), vocab_size=50257),
    Case("t5-small", "_rss_worker:t5_small", (8, 128)),
    Case("t5-wide-32k", "_rss_worker:t5_wide", (8, 128), vocab_size=32128),
    Case("t5-wide-micro4", "_rss_worker:t5_wide", (16, 256), micro_batch=4),
    Case("t5-wide-bf16", "_rss_worker:t5_wide", (8, 128), precision="bf16"),
    Case("lstm-1x128", recurrent("lstm", 1, 128), (16, 64), vocab_size=2000),
    Case("lstm-2x512", recurrent("lstm", 2, 512), (16, 128), vocab_size=20000),
    Case("lstm-2x256-micro16", recurrent("lstm", 2, 256, dropout=0.1), (64, 64), micro_batch=16),
    Case("lstm-1x512-long", recurrent("lstm", 1, 512), (32, 256)),
    Case("lstm-2x256-30k-sgd", recurrent("lstm", 2, 256), (16, 128), optimizer=SGD, **LARGE),
    Case("lstm-2x256-both-ways", recurrent("lstm", 2, 256, bidirectional=True), (32, 256), **TWO),
    Case("lstm-2x256-bf16", recurrent("lstm", 2, 256), (16, 128), precision="bf16"),
    Case("gru-2x256", recurrent("gru", 2, 256), (16, 128)),
    Case("gru-1x512-20k", recurrent("gru", 1, 512), (16, 256), vocab_size=20000),
    Case("gru-1x256-both-ways", recurrent("gru", 1, 256, bidirectional=True), (32, 128), **TWO),
    Case("cnn-small", "_rss_worker:cnn_small", (64, 128), **TWO),
    Case("cnn-wide-30k", "_rss_worker:cnn_wide", (64, 512), **LARGE, **TWO),
    Case("cnn-wide-micro16-sgd", "_rss_worker:cnn_wide", (64, 256), micro_batch=16, optimizer=PLAIN_SGD, **TWO),
    Case("cnn-wide-bf16", "_rss_worker:cnn_wide", (64, 256), precision="bf16", **TWO),
    Case("gpt2-6x384-kept-micro2", gpt2(6, 384), (8, 256), micro_batch=2, others=(CHUNKED, KEPT)),
    Case("gpt2-6x384-kept-micro3", gpt2(6, 384), (10, 256), micro_batch=3, others=(CHUNKED, KEPT)),
    Case("gpt2-12x512-30k-kept", gpt2(12, 512), (1, 64), others=(KEPT,), **LARGE),
    Case("gpt2-4x256-bf16-kept", gpt2(4, 256), (16, 128), precision="bf16", others=(KEPT,)),
    Case("bert-4x256-kept", bert(4, 256), (16, 128), others=(KEPT,), **TWO),
    Case("bert-4x256-kept-micro8", bert(4, 256), (32, 128), micro_batch=8, others=(KEPT,), **TWO),
    Case("t5-small-kept", "_rss_worker:t5_small", (8, 128), others=(KEPT,)),
    Case("lstm-2x256-kept-micro16", recurrent("lstm", 2, 256, dropout=0.1), (64, 64), micro_batch=16, others=(KEPT,)),
    Case("gru-1x256-both-ways-kept", recurrent("gru", 1, 256, bidirectional=True), (32, 128), others=(KEPT,), **TWO),
)


@dataclass(frozen=True)
class Row:
    """One run and its prediction; ``live_bytes`` is the result of the live-byte counter."""

    name: str
    predicted: Estimate
    measured_bytes: int
    live_bytes: int

    @property
    def error(self) -> float:
        return self.predicted.likely_bytes / self.measured_bytes - 1

    @property
    def live_error(self) -> float:
        return self.live_bytes / self.measured_bytes - 1

    @property
    def is_inside(self) -> bool:
        return self.predicted.low_bytes <= self.measured_bytes <= self.predicted.high_bytes

    @property
    def half_width(self) -> float:
        return (self.predicted.high_bytes - self.predicted.low_bytes) / 2 / self.predicted.likely_bytes


# -- the truth ---------------------------------------------------------------------------------------------------------


def measured_peak_bytes(case: Case, is_limited: bool) -> int:
    """Train in a separate process, and return its peak private memory."""
    return measured_run(case, is_limited)[0]


def measured_run(case: Case, is_limited: bool) -> tuple[int, list[dict[str, Any]]]:
    """Train in a separate process; return its peak private memory and the output of its steps."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "_rss_worker.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    peaks = [0]
    watcher = threading.Thread(target=watch, args=(process, peaks))
    watcher.start()
    output, errors = process.communicate(case.run(is_limited))
    watcher.join()
    if process.returncode:
        sys.exit(f"{case.name} failed:\n{errors}")
    steps = [json.loads(line) for line in output.splitlines()]
    if any(step["ooms"] for step in steps):
        sys.exit(f"{case.name} ran out of memory: it took other micro-batches than the prediction's")
    return max([peaks[0], *(step["peak_bytes"] for step in steps)]), steps


def watch(process: subprocess.Popen[str], peaks: list[int]) -> None:
    while process.poll() is None:
        try:
            peaks[0] = max(peaks[0], private_bytes(process.pid))
        except OSError:
            return
        time.sleep(POLL_SECONDS)


class Measurements:
    """The measured peaks, stored in a file if one is given."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._kept: dict[str, int] = json.loads(path.read_text()) if path and path.exists() else {}

    def has(self, case: Case, is_limited: bool) -> bool:
        return self._key(case, is_limited) in self._kept

    def _key(self, case: Case, is_limited: bool) -> str:
        return f"{case.name} {'limited' if is_limited else 'default'}"

    def of(self, case: Case, is_limited: bool) -> int:
        key = self._key(case, is_limited)
        if key not in self._kept:
            self._kept[key] = measured_peak_bytes(case, is_limited)
            if self._path is not None:
                self._path.write_text(json.dumps(self._kept, indent=1))
        return self._kept[key]


# -- the prediction ----------------------------------------------------------------------------------------------------


class Predictor:
    """Predictions as in `predict_job`; the process without a model is measured once per kind of model."""

    def __init__(self) -> None:
        self._baselines: dict[str, Estimate] = {}

    def counted(self, case: Case, is_limited: bool) -> Counted:
        job = case.job()
        texts = TextSketch(case.vocab_size, case.num_labels, 0)
        trace = dry_run_job(job, texts, CpuLowering(), case.choices)
        architecture = job.model.get("architecture") if isinstance(job.model, dict) else job.model
        if str(architecture) not in self._baselines:
            self._baselines[str(architecture)] = job_baseline(job)
        baseline = self._baselines[str(architecture)]
        return Target("cpu", 0, 0, "", baseline=baseline, has_budget=is_limited).count(trace, case.choices, True)


def row_of(case: Case, is_limited: bool, measurements: Measurements, predictor: Predictor) -> Row:
    measured_bytes = measurements.of(case, is_limited)
    counted = predictor.counted(case, is_limited)
    return Row(case.name, counted.peak, measured_bytes, counted.live.peak_bytes)


# -- the table ---------------------------------------------------------------------------------------------------------


def figures_of(rows: list[Row]) -> dict[str, float | int]:
    errors = sorted(abs(row.error) for row in rows)
    live = sorted(abs(row.live_error) for row in rows)
    return {
        "n": len(rows),
        "median": round(statistics.median(errors), 4),
        "p90": round(quantile(errors, 0.9), 4),
        "max": round(errors[-1], 4),
        "inside_share": round(sum(row.is_inside for row in rows) / len(rows), 4),
        "median_half_width": round(statistics.median(row.half_width for row in rows), 4),
        "live_bytes_median": round(statistics.median(live), 4),
        "live_bytes_max": round(live[-1], 4),
    }


def cells_of(row: Row) -> list[str]:
    predicted = row.predicted
    return [
        row.name,
        f"{predicted.likely_bytes / MIB:,.0f}",
        f"{predicted.low_bytes / MIB:,.0f} - {predicted.high_bytes / MIB:,.0f}",
        f"{row.measured_bytes / MIB:,.0f}",
        f"{row.error:+.1%}",
        "yes" if row.is_inside else "no",
        f"{row.live_bytes / MIB:,.0f} ({row.live_error:+.0%})",
    ]


GROUPS = (
    ("inside a budget", True, False),
    ("inside a budget, with heap=never", True, True),
    ("without a budget, glibc's own malloc", False, False),
)
"""A title, whether there is a limit, and whether the heap keeps freed memory."""
HEADER = ["case", "predicted MiB", "range", "measured MiB", "error", "inside", "live bytes alone"]


def lines_of(rows: dict[str, list[Row]]) -> list[str]:
    lines: list[str] = []
    for title, body in rows.items():
        figures = figures_of(body)
        lines += [f"## {title}", ""]
        lines += ["| " + " | ".join(cells) + " |" for cells in (HEADER, ["---"] * len(HEADER))]
        lines += ["| " + " | ".join(cells_of(row)) + " |" for row in body]
        shown = ", ".join(f"{name} {value}" for name, value in figures.items())
        lines += ["", f"{shown}.", ""]
    return lines


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=len(CASES), help="number of cases (default: all)")
    parser.add_argument("--quick", action="store_true", help="only one case of each kind of model")
    parser.add_argument("--case", action="append", help="only cases whose name contains this")
    add_out(parser)
    parser.add_argument("--measured", type=Path, help="file that stores the measurements")
    parser.add_argument("--only-measured", action="store_true", help="skip cases that are not in that file")
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.name in QUICK] if arguments.quick else list(CASES)
    if arguments.case:
        cases = [case for case in cases if any(part in case.name for part in arguments.case)]
    chosen = np.unique(np.linspace(0, len(cases) - 1, min(arguments.runs, len(cases))).astype(int))
    sys.path.insert(0, str(HERE))  # for models that are named by a function, here and in the processes
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    measurements, predictor = Measurements(arguments.measured), Predictor()
    rows: dict[str, list[Row]] = {}
    for title, is_limited, keeps in GROUPS:
        rows[title] = []
        print(title, flush=True)
        for number in chosen:
            if cases[number].keeps != keeps:
                continue
            if arguments.only_measured and not measurements.has(cases[number], is_limited):
                continue
            rows[title].append(row_of(cases[number], is_limited, measurements, predictor))
            print("  " + "  ".join(cells_of(rows[title][-1])), flush=True)
    rows = {title: body for title, body in rows.items() if body}
    part = errors_table(
        *((f"private memory of CPU processes {title}", [row.error for row in rows[title]]) for title in rows)
    )
    title = "Predicted and measured private memory of CPU trainings"
    file_result(arguments.out, "predict-rss", title, "\n".join(lines_of(rows)), part)
    figures = [figures_of(body) for body in rows.values()]
    print(json.dumps({**figures[0], **dict(zip(list(rows)[1:], figures[1:], strict=True))}))


if __name__ == "__main__":
    main()
