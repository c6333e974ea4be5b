"""One training as in `plimsoll train`, on random tokens, for `predict_cpu_rss.py`: models and the process.

    python benchmarks/_rss_worker.py < run.json

The JSON has the ``job``, ``vocab_size``, ``num_labels``, ``choices`` (including a micro-batch), ``steps`` and
``budget_bytes`` (``null`` for no limit, with glibc's default malloc). Every step prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.records.job import Job
from plimsoll.records.plan import Choice
from plimsoll.step.recovery import samples_of_rank

# -- models that a job names by their function -------------------------------------------------------------------------


def t5(width: int, num_layers: int, vocab_size: int) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": width, "d_kv": 32, "num_heads": width // 32, "d_ff": 4 * width, "num_layers": num_layers}
    config = T5Config(**shape, vocab_size=vocab_size, use_cache=False, decoder_start_token_id=0, pad_token_id=0)
    return T5ForConditionalGeneration(config)


def t5_small(vocab_size: int) -> nn.Module:
    return t5(128, 2, vocab_size)


def t5_wide(vocab_size: int) -> nn.Module:
    return t5(256, 3, vocab_size)


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


class TextCnn(nn.Module):
    """Convolutions of three widths over the tokens, with max pooling over time: Kim 2014 (arXiv:1408.5882)."""

    def __init__(self, vocab_size: int, num_labels: int, width: int, channels: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.convolutions = nn.ModuleList([nn.Conv1d(width, channels, size, padding="same") for size in (3, 5, 7)])
        self.head = nn.Linear(3 * channels, num_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Output:
        embedded_BET = self.embedding(input_ids).transpose(1, 2)
        pooled = [functional.relu(layer(embedded_BET)).amax(dim=2) for layer in self.convolutions]
        logits_BL = self.head(functional.dropout(torch.cat(pooled, dim=1), 0.5, self.training))
        return Output(functional.cross_entropy(logits_BL, labels), logits_BL)


def cnn_small(vocab_size: int, num_labels: int) -> nn.Module:
    return TextCnn(vocab_size, num_labels, 128, 128)


def cnn_wide(vocab_size: int, num_labels: int) -> nn.Module:
    return TextCnn(vocab_size, num_labels, 256, 384)


# -- the process -------------------------------------------------------------------------------------------------------


def main() -> None:
    run = json.load(sys.stdin)
    job = Job.from_json(run["job"])
    from plimsoll.device.base import backend_for
    from plimsoll.distributed.ranks import joined
    from plimsoll.models import assemble  # noqa: F401  -- as a training process imports
    from plimsoll.models.build import build_model
    from plimsoll.models.optimizers import build_optimizer
    from plimsoll.planning.baseline import load_libraries
    from plimsoll.planning.lean_imports import leave_out_unused
    from plimsoll.step.job_step import step_of
    from plimsoll.techniques.mechanisms.allocators import set_up_as_with, set_up_for_steps
    from plimsoll.training import loop  # noqa: F401

    choices = tuple(Choice(**choice) for choice in run["choices"])
    with ExitStack() as stack:
        ranks = stack.enter_context(joined())  # a single process, unless torchrun's environment defines ranks
        leave_out_unused(job, is_own=True)
        load_libraries(job)
        build_model(job, run["vocab_size"], run["num_labels"], 0, device="meta")  # imports the model's modules
        backend = backend_for("cpu")
        if run["budget_bytes"] is not None:
            backend.baseline_bytes()
            stack.enter_context(backend.limited(run["budget_bytes"]))
        torch.manual_seed(job.seed)
        set_up_as_with(choices, "cpu")
        model = build_model(job, run["vocab_size"], run["num_labels"], 0).train()
        optimizer = build_optimizer(job.optimizer, model.parameters())
        step = step_of(job, model, optimizer, [choices], ranks=ranks)
        set_up_for_steps(choices)
        for _ in range(run["steps"]):
            started = time.process_time()
            result = step(batch_of(job, run["vocab_size"], run["num_labels"]))
            use = backend.use()
            backend.reset_peak()
            line = {"loss": result.loss, "seconds": result.step_seconds, "ooms": len(result.oom_events)}
            line["cpu_seconds"] = time.process_time() - started
            print(json.dumps({**line, "used_bytes": use.used_bytes, "peak_bytes": use.peak_bytes}), flush=True)


def batch_of(job: Job, vocab_size: int, num_labels: int | None) -> dict[str, Any]:
    num_samples = samples_of_rank(job)
    input_ids = torch.randint(vocab_size, (num_samples, job.sequence_length))
    if num_labels is None:
        return {"input_ids": input_ids, "labels": input_ids}
    labels = torch.randint(num_labels, (num_samples,))
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels}


if __name__ == "__main__":
    main()
