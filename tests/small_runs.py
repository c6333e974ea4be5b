"""A run directory of a tiny LSTM language model, ready to train: 60 steps per epoch of 8 samples of 32 tokens."""

from __future__ import annotations

from pathlib import Path

from plimsoll.data.prepare import prepare
from plimsoll.records.job import Job
from plimsoll.records.plan import micro_batch_plan
from plimsoll.step.recovery import micro_batch_sizes
from plimsoll.training.run_directory import RunDirectory
from plimsoll.training.session import Session

MODEL = {"architecture": "lstm", "embedding_size": 8, "hidden_size": 8, "dropout": 0.1}


def small_job(text: Path, **changes: object) -> Job:
    """Return the job, with some of its fields replaced."""
    fields: dict[str, object] = {
        "model": MODEL,
        "data": {"train": str(text), "validation": 0.1},
        "tokenizer": {"vocab_size": 300},
        "sequence_length": 32,
        "batch_size": 8,
        "optimizer": {"lr": 0.01, "clip_norm": 1.0},
        "steps": 6,
        "checkpoint": {"every": 2, "keep": 2},
    }
    return Job.from_fields(fields | changes)


def write_text(path: Path) -> Path:
    """Write some 60 KB of text with learnable patterns."""
    words = ["the", "line", "on", "the", "hull", "shows", "how", "deep", "the", "ship", "may", "be", "loaded"]
    lines = (" ".join(words[(i * k) % len(words)] for k in range(1, 13)) + f" {i}." for i in range(1000))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def make_run(path: Path, job: Job, cache: Path) -> RunDirectory:
    """Create a run directory before any training."""
    directory = RunDirectory.create(path, force=False)
    directory.write_job(job)
    micro_batch_plan(job.budget, micro_batch_sizes(job.batch_size)).save(directory.plan)
    prepare(job, cache).save(directory.prepared)
    return directory


def train_here(directory: RunDirectory, **options: object) -> None:
    """Train in this process."""
    Session(directory.path, **({"quiet": True} | options)).run()  # type: ignore[arg-type]
