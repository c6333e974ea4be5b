"""The plain PyTorch loop that the demo compares with: the same model, samples and optimizer in a typical loop.

    python benchmarks/_plain_loop.py JOB PREPARED --steps 2 [--limit 1GiB]

Prints one JSON object per step. Under ``--limit`` it ends with an out-of-memory error.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path

import torch

import plimsoll
from plimsoll.device.base import backend_for
from plimsoll.models.assemble import assemble, choose_device
from plimsoll.records.prepared import Prepared


def main() -> None:
    """Train for a few steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--limit")
    arguments = parser.parse_args()
    job, prepared = plimsoll.Job.from_yaml(arguments.job), Prepared.load(arguments.prepared)
    device = choose_device(job)
    backend = backend_for(device)
    with plimsoll.limited(arguments.limit, device) if arguments.limit else nullcontext():
        parts = assemble(job, prepared, device)
        for _ in range(arguments.steps):
            started = time.perf_counter()
            batch = {name: tensor.to(device) for name, tensor in parts.loader.peek().fields.items()}
            parts.optimizer.zero_grad()
            loss = parts.model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parts.model.parameters(), job.optimizer.clip_norm)
            parts.optimizer.step()
            parts.loader.advance()
            seconds = time.perf_counter() - started
            print(
                json.dumps({"loss": loss.item(), "seconds": seconds, "peak_bytes": backend.use().peak_bytes}),
                flush=True,
            )


if __name__ == "__main__":
    main()
