"""First updates in chunks inside real limits: completed or not begun. Also tests the place of new states."""

import json

import pytest

from processes import run_program

pytestmark = pytest.mark.cold  # free memory in the heap counts

# The first update of models with unequal parameters, with several limits in MiB, each in its own process.
FIRST_UPDATES = """
import gc, json, os, sys
import torch, torch._dynamo  # which optimizers load: once, before the processes are forked
from torch import nn
from plimsoll.device.base import backend_for
from plimsoll.device.process import private_memory
from plimsoll.errors import TornStepError
from plimsoll.step.oom_boundary import Position
from plimsoll.step.update.commit import StepCommit

def dense(*shapes):
    made = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made

def sparse(*rows_with_gradients):
    tables = [nn.Embedding(rows, 64, sparse=True) for rows, _ in rows_with_gradients]
    for table, (_, used) in zip(tables, rows_with_gradients):
        table(torch.arange(used)).sum().backward()
    return [table.weight for table in tables]

KINDS = {
    "tables": (torch.optim.SparseAdam, lambda: sparse((100_000, 100), (99_000, 100), (98_000, 100), (97_000, 100))),
    "one table of many rows": (torch.optim.SparseAdam, lambda: sparse((60_000, 100), (59_000, 100), (58_000, 58_000))),
    "Adafactor": (torch.optim.Adafactor, lambda: dense((1024, 500), *[(499_000,)] * 60)),
}
make, parameters_of = KINDS[sys.argv[1]]
backend = backend_for("cpu")
gc.freeze()  # what was loaded is no garbage of the processes
for free_mib in map(int, sys.argv[2:]):
    if os.fork():
        os.wait()
        continue
    torch.set_num_threads(1)
    parameters = parameters_of()
    optimizer = make(parameters)
    commit = StepCommit(optimizer, backend, Position(phase="optimizer"))
    backend.release()
    with backend.limited(private_memory().private_bytes + (16 << 20) + (free_mib << 20)):
        try:
            commit.step()
            said = "done" if commit.outcome is None else "not begun"
        except TornStepError:
            said = "torn"
    print(json.dumps([said, len(optimizer.state) in (0, len(parameters))]), flush=True)
    os._exit(0)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "free_mibs"),
    [
        ("tables", (40, 80, 120, 160, 190, 200, 400)),
        ("one table of many rows", (60, 95, 110, 130, 150, 400)),
        ("Adafactor", (10, 20, 40, 60, 80, 120, 250)),
    ],
)
def test_a_first_update_is_done_or_not_begun_however_little_room_there_is(kind, free_mibs):
    """Tables have states of all rows and temporaries of some. Adafactor's states have another size for vectors."""
    done = run_program(FIRST_UPDATES, kind, *map(str, free_mibs))
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert [is_whole for _, is_whole in outcomes] == [True] * len(free_mibs), done.stderr
    said = [outcome for outcome, _ in outcomes]
    assert "torn" not in said
    assert (said[0], said[-1]) == ("not begun", "done")


# Prints whether the first of several parameters of 3 MiB and its state are in the heap, for an update at once and in
# chunks.
PLACES = """
import json, os
import torch, torch._dynamo
from plimsoll.device.base import backend_for
from plimsoll.step.oom_boundary import Position
from plimsoll.step.update.commit import StepCommit

def in_heap(tensor):
    parts = [line.split()[0].split("-") for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]")]
    return any(int(begin, 16) <= tensor.data_ptr() < int(end, 16) for begin, end in parts)

for chunk_bytes in (None, 1):
    if os.fork():  # each in a heap of its own: what the first frees would have room for states of the second
        os.wait()
        continue
    backend = backend_for("cpu")
    with backend.limited(backend.use().used_bytes + (500 << 20)):
        parameters = [torch.nn.Parameter(torch.ones(3 << 18)) for _ in range(4)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.Adam(parameters)
        StepCommit(optimizer, backend, Position(phase="optimizer"), chunk_bytes).step()
        found = [in_heap(parameters[0]), in_heap(optimizer.state[parameters[0]]["exp_avg_sq"])]
    print(json.dumps(found), flush=True)
    os._exit(0)
"""


@pytest.mark.long
def test_states_that_come_in_pieces_are_kept_apart_from_gradients():
    """Freed gradients leave holes in the heap, into which an aligned block of their size does not fit."""
    done = run_program(PLACES)
    assert done.returncode == 0, done.stderr
    at_once, in_pieces = map(json.loads, done.stdout.splitlines())
    assert (at_once, in_pieces) == ([True, True], [True, False])
