"""A recurrent run that is saved and resumed: cuDNN's LSTM with dropout, whose model must be bitwise identical."""

from __future__ import annotations

import filecmp
import shutil

import yaml
from benchmarks.gpu.part_job import job_file
from benchmarks.gpu.parts import Task, run

from plimsoll.records.run import RunRecord

STEPS, SAVED_STEP = 8, 4


def run_part(task: Task) -> None:
    job_file(task)  # also writes the text
    job = {
        "model": {"architecture": "lstm", "num_layers": 2, "hidden_size": 256, "embedding_size": 128, "dropout": 0.3},
        "task": "language-modeling", "data": {"train": str(task.folder / "text.txt")},
        "tokenizer": {"train": "bpe", "vocab_size": 1000}, "sequence_length": 64, "batch_size": 16, "steps": STEPS,
        "optimizer": {"name": "adamw", "lr": 3e-4}, "checkpoint": {"every": SAVED_STEP, "keep": 3},
        "device": task.device.partition(":")[0],
    }  # fmt: skip
    path, whole, resumed = task.folder / "lstm.yaml", task.folder / "lstm", task.folder / "lstm-resumed"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    words = ("-m", "plimsoll", "train")
    done = run(task, *words, str(path), "--no-plan", "--out", str(whole), "--force", "-q")
    if done.code == 0:
        shutil.rmtree(resumed, ignore_errors=True)
        shutil.copytree(whole, resumed)
        shutil.rmtree(resumed / "model")
        done = run(task, *words, "--resume", "--from-step", str(SAVED_STEP), "--out", str(resumed), "-q")
    if done.code is None:
        task.not_reached(f"its end in {done.seconds:.0f} s")
        return
    if done.code:
        task.check("an LSTM trains and goes on", f"exit code {done.code}: {done.last_line}", 0, ok=False)
        return
    one, other = (RunRecord.from_directory(folder) for folder in (whole, resumed))
    losses = [[step.loss for step in record.steps] for record in (one, other)]
    task.check(f"losses, gone on after step {SAVED_STEP} of {STEPS}", "the same" if losses[0] == losses[1] else losses,
               "the same bits", losses[0] == losses[1])  # fmt: skip
    is_same = filecmp.cmp(*(folder / "model" / "model.safetensors" for folder in (whole, resumed)), shallow=False)
    task.check("its model, to the bit", "the same" if is_same else "another", "the same bits", is_same)
