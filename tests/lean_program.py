"""The use of torch and transformers in a command's process, as JSON; `test_run_imports` compares it with its own.

Started as a program it is a command's process, which skips modules that its job does not use.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import Any

from plimsoll.cli.main import main  # noqa: F401  -- by which a command's process is known
from plimsoll.planning.lean_imports import leave_out_unused
from plimsoll.records.job import Job

JOB = Job.from_fields(
    {
        "model": {"architecture": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2},
        "data": {"train": "nowhere.txt"},
        "sequence_length": 8,
        "batch_size": 4,
    }
)
LEFT_OUT = ("accelerate", "peft", "scipy", "sklearn", "torch._inductor", "torch._dynamo.symbolic_convert", "torchao")


def traces() -> list[str]:
    """Trace the job for a CPU and a GPU, with checkpoints."""
    from plimsoll.data.quick_facts import TextSketch
    from plimsoll.memory.lowering.cpu import CpuLowering
    from plimsoll.memory.lowering.cuda import CudaLowering
    from plimsoll.planning.dry_run.step import dry_run_job
    from plimsoll.records.plan import Choice, micro_batch_choice

    texts = TextSketch(vocab_size=300, num_labels=None, end_id=0)
    choices = (micro_batch_choice(2), Choice(technique="checkpointing", options={"blocks": "all"}))
    return [dry_run_job(JOB, texts, lowering, choices).to_json() for lowering in (CpuLowering(), CudaLowering((8, 6)))]


def losses() -> list[str]:
    """Train the job's model for three steps with checkpoints, and return the exact losses."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from plimsoll.models.build import build_model

    torch.manual_seed(0)
    model = build_model(JOB, 300, None, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.arange(32).reshape(4, 8)
    said = []
    for _ in range(3):
        loss = checkpoint(lambda ids: model(input_ids=ids, labels=ids).loss, ids, use_reentrant=False)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said.append(loss.item().hex())
    return said


if __name__ == "__main__":
    leave_out_unused(JOB)
    said: dict[str, Any] = {"traces": traces(), "losses": losses()}
    said["loaded"] = [name for name in LEFT_OUT if name in sys.modules]
    said["findable"] = all(find_spec(name) for name in ("accelerate", "scipy", "torchao"))
    print(json.dumps(said))
