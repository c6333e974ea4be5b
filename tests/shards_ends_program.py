"""The program of each rank in `tests/numerics/test_shards.py` for failing ends: ranks differ, or memory runs out.

`tests.ranks_started` starts it in two processes; each writes how it ended.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tests.ranks_program import batch_of, fallbacks_of, loss_of, part_of, stacked_model

from plimsoll.distributed.ranks import Ranks, joined
from plimsoll.errors import PlimsollError
from plimsoll.step.failpoints import exhaust_memory
from plimsoll.step.train_step import TrainStep


def end_badly(ranks: Ranks, case: dict[str, Any]) -> str:
    """Train a step and assemble the whole model; return the resulting error."""
    model = stacked_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = TrainStep(model, optimizer, loss_of, units="samples", ranks=ranks, fallbacks=fallbacks_of(case))
    if ranks.rank == 1 and "skipped" in case:
        leave_out(model, case["skipped"])
    try:
        step(part_of(batch_of(0), ranks))
        if case.get("short_at_end") == ranks.rank:
            run_out_of_memory_in(step.workload.hooks.sharding, call=4)
        step.close()
    except PlimsollError as error:
        return f"{type(error).__name__}: {error}"
    return "well"


def leave_out(model: Any, what: str) -> None:
    """Make the samples of this rank bypass a part of the model."""
    if what == "block":
        model.forward = lambda features: without_a_block(model, features)
    else:
        model.blocks[1].norm.forward = lambda hidden: hidden


def without_a_block(model: Any, features: torch.Tensor) -> torch.Tensor:
    """Run the model without its second block."""
    hidden = model.first(features)
    for block in (model.blocks[0], model.blocks[2]):
        hidden = block(hidden)
    logits: torch.Tensor = model.last(hidden)
    return logits


def run_out_of_memory_in(sharded: Any, call: int) -> None:
    """Make memory run out on this rank while one of the parameters is assembled."""
    whole_of, calls = sharded.whole_of, []

    def short_of_memory(*args: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == call:
            exhaust_memory()
        whole: torch.Tensor = whole_of(*args)
        return whole

    sharded.whole_of = short_of_memory


def main(folder: Path) -> None:
    """Run every case of ``cases.json``, and write the end of each in one line."""
    with joined() as ranks, (folder / f"rank-{ranks.rank}.jsonl").open("w") as file:
        for case in json.loads((folder / "cases.json").read_text()):
            file.write(json.dumps(end_badly(ranks, case)) + "\n")
            file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
