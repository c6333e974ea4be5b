"""The program of each rank in the tests of sharded checkpoints: some sharded steps, from a checkpoint and to one.

`tests.ranks_started` starts one process per rank; rank 0 writes the final weights.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tests.ranks_program import batch_of, fallbacks_of, loss_of, stacked_model

from plimsoll.distributed.ranks import PeerOutOfMemory, Ranks, joined
from plimsoll.step.failpoints import armed
from plimsoll.step.train_step import TrainStep
from plimsoll.training import checkpoint, sharded_checkpoint

MARKS = {"job": "of the test"}


def go_on(ranks: Ranks, case: dict[str, Any]) -> list[float]:
    """Train from the newest checkpoint below ``root`` to a step, and write a checkpoint there; return the weights."""
    model = stacked_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = TrainStep(
        model, optimizer, loss_of, units="samples", clip_norm=1.0, ranks=ranks, fallbacks=fallbacks_of(case)
    )
    root = Path(case["root"])
    saved = checkpoint.newest_good(root, MARKS)
    if saved is not None:
        is_whole = not step.workload.hooks.sharding.is_sharded and not sharded_checkpoint.is_sharded(saved)
        saved.restore(model, optimizer) if is_whole else sharded_checkpoint.restore(saved, step.workload)
        step.load_state_dict(saved.progress["training_step"])
    while step.num_steps < case["until"]:
        step({name: field[ranks.rank :: ranks.world_size] for name, field in batch_of(step.num_steps).items()})
    facts: dict[str, Any] = {
        "random_state": {},
        "progress": {"fingerprint": MARKS, "training_step": step.state_dict()},
        "keep": 2,
    }
    if "short_of_memory" in case:
        fails_to_write(case["short_of_memory"], step, root, facts)
    if not step.workload.hooks.sharding.is_sharded:
        if ranks.rank == 0:
            checkpoint.save(root, step.num_steps, model=model, optimizer=optimizer, **facts)
    else:
        sharded_checkpoint.save(root, step.num_steps, workload=step.workload, ranks=ranks, **facts)
    step.close()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def fails_to_write(rank: int, step: TrainStep, root: Path, facts: dict[str, Any]) -> None:
    """Try to write a checkpoint without memory on one rank: all ranks are told which one, and no file remains."""
    try:
        with armed("checkpoint", 1) if rank == step.ranks.rank else nullcontext():
            sharded_checkpoint.save(root, step.num_steps, workload=step.workload, ranks=step.ranks, **facts)
        raise AssertionError("a checkpoint was written without memory")
    except PeerOutOfMemory as error:
        told = error.rank, f"memory ran out on rank {rank}: " in str(error)
    assert told == (rank, True)
    step.ranks.agree(False)
    assert not list(root.glob(f"*step-{step.num_steps:08d}*"))
    step.ranks.agree(False)


def main(folder: Path) -> None:
    """Run every case of ``cases.json``, and write the result of each in one line."""
    with joined() as ranks, (folder / f"rank-{ranks.rank}.jsonl").open("w") as file:
        for case in json.loads((folder / "cases.json").read_text()):
            file.write(json.dumps(go_on(ranks, case)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
