"""The tasks of the headline experiment: four models, each with a job, five batches and initial weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import save_file

import plimsoll
from demo import standard_library
from plimsoll.data.prepare import prepare
from plimsoll.models.assemble import assemble
from plimsoll.report.progress import stages

STEPS = 5
LEARNING_RATE = 1e-4  # as in rivals/train.py
_NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
_LSTM = {"embedding_size": 1500, "hidden_size": 1500, "num_layers": 2}
_CLASSES = ("asyncio", "email", "idlelib", "test")  # folders of the standard library; the last one is large


@dataclass(frozen=True, eq=False)
class Task:
    """A model and the batch of one optimizer step.

    ``blocks`` tells whether the model has blocks that `gradient_checkpointing_enable` recomputes.
    """

    name: str
    title: str
    batch_size: int
    length: int
    job: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    blocks: bool = True


def tasks() -> list[Task]:
    """Return four tasks: GPT-2 124M, BERT-base, T5-small and an LSTM as in Zaremba et al. 2014 (arXiv:1409.2329)."""
    words = {"train": "words", "vocab_size": 10_000}
    return [
        Task(
            "gpt2", "GPT-2 124M", 8, 128, config=_NO_DROPOUT["gpt2"],
            job={"model": {"architecture": "gpt2", **_NO_DROPOUT["gpt2"]}, "tokenizer": _bpe(50_257)},
        ),
        Task(
            "bert", "BERT-base", 8, 128, config={"num_labels": len(_CLASSES), **_NO_DROPOUT["bert"]},
            job={
                "model": {"architecture": "bert", **_NO_DROPOUT["bert"]}, "tokenizer": _bpe(30_522),
                "task": "classification",
            },
        ),
        Task("t5", "T5-small", 16, 128, job={"model": "models:prefix_t5", "tokenizer": _bpe(32_128)}),
        Task(
            "lstm", "LSTM, 2 layers of 1500", 16, 128, config=_LSTM, blocks=False,
            job={"model": {"architecture": "lstm", **_LSTM}, "tokenizer": words},
        ),
    ]  # fmt: skip


def _bpe(vocab_size: int) -> dict[str, Any]:
    return {"train": "bpe", "vocab_size": vocab_size}


def write_task(task: Task, folder: Path, data: str | None) -> None:
    """Write the job, and the batches and weights that the other tools need for the same training."""
    folder.mkdir(parents=True, exist_ok=True)
    job_file = folder / "job.yaml"
    fields = {
        **task.job,
        "data": {"train": texts(task, data)},
        "sequence_length": task.length,
        "batch_size": task.batch_size,
        "optimizer": {"name": "adamw", "lr": LEARNING_RATE, "weight_decay": 0.0},
        "steps": STEPS,
        "checkpoint": {"every": STEPS, "keep": 1},
        "device": "cpu",
    }
    job_file.write_text(yaml.safe_dump(fields, sort_keys=False), encoding="utf-8")
    if (folder / "weights.safetensors").exists():
        return
    job = plimsoll.Job.from_yaml(job_file)
    with stages(quiet=False) as progress:
        prepared = prepare(job, folder / "cache", progress)
    parts = assemble(job, prepared, "cpu")
    batches = {}
    for number in range(STEPS):
        batches |= {f"{number}.{name}": tensor.clone() for name, tensor in parts.loader.peek().fields.items()}
        parts.loader.advance()
    save_file(batches, folder / "batches.safetensors")
    config = {**task.config, "vocab_size": prepared.vocab_size}
    (folder / "task.json").write_text(json.dumps({"model": task.name, "config": config}))
    weights = {name: parameter.detach() for name, parameter in parts.model.named_parameters()}
    save_file(weights, folder / "weights.safetensors")


def texts(task: Task, data: str | None) -> list[str]:
    """Return the text patterns of a task: the standard library's sources, or folders in ``data``, one per class."""
    if data is not None:
        return [str(Path(data).resolve() / "**" / "*")]
    if task.name != "bert":
        return standard_library()
    root = Path(json.__file__).parents[1]
    return [str(root / name / "*.py") for name in _CLASSES]
