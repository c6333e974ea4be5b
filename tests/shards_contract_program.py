"""The program of each rank in `tests/contract/test_contract_shards.py`: the contract of a technique for several ranks.

`tests.ranks_started` starts it once for all cases. Each case is compared with one process here; the first difference
ends the ranks with its error.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tests.technique_trainings import (
    NUM_STEPS,
    STRICTEST_FIRST,
    Gradients,
    Setup,
    Trained,
    configuration_of,
    differing,
    expected_of,
    numerics_of,
    require_the_same,
    require_the_same_gradients,
    setup_for,
    shape_of,
)
from tests.workloads import units_of, weights_of
from torch import Tensor

from plimsoll.data.batch import split_batch
from plimsoll.distributed.ranks import Ranks, joined
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice
from plimsoll.step.failpoints import armed
from plimsoll.step.micro_batches import autocast
from plimsoll.techniques import activation_offload, in_order, installed


def do(ranks: Ranks, case: dict[str, Any]) -> list[Any]:
    """Check the contract with the choices of a case, with memory running out in its phase on its rank; return the
    events.
    """
    choices = in_order(Choice(**choice) for choice in case["choices"])
    names = [choice.technique for choice in choices]
    setup = setup_for(case["training"], names)._replace(dropout=0.0, optimizer="sgd")
    numerics = max(numerics_of(choices), "reordered", key=STRICTEST_FIRST.index)
    if "phase" not in case:
        require_the_same_gradients(restored(ranks, setup, choices), expected_gradients_of(setup), numerics)
    failing = armed(case["phase"], 2, 3) if case.get("rank") == ranks.rank else nullcontext()
    with failing:
        found = trained(ranks, setup, choices)
    require_the_same(found, expected_of(setup), numerics)
    return [(event.phase, event.rank) for event in found.events]


def expected_gradients_of(setup: Setup) -> Gradients:
    """Return the gradients of one process in the first step."""
    workload = setup.workload()
    torch.manual_seed(2)
    loss = workload.loss(workload.model, setup.case.batches()[0])
    loss.backward()
    named = workload.model.named_parameters()
    return loss.item(), {name: one.grad for name, one in named if one.grad is not None}


def part_of(ranks: Ranks, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: field[ranks.rank :: ranks.world_size].contiguous() for name, field in batch.items()}


def restored(ranks: Ranks, setup: Setup, choices: tuple[Choice, ...]) -> Gradients:
    """Check the state without and with a use; return the gradients of the use, from all ranks."""
    workload = setup.workload()
    workload.ranks = ranks
    with torch.no_grad():  # a classifier determines its kind of problem here
        workload.loss(workload.model, part_of(ranks, setup.case.batches()[0]))
    before, numbers = shape_of(workload), weights_of(workload.model, workload.optimizer)
    with installed(workload, choices):
        pass
    assert differing(before, shape_of(workload)) == []
    after = weights_of(workload.model, workload.optimizer)
    assert [name for name in numbers if not torch.equal(numbers[name], after[name])] == []
    with installed(workload, choices):
        found = gradients_of_all(ranks, setup, workload)
        workload.hooks.sharding.reset()
    assert differing(before, shape_of(workload)) == [], differing(before, shape_of(workload))
    return found


def gradients_of_all(ranks: Ranks, setup: Setup, workload: Workload) -> Gradients:
    batch = setup.case.batches()[0]
    part = part_of(ranks, batch)
    with autocast(workload):
        loss = workload.loss(workload.model, part) * (units_of(setup.case, part) / units_of(setup.case, batch))
    loss.backward()
    sharded: Any = workload.hooks.sharding
    sharded.hand_over()
    total = ranks.add_up(loss.detach().double().reshape(1)).item()
    have_one = {name: rows for name, rows in sharded.rows.items() if rows.grad is not None}
    return total, {name: sharded.whole_of(rows.grad, sharded.shapes[name]) for name, rows in have_one.items()}


def trained(ranks: Ranks, setup: Setup, choices: tuple[Choice, ...]) -> Trained:
    per_rank = len(part_of(ranks, setup.case.batches()[0])["labels"])
    fallbacks = [configuration_of(*choices, samples=per_rank)]
    if not any(choice.technique == "micro_batch" for choice in choices):
        fallbacks += [configuration_of(*choices, samples=samples) for samples in (per_rank // 2, 1)]
    step = setup.step(fallbacks, ranks=ranks)
    model, optimizer = step.workload.model, step.workload.optimizer
    results = [step(part_of(ranks, batch)) for batch in setup.case.batches()[:NUM_STEPS]]
    step.evaluate([part_of(ranks, batch) for batch in split_batch(setup.case.batches()[0], 3)])
    step.close()
    events = [event for result in results for event in result.oom_events]
    return Trained([result.loss for result in results], weights_of(model, optimizer), events)


def main(folder: Path) -> None:
    """Run every case of ``cases.json``, and write the events of each in one line."""
    torch.set_num_threads(1)
    activation_offload.LEAST_BYTES = 1 << 10  # these models have no larger storages
    with joined() as ranks, (folder / f"rank-{ranks.rank}.jsonl").open("w") as file:
        for case in json.loads((folder / "cases.json").read_text()):
            try:
                file.write(json.dumps(do(ranks, case)) + "\n")
            except AssertionError as error:
                error.add_note(f"case {case}")
                raise
            file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
